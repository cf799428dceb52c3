"""Which uses of HashTable, MultiLevelTable, their modules and optimizers mark which rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import CutVersion, TracksRows
from asyncckpt.tables import (
    HashEmbedding,
    HashTable,
    MultiLevelTable,
    SparseAdagrad,
    SparseSGD,
)
from asyncckpt.tables.candidates import CandidateTable
from tests.unit.tables.test_hash_table import new_table as new_hash_table

AnyTable = HashTable | MultiLevelTable | CandidateTable


def new_multi_level(**options: object) -> MultiLevelTable:
    """With a cache of four rows, so that some of ten ids are always outside."""
    settings: dict[str, object] = {"cache_rows": 4, "initializer": 0.5, **options}
    return MultiLevelTable("user", 3, optimizer_slots={"sum": ()}, metadata={"seen": torch.int64}, **settings)  # type: ignore[arg-type]


NEW_TABLE: dict[str, Callable[[], HashTable | MultiLevelTable]] = {
    "hash": lambda: new_hash_table(),
    "levels": new_multi_level,
}


@pytest.fixture(params=NEW_TABLE)
def table(request: pytest.FixtureRequest) -> HashTable | MultiLevelTable:
    """Ids 0 to 9, the last four of them cached where there is a cache."""
    table = NEW_TABLE[request.param]()
    for begin in range(0, 10, 4):
        table.lookup(batch(*range(begin, min(begin + 4, 10))))
    return table


def batch(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


@contextmanager
def cut_of(table: AnyTable, *, ok: bool = True) -> Iterator[TracksRows]:
    cut = table.begin_cut()
    try:
        assert isinstance(cut, TracksRows)
        yield cut
    finally:
        cut.end(ok)


def version_of(table: AnyTable, *, ok: bool = True) -> CutVersion:
    with cut_of(table, ok=ok) as cut:
        return cut.version


def touched(table: AnyTable, version: CutVersion) -> list[int] | None:
    """The ids, ascending, of the rows touched since a version. Ends an epoch."""
    with cut_of(table) as cut:
        rows = cut.touched_since(version)
        return None if rows is None else sorted(cut.column("id")[torch.from_numpy(rows)].tolist())


def removed(table: AnyTable, version: CutVersion) -> list[int] | None:
    with cut_of(table) as cut:
        ids = cut.removed_since(version)
        return None if ids is None else ids.tolist()


def test_lookup_marks_what_it_returns_only_with_insert(table: HashTable | MultiLevelTable) -> None:
    version = version_of(table)
    assert touched(table, version) == []
    table.lookup(batch(1, 2, 99), insert=False)
    assert touched(table, version) == []
    table.lookup(batch(7, 3, 3, 30))
    assert touched(table, version) == [3, 7, 30]
    newer = version_of(table)
    table.lookup(batch(8))
    assert touched(table, newer) == [8]
    assert touched(table, version) == [3, 7, 8, 30]


def test_insert_marks_known_and_new_rows(table: HashTable | MultiLevelTable) -> None:
    """Cached ones, uncached ones, and new ones."""
    version = version_of(table)
    table.insert(batch(0, 9, 40, 0), torch.ones(4, 3))
    assert touched(table, version) == [0, 9, 40]


def test_removed_ids(table: HashTable | MultiLevelTable) -> None:
    version = version_of(table)
    table.lookup(batch(4, 5))
    table.remove(batch(5, 2, 2, 77))
    assert touched(table, version) == [4]
    assert removed(table, version) == [2, 5]
    newer = version_of(table)
    table.lookup(batch(2, 50))
    assert touched(table, version) == [2, 4, 50], "rows of removed ids go to others"
    assert removed(table, version) == [2, 5], "an id that is back was removed all the same"
    assert (touched(table, newer), removed(table, newer)) == ([2, 50], [])


def test_eviction_removes(table: HashTable | MultiLevelTable) -> None:
    column = "seen" if isinstance(table, MultiLevelTable) else "step_filter"
    rows = table.lookup(batch(3, 4))
    table.slot(column)[rows] = 5
    version = version_of(table)
    table.evict(column, below=5)
    assert (touched(table, version), removed(table, version)) == ([], [0, 1, 2, 5, 6, 7, 8, 9])


def test_touch(table: HashTable | MultiLevelTable) -> None:
    rows = table.lookup(batch(1, 6, 99), insert=False)
    version = version_of(table)
    table.touch(rows.view(1, 3))
    assert touched(table, version) == [1, 6]
    newer = version_of(table)
    table.touch(rows[:1].numpy())
    table.touch(rows[:0])
    assert touched(table, newer) == [1]


def test_touch_passes_over_rows_whose_id_is_gone(table: HashTable | MultiLevelTable) -> None:
    rows = table.lookup(batch(1, 6), insert=False)
    version = version_of(table)
    table.remove(batch(6))
    table.touch(rows)
    assert touched(table, version) == [1]


def test_touch_of_no_row_touches_nothing(table: HashTable | MultiLevelTable) -> None:
    """-1 is the last row to an index."""
    last = table.capacity if isinstance(table, HashTable) else table.cache_rows
    while len(table) < last:
        table.lookup(batch(1000 + len(table)))
    version = version_of(table)
    table.touch(batch(-1, -1))
    assert touched(table, version) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.tensor([0, -2]), "rows of table 'user' are out of range.*-2"),
        (torch.tensor([0, 10**6]), "rows of table 'user' are out of range.*1000000"),
        (torch.tensor([0], dtype=torch.int32), "rows of table 'user' must be.*torch.int32"),
        (np.array([0.0]), "rows of table 'user' must be.*float64"),
        ([0], "rows of table 'user' must be.*list"),
    ],
)
def test_touch_of_wrong_rows_marks_nothing(table: HashTable | MultiLevelTable, rows: object, message: str) -> None:
    version = version_of(table)
    with pytest.raises(UsageError, match=message):
        table.touch(rows)  # type: ignore[arg-type]
    assert touched(table, version) == []


def test_a_cut_whose_save_failed_loses_nothing(table: HashTable | MultiLevelTable) -> None:
    version = version_of(table)
    table.lookup(batch(1))
    table.remove(batch(2))
    failed = version_of(table, ok=False)
    table.lookup(batch(3))
    assert (touched(table, version), removed(table, version)) == ([1, 3], [2])
    assert (touched(table, failed), removed(table, failed)) == ([3], [])


def test_clear_and_loads_make_earlier_versions_unknown(table: HashTable | MultiLevelTable) -> None:
    version = version_of(table)
    table.clear()
    table.lookup(batch(5))
    assert (touched(table, version), removed(table, version)) == (None, None)
    for clear, ok in ((True, True), (False, True), (True, False)):
        version = version_of(table)
        load = table.begin_load(clear=clear, rows_count=2)
        load.insert(batch(5, 6))
        load.end(ok)
        assert touched(table, version) is None
        assert removed(table, version) is None
        version = version_of(table)
        table.lookup(batch(5))
        assert touched(table, version) == [5]


def test_a_failed_insert_marks_no_new_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def initializer(ids: torch.Tensor) -> torch.Tensor:
        if (ids < 0).any():
            raise ValueError("no")
        return torch.zeros(len(ids), 3)

    table = new_hash_table(initializer=initializer)
    table.lookup(batch(1, 2, 3))
    table.remove(batch(2))
    version = version_of(table)
    with pytest.raises(ValueError, match="no"):
        table.lookup(batch(1, -5, -6))
    assert touched(table, version) == [1], "a known one is marked when it is found"
    table.lookup(batch(8, 9))
    assert touched(table, version) == [1, 8, 9]


def test_growth_keeps_marks() -> None:
    table = new_hash_table()
    table.lookup(batch(*range(10)))
    version = version_of(table)
    table.lookup(batch(3))
    table.lookup(batch(*range(100, 1000)))
    assert touched(table, version) == [3, *range(100, 1000)]


def test_a_cut_past_its_fence_tells_nothing_more(table: HashTable | MultiLevelTable) -> None:
    cut = table.begin_cut()
    cut.fence()
    with pytest.raises(UsageError, match="touched rows of a cut of table 'user' was asked for after its fence"):
        cut.touched_since(cut.version)
    with pytest.raises(UsageError, match="removed ids of a cut of table 'user' was asked for after its fence"):
        cut.removed_since(cut.version)
    cut.end(True)


# -- levels ------------------------------------------------------------------------------------------------------------


def test_moves_between_levels_mark_nothing() -> None:
    table = new_multi_level()
    for begin in range(0, 12, 4):
        table.lookup(batch(*range(begin, begin + 4)))
    table.update(table.lookup(batch(0, 1)), lambda rows: rows.embedding.fill_(7.0))
    version = version_of(table)
    table.prefetch(batch(2, 3, 4))
    table.lookup(batch(5, 6, 7, 8), insert=False)
    table.prefetch(batch(0, 9))
    assert touched(table, version) == []
    assert table.statistics().cache.written_back_count >= 2


def test_a_row_that_was_changed_in_the_cache_stays_marked_when_it_leaves() -> None:
    table = new_multi_level()
    table.lookup(batch(0, 1, 2, 3))
    version = version_of(table)
    table.update(table.lookup(batch(1)), lambda rows: rows.embedding.fill_(7.0))
    newer = version_of(table)
    table.lookup(batch(10, 11, 12, 13))
    assert touched(table, version) == [1, 10, 11, 12, 13]
    assert touched(table, newer) == [10, 11, 12, 13]


def test_ids_that_are_not_admitted_have_no_marks() -> None:
    table = new_multi_level(admit_after=2)
    table.lookup(batch(1, 2))
    table.lookup(batch(1, 2))
    version = version_of(table)
    table.lookup(batch(1, 3))
    assert touched(table, version) == [1]
    table.lookup(batch(3))
    assert touched(table, version) == [1, 3]


def test_candidates_track_their_counts() -> None:
    table = new_multi_level(admit_after=3)
    candidates = table.companions()["candidates"]
    assert isinstance(candidates, CandidateTable)
    table.lookup(batch(1, 2, 3))
    version = version_of(candidates)
    table.lookup(batch(2, 3))
    assert touched(candidates, version) == [2, 3]
    table.lookup(batch(2, 4))
    assert (touched(candidates, version), removed(candidates, version)) == ([3, 4], [2])
    candidates.remove(np.array([1]))
    assert removed(candidates, version) == [1, 2]


# -- modules and optimizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SparseSGD, SparseAdagrad])
def test_a_cut_between_forward_and_step(
    table: HashTable | MultiLevelTable, optimizer: type[SparseSGD] | type[SparseAdagrad]
) -> None:
    """The step writes rows that the forward marked before the cut."""
    module = HashEmbedding(table)
    updates = optimizer(module, lr=0.1)
    version = version_of(table)
    module(batch(1, 7)).sum().backward()
    between = version_of(table)
    updates.step()
    assert touched(table, between) == touched(table, version) == [1, 7]


def test_eval_marks_nothing(table: HashTable | MultiLevelTable) -> None:
    module = HashEmbedding(table).eval()
    version = version_of(table)
    module(batch(1, 2, 99))
    assert touched(table, version) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_may_look_ids_up() -> None:
    """As workers of a data loader do: memory that children do not get would end them by a signal."""
    table = HashTable("user", 2, capacity=1 << 22)
    table.lookup(torch.arange(100))
    child = os.fork()
    if child == 0:
        try:
            table.lookup(torch.arange(50, 150))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
