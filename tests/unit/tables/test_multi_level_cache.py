"""What the cache of a MultiLevelTable brings, keeps and lets go, with prefetches and without."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.tables import MultiLevelTable, multi_level
from asyncckpt.tables.cache_level import CacheLevel
from asyncckpt.tables.row_device import RowDevice
from tests.unit.tables.multi_level_world import BATCHES, CACHE_ROWS, POLICIES, LevelsBesideDict, contents, new_table
from tests.worlds.rows import batch

pytestmark = pytest.mark.filterwarnings("ignore:cache of table:RuntimeWarning")


@settings(max_examples=60, deadline=None)
@given(
    cache_rows=CACHE_ROWS,
    policy=POLICIES,
    depth=st.integers(0, 3),
    batches=st.lists(BATCHES, min_size=4, max_size=16),
)
def test_prefetch_of_any_depth_changes_nothing(cache_rows: int, policy: str, depth: int, batches: list[Any]) -> None:
    world = LevelsBesideDict(cache_rows=cache_rows, policy=policy)
    for step, ids in enumerate(batches):
        for coming in batches[step + 1 : step + 1 + depth]:
            world.prefetch(coming)
        world.train(ids)
        world.check()


@pytest.mark.parametrize("seed", range(10))
def test_a_cache_without_addresses_does_the_same(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The way of devices other than CUDA's: rows are gathered, brought over and scattered by torch."""
    monkeypatch.setattr(multi_level, "row_device", _Elsewhere)
    random = np.random.default_rng(seed)
    world = LevelsBesideDict(cache_rows=int(random.integers(1, 8)))
    for _ in range(20):
        world.train(random.integers(0, 30, size=6).tolist())
        world.prefetch(random.integers(0, 30, size=6).tolist())
        world.remove(random.integers(0, 30, size=2).tolist())
        world.check()


class _Elsewhere(RowDevice):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_host = False


def test_a_device_without_memory_leaves_the_table_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    world = LevelsBesideDict(cache_rows=2)
    for ids in ([1, 2], [3, 4]):
        world.train(ids)
    with monkeypatch.context() as patch:
        patch.setattr(CacheLevel, "take_rows", no_memory)
        with pytest.raises(MemoryError):
            world.table.lookup(batch([1]))
    world.check()
    world.train([1, 4])
    world.check()


def test_rows_that_leave_the_cache_come_back_as_they_went() -> None:
    world = LevelsBesideDict(cache_rows=2)
    for ids in ([1, 2], [3, 4], [5], [1, 2]):
        world.train(ids)
    world.check()
    statistics = world.table.statistics()
    cache = statistics.cache
    assert cache is not None
    assert (statistics.inserted_count, cache.cached_count) == (5, 2)
    assert cache.evictions_count == cache.written_back_count == 5
    assert (cache.hits_count, cache.misses_count) == (7, 7)


def test_cache_grows_for_a_large_batch_and_warns_once() -> None:
    world = LevelsBesideDict(cache_rows=2)
    with pytest.warns(RuntimeWarning, match=r"cache of table 'user' grew from 2 to 5 rows: a batch has more") as caught:
        world.train([1, 2, 3, 1, 4, 5])
    assert caught[0].filename.endswith("multi_level_world.py")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.train(list(range(20)))
    world.check()
    assert world.table.cache_rows == 22


def test_a_batch_that_just_fits_does_not_grow_the_cache() -> None:
    world = LevelsBesideDict(cache_rows=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.train([1, 1, 2, 2])
        world.train([1, 2, 3, 1, 2, 3])
        world.train([4, 2, 5, 2, 2])
    world.check()
    assert world.table.cache_rows == 3


def test_growth_in_inference_mode_leaves_columns_trainable() -> None:
    table = new_table(cache_rows=1)
    with torch.inference_mode():
        table.lookup(torch.arange(50))
    table.embedding[table.lookup(torch.arange(50))] += 1.0
    assert not table.embedding.is_inference()


def test_least_recently_used_rows_leave() -> None:
    table = new_table(cache_rows=3)
    for ids in ([1], [2], [3], [1], [4]):
        table.lookup(batch(ids))
    assert cached_ids(table) == {1, 3, 4}


def test_least_frequently_used_rows_leave() -> None:
    table = new_table(cache_rows=3, policy="lfu")
    for ids in ([1], [1], [2], [3], [3], [2], [3], [4]):
        table.lookup(batch(ids))
    # 1 and 2 were looked up twice; 1 longer ago.
    assert cached_ids(table) == {2, 3, 4}


def cached_ids(table: MultiLevelTable) -> set[int]:
    rows = table._cache.used_rows()
    return set(table._cache.ids_by_row()[rows].tolist())


def test_prefetch_brings_known_ids_only() -> None:
    table = new_table(cache_rows=3)
    for ids in ([1, 2, 3], [4, 5, 6]):
        table.lookup(batch(ids))
    before = contents(table)
    table.lookup(batch([]))
    assert table.prefetch(batch([1, 99, 1, 2])) == 2
    assert cached_ids(table) > {1, 2}
    assert contents(table) == before
    assert table.statistics().cache.prefetched_count == 2


def test_prefetch_leaves_what_is_waited_for_and_stops() -> None:
    table = new_table(cache_rows=3)
    for ids in ([1, 2, 3], [4, 5, 6], []):
        table.lookup(batch(ids))
    assert table.prefetch(batch([4, 1])) == 1
    assert table.prefetch(batch([2, 3])) == 1
    assert table.prefetch(batch([5, 6])) == 0
    assert cached_ids(table) > {4, 1}
    # A lookup has used 4 and 1, so they may go; the row of [2, 3] is still waited for.
    table.lookup(batch([4, 1]))
    table.lookup(batch([]))
    kept = cached_ids(table) & {2, 3}
    assert table.prefetch(batch([5, 6])) == 2
    assert cached_ids(table) == {5, 6} | kept


def test_prefetch_never_moves_rows_of_the_latest_lookup() -> None:
    table = new_table(cache_rows=3)
    table.lookup(batch([4, 5, 6]))
    rows = table.lookup(batch([1, 2, 3]))
    assert table.prefetch(batch([4, 5, 6])) == 0
    assert torch.equal(table.lookup(batch([1, 2, 3]), insert=False), rows)


def test_lookup_takes_rows_that_are_waited_for_when_nothing_else_may_go() -> None:
    world = LevelsBesideDict(cache_rows=2)
    for ids in ([1, 2], [3, 4], []):
        world.train(ids)
    world.prefetch([1, 2])
    world.train([3, 4])
    world.check()
    assert cached_ids(world.table) == {3, 4}
    assert world.table.cache_rows == 2


@pytest.mark.parametrize("skipped", [range(20, 29), range(9)], ids=["was cached", "was brought"])
def test_a_batch_that_was_prefetched_and_skipped_gives_its_room_back(skipped: range) -> None:
    table, random = new_table(cache_rows=10), np.random.default_rng(0)
    for first in range(0, 30, 5):
        table.lookup(batch(range(first, first + 5)))
    assert bool(table.prefetch(batch(skipped))) == (0 in skipped)
    for _ in range(2):
        before = table.statistics()
        for _ in range(400):
            table.lookup(batch(random.integers(100, 108, size=3)))
    # The rows of a hot set that fits are there.
    assert table.statistics().misses_count == before.misses_count


def test_prefetch_on_another_thread_beside_training() -> None:
    world, stop = LevelsBesideDict(cache_rows=6), threading.Event()
    random = np.random.default_rng(3)
    batches = [random.integers(0, 40, size=5).tolist() for _ in range(200)]

    def prefetch() -> None:
        while not stop.is_set():
            for ids in batches:
                world.table.prefetch(batch(ids))

    thread = threading.Thread(target=prefetch)
    thread.start()
    try:
        for ids in batches:
            world.train(ids)
    finally:
        stop.set()
        thread.join()
    world.check()
