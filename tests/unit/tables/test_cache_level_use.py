"""Which rows of a cache level are evicted, and that finding them does not look at the whole cache each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.tables.cache_level import AWAITED_LOOKUPS_MAX, CacheUse

ROWS = 12
LOOKUPS = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=6), max_size=20)


def used_after(lookups: list[list[int]], *, policy: str) -> CacheUse:
    use = CacheUse(ROWS, policy=policy)
    for rows in lookups:
        use.begin_lookup()
        use.touch(np.array(rows, dtype=np.int64))
    return use


def full() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(ROWS, dtype=np.int64)


@settings(max_examples=100, deadline=None)
@given(lookups=LOOKUPS, count=st.integers(1, ROWS), policy=st.sampled_from(["lru", "lfu"]))
def test_victims_are_the_least_used(lookups: list[list[int]], count: int, policy: str) -> None:
    use = used_after(lookups, policy=policy)
    use.begin_lookup()
    last = {row: number + 1 for number, rows in enumerate(lookups) for row in rows}
    hits = {row: sum(row in rows for rows in lookups) for row in range(ROWS)}
    keys = {row: (hits[row] if policy == "lfu" else 0, last.get(row, 0)) for row in range(ROWS)}
    victims = use.victims(count, used=full(), awaited_too=False).tolist()
    assert len(set(victims)) == len(victims) == count
    kept = set(range(ROWS)) - set(victims)
    assert all(keys[victim] <= keys[row] for victim in victims for row in kept)


def test_rows_of_the_latest_lookup_never_go() -> None:
    use = used_after([[0, 1], [2, 3, 4]], policy="lru")
    victims = use.victims(ROWS, used=full(), awaited_too=True)
    assert sorted(victims.tolist()) == [0, 1, *range(5, ROWS)]


def test_free_rows_are_no_victims() -> None:
    use, used = used_after([[0, 1, 2]], policy="lru"), np.full(ROWS, -1, dtype=np.int64)
    use.begin_lookup()
    used[1] = 7
    assert use.victims(3, used=used, awaited_too=False).tolist() == [1]


def test_awaited_rows_go_only_when_asked_for() -> None:
    use = used_after([[]], policy="lru")
    use.begin_lookup()
    use.begin_rows(full(), awaited=True)
    use.begin_lookup()
    use.touch(np.array([3], dtype=np.int64))
    use.begin_lookup()
    assert use.victims(2, used=full(), awaited_too=False).tolist() == [3]
    assert use.victims(ROWS, used=full(), awaited_too=True).size == ROWS


def queued(policy: str, rows: int = 80) -> tuple[CacheUse, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Rows that were used one after the other: the first one has gone, and those next to it are queued."""
    use, used = CacheUse(rows, policy=policy), np.arange(rows, dtype=np.int64)
    for row in range(rows):
        use.begin_lookup()
        use.touch(np.array([row], dtype=np.int64))
    assert use.victims(1, used=used, awaited_too=False).tolist() == [0]
    return use, used


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_queued_rows_that_were_used_since_are_passed_over(policy: str) -> None:
    use, used = queued(policy)
    use.touch(np.array([1, 2], dtype=np.int64))
    used[[0, 3]] = -1
    assert use.victims(2, used=used, awaited_too=False).tolist() == [4, 5]


def test_rows_that_nobody_came_for_go() -> None:
    use = used_after([[0, 1]], policy="lru")
    use.begin_rows(full()[2:], awaited=True)
    use.await_rows(full()[:2])
    for _ in range(AWAITED_LOOKUPS_MAX - 1):
        use.begin_lookup()
        assert not use.victims(1, used=full(), awaited_too=False).size
    use.begin_lookup()
    assert use.victims(ROWS, used=full(), awaited_too=False).size == ROWS


def test_queued_rows_that_are_awaited_since_are_passed_over() -> None:
    use, used = queued("lru")
    used[0] = -1
    use.await_rows(np.array([1, 3], dtype=np.int64))
    assert use.victims(2, used=used, awaited_too=False).tolist() == [2, 4]


def test_the_cache_is_not_searched_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, searches = 8000, 0
    use, used = CacheUse(rows, policy="lru"), np.arange(rows, dtype=np.int64)
    refill = CacheUse._refill

    def count(self: CacheUse, *arguments: object, **options: object) -> None:
        nonlocal searches
        searches += 1
        refill(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(CacheUse, "_refill", count)
    for _ in range(90):
        use.begin_lookup()
        victims = use.victims(10, used=used, awaited_too=False)
        assert victims.size == 10
        use.begin_rows(victims, awaited=False)
    assert searches == 1
