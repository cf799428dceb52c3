"""Which arena a save gets: one that it can bring up to date before all others, one of use to another save last."""

from __future__ import annotations

import pytest

from asyncckpt.errors import DeadlineError
from asyncckpt.model.row_places import ArenaContents
from asyncckpt.staging.pool import Arena, ArenaPool

MIB = 1 << 20
LAYOUT, OTHER = object(), object()


def filled(pool: ArenaPool, bytes: int, layout: object) -> Arena:
    """An arena that holds a snapshot."""
    arena = pool.acquire(bytes, deadline_s=1, limit_bytes=1000 * MIB)
    arena.contents = ArenaContents(layout=layout, tables={})
    pool.release(arena)
    return arena


def take(pool: ArenaPool, bytes: int, layout: object = None, limit_bytes: int = 1000 * MIB) -> Arena:
    return pool.acquire(bytes, deadline_s=0, limit_bytes=limit_bytes, layout=layout)


def test_one_whose_contents_can_be_used_comes_first() -> None:
    pool = ArenaPool()
    first = filled(pool, 2 * MIB, LAYOUT)
    second = filled(pool, 2 * MIB, OTHER)
    assert second is not first
    assert take(pool, MIB, LAYOUT) is first
    assert first.contents is not None
    assert take(pool, MIB, OTHER) is second


def test_a_small_save_does_not_take_an_arena_of_use() -> None:
    pool = ArenaPool()
    first = filled(pool, 8 * MIB, LAYOUT)
    small = take(pool, MIB)
    assert small is not first
    pool.release(small)
    assert take(pool, MIB) is small
    assert first.contents is not None


def test_without_room_for_a_second_one_the_contents_go() -> None:
    pool = ArenaPool()
    first = filled(pool, 8 * MIB, LAYOUT)
    assert take(pool, MIB, limit_bytes=8 * MIB) is first
    assert first.contents is None


def test_two_are_the_most() -> None:
    pool = ArenaPool()
    filled(pool, 2 * MIB, LAYOUT)
    second = filled(pool, 2 * MIB, OTHER)
    third = take(pool, MIB)
    assert third.contents is None
    assert take(pool, MIB) in (second, *pool._arenas)
    with pytest.raises(DeadlineError):
        take(pool, MIB)


def test_an_arena_that_comes_back_at_the_deadline_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives it back wakes one waiter, and the others go on waiting."""
    pool = ArenaPool()
    held = [take(pool, MIB), take(pool, MIB)]

    def timed_out(timeout: float | None = None) -> bool:
        pool.release(held.pop())
        return False

    monkeypatch.setattr(pool._changed, "wait", timed_out)
    last = held[-1]
    assert pool.acquire(MIB, deadline_s=20, limit_bytes=1000 * MIB) is last


def test_contents_are_forgotten_with_their_layout() -> None:
    pool = ArenaPool()
    first = filled(pool, 2 * MIB, LAYOUT)
    pool.forget(OTHER)
    assert first.contents is not None
    pool.forget(LAYOUT)
    assert first.contents is None
    assert take(pool, MIB, OTHER) is first


def test_what_is_lent_is_in_nobodys_way() -> None:
    pool = ArenaPool()
    lent, first = take(pool, MIB), take(pool, MIB)
    lent.seal()
    pool.lend(lent)
    second = take(pool, MIB)
    assert second not in (lent, first)
    with pytest.raises(DeadlineError):
        take(pool, MIB)
    pool.release(first)
    assert pool.statistics().arenas_count == 3
    pool.release(lent)
    assert pool.statistics().arenas_count == 2, "the one that came back is given to the system"
    assert take(pool, MIB) is first
