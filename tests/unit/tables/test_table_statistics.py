"""What tables count, the same of every kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asyncckpt.tables import HashEmbedding, HashTable, MultiLevelTable
from asyncckpt.tables.candidates import CandidateTable
from asyncckpt.tables.trained_table import TrainedTable
from tests.unit.tables.test_touched_rows_by_use import batch

SEEN = {"last_seen": torch.int64}
KINDS: dict[str, Callable[[], TrainedTable]] = {
    "hash": lambda: HashTable("user", 2, metadata=SEEN, capacity=4),
    "levels": lambda: MultiLevelTable("user", 2, metadata=SEEN, capacity=4, cache_rows=8),
}


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest) -> TrainedTable:
    return KINDS[request.param]()


def test_rows_are_those_inserted_without_those_that_went(table: TrainedTable) -> None:
    table.lookup(batch(1, 2, 3, 3))
    table.insert(batch(3, 4, 5, 6, 7), torch.ones(5, 2), last_seen=torch.full((5,), 9))
    table.remove(batch(1, 1, 99))
    assert table.evict("last_seen", below=5) == 1
    counts = table.statistics()
    assert (counts.inserted_count, counts.removed_count, counts.evicted_count, counts.rows_count) == (7, 1, 1, 5)
    assert (counts.capacity, counts.growths_count) == (7, 1)
    table.clear()
    table.begin_load(clear=True, rows_count=0).end(True)
    table.lookup(batch(1))
    counts = table.statistics()
    assert (counts.inserted_count, counts.removed_count, counts.evicted_count, counts.rows_count) == (8, 6, 1, 1)


def test_the_hit_rate_counts_ids_of_lookups_that_had_a_row(table: TrainedTable) -> None:
    assert table.statistics().hit_rate == 0.0
    table.lookup(batch(1, 2, 2))  # Two ids get a row, the repeated one has it by then.
    table.lookup(batch(1, 8, 8, 2), insert=False)
    with table.rows(batch(1)):
        pass
    counts = table.statistics()
    assert (counts.hits_count, counts.misses_count) == (3, 4)
    assert counts.hit_rate == 3 / 7


def test_a_forward_that_trains_is_a_lookup_and_one_that_evaluates_is_none(table: TrainedTable) -> None:
    module = HashEmbedding(table)
    module(batch(1, 2, 2))
    module(batch(2, 3))
    counts = table.statistics()
    assert (counts.hits_count, counts.misses_count) == (1, 3)
    module.eval()(batch(1, 9))
    table.read(batch(1, 9), absent_as_zeros=True)
    assert table.statistics() == counts


def test_bytes_are_those_of_all_levels(table: TrainedTable) -> None:
    """The columns, ids and marks of all rows that there is room for; and an index, of 16 bytes a slot, and pages."""
    levels_rows = [4] + ([8] if isinstance(table, MultiLevelTable) else [])
    found = table.statistics().bytes - sum(levels_rows) * (2 * 4 + 8)
    assert 4 + 16 * sum(levels_rows) <= found <= 4 + 4 * 4096 * len(levels_rows)
    assert (table.statistics().cache is not None) == isinstance(table, MultiLevelTable)


def test_an_id_that_is_not_admitted_is_a_miss() -> None:
    table = MultiLevelTable("user", 2, cache_rows=8, admit_after=2)
    for hits_count, misses_count in ((0, 1), (0, 2), (1, 2)):
        table.lookup(batch(5))
        counts = table.statistics()
        assert (counts.hits_count, counts.misses_count) == (hits_count, misses_count)
    [candidates] = table.companions().values()
    assert isinstance(candidates, CandidateTable)
    assert (candidates.statistics().inserted_count, candidates.statistics().rows_count) == (1, 0)


def test_a_failed_insert_counts_nothing() -> None:
    def faulty(ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no values")

    table = HashTable("user", 2, initializer=faulty)
    with pytest.raises(RuntimeError, match="no values"):
        table.lookup(batch(1))
    counts = table.statistics()
    assert (counts.inserted_count, counts.rows_count, counts.misses_count) == (0, 0, 0)
