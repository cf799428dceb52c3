"""The id map gives the rows that a dict and a stack of free rows would give."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.native import I64, Core, IdMap, NativeCore, TwinCore

INT64 = np.iinfo(np.int64)
EXTREMES = [0, 1, -1, 2, INT64.min, INT64.max, INT64.min + 1, 1 << 32, -(1 << 32), 1 << 62]
IDS = st.lists(st.sampled_from(EXTREMES) | st.integers(0, 40) | st.integers(INT64.min, INT64.max), max_size=60)
ACTIONS = st.lists(st.tuples(st.sampled_from(["insert", "insert", "find", "remove", "clear"]), IDS), max_size=12)


class IdMapModel:
    def __init__(self) -> None:
        self.row_of: dict[int, int] = {}
        self.free: list[int] = []
        self.rows_end = 0

    def insert(self, ids: list[int]) -> tuple[list[int], list[int]]:
        rows, new_rows = [], []
        for id in ids:
            if id not in self.row_of:
                if not self.free:
                    self.free.append(self.rows_end)
                    self.rows_end += 1
                self.row_of[id] = self.free.pop()
                new_rows.append(self.row_of[id])
            rows.append(self.row_of[id])
        return rows, new_rows

    def remove(self, ids: list[int]) -> list[int]:
        rows = [self.row_of.pop(id, -1) if id in self.row_of else -1 for id in ids]
        self.free += [row for row in rows if row >= 0]
        return rows


def array(ids: list[int]) -> I64:
    return np.array(ids, dtype=np.int64)


def check(id_map: IdMap, model: IdMapModel) -> None:
    assert len(id_map) == len(model.row_of)
    assert id_map.rows_end == model.rows_end
    ids = id_map.ids_by_row()
    assert len(ids) == model.rows_end
    for id, row in model.row_of.items():
        assert ids[row] == id
    covered = [row for begin, end in id_map.runs().tolist() for row in range(begin, end)]
    assert covered == sorted(model.row_of.values())
    begins_and_ends = id_map.runs().ravel().tolist()
    # Maximal ranges neither touch nor overlap.
    assert all(left < right for left, right in itertools.pairwise(begins_and_ends))


@pytest.mark.parametrize("marks_count", [0, 500, 2000])
def test_inserting_marks_the_used_rows_that_there_are_marks_for(core: Core, marks_count: int) -> None:
    random = np.random.default_rng(7)
    id_map = core.id_map(0)
    first = random.permutation(1000)
    rows, _ = id_map.insert(first)
    marks = np.zeros(marks_count, dtype=np.uint8)
    marks[rows[rows < marks_count]] = 9
    before = marks.copy()
    mentioned = random.integers(0, 1500, 700)
    rows, _ = id_map.insert(mentioned, (marks, 17))
    inside = rows[rows < marks_count]
    expected = before.copy()
    expected[inside[before[inside] != 0]] = 17
    assert marks.tolist() == expected.tolist()
    assert (marks_count == 0) or (17 in marks.tolist() and 9 in marks.tolist())


def test_marks_of_an_insert_are_checked_first(core: Core) -> None:
    id_map = core.id_map(0)
    wrong: Any
    for wrong in ((np.zeros(4, dtype=np.int8), 3), (np.zeros(4, dtype=np.uint8), 256)):
        with pytest.raises(ValueError, match=r"mark"):
            id_map.insert(np.arange(3), wrong)
    assert len(id_map) == 0


@given(actions=ACTIONS)
@settings(deadline=None, max_examples=150)
def test_any_actions(core: Core, actions: list[tuple[str, list[int]]]) -> None:
    id_map, model = core.id_map(0), IdMapModel()
    for name, ids in actions:
        if name == "insert":
            rows, new_rows = id_map.insert(array(ids))
            assert (rows.tolist(), new_rows.tolist()) == model.insert(ids)
        elif name == "remove":
            assert id_map.remove(array(ids)).tolist() == model.remove(ids)
        elif name == "find":
            assert id_map.find(array(ids)).tolist() == [model.row_of.get(id, -1) for id in ids]
        else:
            id_map.clear()
            model = IdMapModel()
        check(id_map, model)


def test_growth_keeps_everything(core: Core, rng: np.random.Generator) -> None:
    id_map = core.id_map(0)
    ids = rng.integers(INT64.min, INT64.max, 300_000)
    for begin in range(0, len(ids), 37_000):
        rows, new_rows = id_map.insert(ids[begin : begin + 37_000])
        np.testing.assert_array_equal(rows, np.arange(begin, begin + len(rows)))
        np.testing.assert_array_equal(new_rows, rows)
    np.testing.assert_array_equal(id_map.find(ids), np.arange(len(ids)))
    np.testing.assert_array_equal(id_map.ids_by_row(), ids)
    assert id_map.runs().tolist() == [[0, len(ids)]]


def test_removal_leaves_the_others_findable(core: Core, rng: np.random.Generator) -> None:
    id_map = core.id_map(1000)
    ids = rng.permutation(50_000).astype(np.int64) - 25_000
    id_map.insert(ids)
    gone = rng.random(len(ids)) < 0.6
    np.testing.assert_array_equal(id_map.remove(ids[gone]), np.flatnonzero(gone))
    np.testing.assert_array_equal(id_map.find(ids), np.where(gone, -1, np.arange(len(ids))))
    runs = id_map.runs()
    assert (runs[:, 1] - runs[:, 0]).sum() == len(id_map) == (~gone).sum()
    # Freed rows come back, the last freed first.
    rows, _ = id_map.insert(np.arange(1 << 40, (1 << 40) + gone.sum(), dtype=np.int64))
    np.testing.assert_array_equal(rows, np.flatnonzero(gone)[::-1])
    assert id_map.rows_end == len(ids)


def test_more_runs_than_the_first_guess(core: Core) -> None:
    id_map = core.id_map(0)
    id_map.insert(np.arange(5000, dtype=np.int64))
    id_map.remove(np.arange(1, 5000, 2, dtype=np.int64))
    expected = np.stack([np.arange(0, 5000, 2), np.arange(1, 5001, 2)], axis=1)
    np.testing.assert_array_equal(id_map.runs(), expected)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129])
def test_one_run_around_word_borders(core: Core, count: int) -> None:
    id_map = core.id_map(0)
    id_map.insert(np.arange(count, dtype=np.int64))
    assert id_map.runs().tolist() == ([[0, count]] if count else [])
    id_map.remove(np.arange(1, count - 1, dtype=np.int64))
    assert id_map.runs().tolist() == {0: [], 1: [[0, 1]]}.get(count, [[0, 1], [count - 1, count]])


def test_reserve_changes_nothing_else(core: Core) -> None:
    id_map = core.id_map(0)
    id_map.insert(array([5, 6]))
    id_map.reserve(100_000)
    assert id_map.find(array([6, 5, 7])).tolist() == [1, 0, -1]
    assert (len(id_map), id_map.rows_end) == (2, 2)


def test_ids_that_collide(core: Core) -> None:
    """Multiples of a large power of two would share one slot under a weak hash."""
    id_map = core.id_map(0)
    ids = np.arange(1 << 15, dtype=np.int64) << 48
    id_map.insert(ids)
    np.testing.assert_array_equal(id_map.find(ids), np.arange(1 << 15))


def test_strided_ids(core: Core) -> None:
    id_map = core.id_map(0)
    ids = np.arange(20, dtype=np.int64)
    id_map.insert(ids[::2])
    assert id_map.find(ids[::-4]).tolist() == [-1] * 5
    assert id_map.find(ids[::-2] - 1).tolist() == list(range(9, -1, -1))


@pytest.mark.parametrize("ids", [np.zeros(2, dtype=np.int32), np.zeros((2, 2), dtype=np.int64)])
def test_wrong_ids_are_refused(core: Core, ids: I64) -> None:
    for call in (core.id_map(0).find, core.id_map(0).insert, core.id_map(0).remove):
        with pytest.raises(ValueError, match="ids must be"):
            call(ids)


def test_view_of_ids_keeps_the_map_alive(core: Core) -> None:
    id_map = core.id_map(0)
    id_map.insert(array([3, 4]))
    ids = id_map.ids_by_row()
    del id_map
    gc.collect()
    assert ids.tolist() == [3, 4]


def test_impossible_capacity(native: Core) -> None:
    with pytest.raises(MemoryError):
        native.id_map(1 << 60)
    id_map = native.id_map(0)
    id_map.insert(array([1]))
    with pytest.raises(MemoryError):
        id_map.reserve(1 << 45)
    assert id_map.find(array([1])).tolist() == [0]


def test_both_implementations_give_the_same_rows(native: Core, rng: np.random.Generator) -> None:
    assert isinstance(native, NativeCore)
    maps = [native.id_map(0), TwinCore().id_map(0)]
    for _ in range(30):
        ids = rng.integers(-300, 300, 200)
        inserted = [id_map.insert(ids) for id_map in maps]
        np.testing.assert_array_equal(inserted[0][0], inserted[1][0])
        np.testing.assert_array_equal(inserted[0][1], inserted[1][1])
        gone = rng.integers(-300, 300, 150)
        np.testing.assert_array_equal(maps[0].remove(gone), maps[1].remove(gone))
        np.testing.assert_array_equal(maps[0].runs(), maps[1].runs())
