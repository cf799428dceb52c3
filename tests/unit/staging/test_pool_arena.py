"""Pinned memory of an arena: each byte is pinned once, whatever it grows to, and let go before it moves."""

from __future__ import annotations

import random

import pytest

from asyncckpt.errors import DeviceError
from asyncckpt.staging import pool as pool_module
from asyncckpt.staging.pool import MAPPED_UNIT_BYTES, Arena

UNIT = MAPPED_UNIT_BYTES


class Pinner:
    """Notes what is pinned, as CUDA does: no byte twice, and as a whole what was registered as a whole."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.registered_bytes = 0
        self.refuses_after: int | None = None

    def register(self, address: int, bytes: int) -> None:
        if self.refuses_after is not None and len(self.pinned) >= self.refuses_after:
            raise DeviceError("no memory can be pinned")
        assert not any(address < at + size and at < address + bytes for at, size in self.pinned.items())
        self.pinned[address] = bytes
        self.registered_bytes += bytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]

    def holds(self, begin: int, end: int) -> bool:
        """Whether a range is pinned without a gap."""
        at = begin
        for address, bytes in sorted(self.pinned.items()):
            at = max(at, address + bytes) if address <= at else at
        return at >= end


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PINNED_PIECE_BYTES", 3 * UNIT, raising=False)


def test_a_range_that_grows_is_not_pinned_again() -> None:
    arena, pinner = Arena(), Pinner()
    arena.ensure(20 * UNIT)
    for first, last in ((5, 6), (5, 9), (2, 9), (3, 8), (0, 20)):
        arena.pin(first * UNIT, last * UNIT, pinner)
        assert pinner.holds(arena.address + first * UNIT, arena.address + last * UNIT)
    assert pinner.registered_bytes == 20 * UNIT
    arena.close()
    assert pinner.pinned == {}


def test_an_arena_that_grows_little_by_little_pins_what_is_new() -> None:
    """Registering takes longer than copying: all of it again at each growth would stop a trainer for seconds."""
    arena, pinner = Arena(), Pinner()
    moves, before = 0, arena.address
    for units in range(4, 40):
        arena.ensure(units * UNIT)
        moves += arena.address != before
        before = arena.address
        arena.pin(0, units * UNIT, pinner)
    assert pinner.holds(arena.address, arena.address + 39 * UNIT)
    assert pinner.registered_bytes <= 3 * 40 * UNIT  # 36 growths; some of them may move it.
    arena.close()


def test_a_piece_that_is_refused_leaves_those_before() -> None:
    arena, pinner = Arena(), Pinner()
    arena.ensure(9 * UNIT)
    pinner.refuses_after = 2
    with pytest.raises(DeviceError):
        arena.pin(0, 9 * UNIT, pinner)
    assert sorted(pinner.pinned.items()) == sorted(arena.pinned_pieces)
    assert arena.pinned == (arena.address, 6 * UNIT)
    pinner.refuses_after = None
    arena.pin(0, 9 * UNIT, pinner)
    assert pinner.registered_bytes == 9 * UNIT
    arena.close()
    assert pinner.pinned == {}


@pytest.mark.parametrize("seed", range(10))
def test_what_an_arena_says_is_pinned_is(seed: int) -> None:
    choices, arena, pinner = random.Random(seed), Arena(), Pinner()
    for _ in range(30):
        pinner.refuses_after = choices.choice([None, None, None, len(pinner.pinned)])
        if choices.random() < 0.4:
            arena.ensure(choices.randrange(1, 24) * UNIT)
        elif arena.touched_bytes:
            begin = choices.randrange(arena.touched_bytes)
            try:
                arena.pin(begin, choices.randrange(begin, arena.touched_bytes) + 1, pinner)
            except DeviceError:
                assert pinner.refuses_after is not None
        assert sorted(arena.pinned_pieces) == sorted(pinner.pinned.items())
        begin, bytes = arena.pinned
        assert pinner.holds(begin, begin + bytes)
        assert sum(pinner.pinned.values()) == bytes
    arena.close()
    assert pinner.pinned == {}
