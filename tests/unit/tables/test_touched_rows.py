"""Marks of rows: which were written since a cut, by a plain model, and what is not known any more."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncckpt.model.table import CutVersion
from asyncckpt.tables import touched_rows
from asyncckpt.tables.touched_rows import LAST, STEP_DOWN, TouchedRows

ROWS = 60


def array(values: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)


def marks_of(rows_count: int = ROWS, *, used: Iterable[int] = range(10)) -> TouchedRows:
    marks = TouchedRows(rows_count)
    rows = array(used)
    marks.begin_rows(rows, rows_end=int(rows.max(initial=-1)) + 1)
    return marks


def touched(marks: TouchedRows, version: CutVersion) -> list[int] | None:
    found = marks.touched_since(version)
    assert found is None or found.dtype == np.int64
    return None if found is None else found.tolist()


def removed(marks: TouchedRows, version: CutVersion) -> list[int] | None:
    found = marks.removed_since(version)
    return None if found is None else found.tolist()


def test_rows_written_after_a_cut_are_touched_since_it() -> None:
    marks = marks_of()
    first = marks.end_epoch()
    assert touched(marks, first) == []
    marks.mark(array([7, 3, 3, -1]))
    second = marks.end_epoch()
    marks.mark(array([4]))
    assert touched(marks, first) == [3, 4, 7]
    assert touched(marks, second) == [4]
    assert touched(marks, marks.end_epoch()) == []


def test_versions_ascend_and_belong_to_one_table() -> None:
    one, other = marks_of(), marks_of()
    versions = [one.end_epoch() for _ in range(3)]
    assert [version.number for version in versions] == sorted({version.number for version in versions})
    theirs = other.end_epoch()
    assert theirs.source != versions[0].source
    assert one.touched_since(theirs) is None
    assert one.removed_since(theirs) is None
    coming = CutVersion(source=versions[-1].source, number=versions[-1].number + 1)
    assert one.touched_since(coming) is None
    assert one.removed_since(coming) is None
    assert one.touched_since(CutVersion(source=versions[0].source, number=0)) is None


def test_removed_rows_lose_their_mark() -> None:
    marks = marks_of()
    version = marks.end_epoch()
    marks.mark(array([1, 2]))
    marks.remove(array([2, 5]), array([200, 500]), used_count=10)
    assert touched(marks, version) == [1]
    assert removed(marks, version) == [200, 500]
    assert removed(marks, marks.end_epoch()) == []


def test_a_free_row_takes_no_mark_from_who_only_has_its_number() -> None:
    marks = marks_of(used=range(4))
    version = marks.end_epoch()
    marks.remove(array([2]), array([22]), used_count=4)
    marks.mark_used(array([0, 2, -1, 9]))
    assert touched(marks, version) == [0]
    marks.begin_rows(array([2]), rows_end=4)
    assert touched(marks, version) == [0, 2]


def test_what_was_before_a_clear_or_a_load_is_not_known() -> None:
    marks = marks_of()
    version = marks.end_epoch()
    marks.lose_all()
    assert touched(marks, version) is None
    assert removed(marks, version) is None
    second = marks.end_epoch()
    marks.mark(array([1]))
    assert touched(marks, second) == [1]
    marks.clear()
    assert touched(marks, second) is None
    third = marks.end_epoch()
    marks.mark_used(array([1]))
    assert touched(marks, third) == [], "a row that was cleared is free"


def test_growth_keeps_marks() -> None:
    marks = marks_of(10)
    version = marks.end_epoch()
    marks.mark(array([9]))
    marks.grow(1000)
    marks.grow(5)
    marks.begin_rows(array([900]), rows_end=901)
    assert touched(marks, version) == [9, 900]


def test_marks_go_down_when_they_are_used_up() -> None:
    """The newest half is known on; the last cut before is never lost."""
    marks = marks_of()
    versions = []
    for number in range(LAST + 10):
        marks.mark(array([number % 10]))
        versions.append(marks.end_epoch())
        marks.mark(array([(number + 1) % 10]))
        assert touched(marks, versions[-1]) == [(number + 1) % 10], number
    known = [touched(marks, version) is not None for version in versions]
    assert not known[0]
    assert all(known[-STEP_DOWN:])
    assert known == sorted(known), "what is newer than something known is known"


def test_many_cuts_without_a_write() -> None:
    marks = marks_of()
    versions = [marks.end_epoch() for _ in range(5 * LAST)]
    assert touched(marks, versions[0]) == []
    marks.mark(array([3]))
    assert touched(marks, versions[0]) is None
    assert touched(marks, versions[-1]) == touched(marks, versions[-100]) == [3]
    version = marks.end_epoch()
    marks.mark_used(array([5, 50]))
    assert touched(marks, version) == [5]


@pytest.mark.parametrize("part_rows", [7, 1 << 18])
@pytest.mark.parametrize("seed", range(2))
def test_against_a_model_over_600_cuts(seed: int, part_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model holds the number of the last cut before each write and removal, and never forgets."""
    monkeypatch.setattr(touched_rows, "PART_ROWS", part_rows)
    monkeypatch.setattr(touched_rows, "REMOVED_IDS_MAX", 40)
    random = np.random.default_rng(seed)
    marks = TouchedRows(4)
    written: dict[int, int] = {}
    gone: list[tuple[int, int]] = []
    versions: list[CutVersion] = []
    rows_end = 0
    for cut in range(600):
        for _ in range(int(random.integers(0, 3))):
            rows = np.unique(random.integers(0, ROWS, size=int(random.integers(1, 9))))
            match random.integers(0, 4):
                case 0:
                    new = array(row for row in rows.tolist() if row not in written)
                    if new.size:
                        rows_end = max(rows_end, int(new.max()) + 1)
                        marks.grow(rows_end)
                        marks.begin_rows(new, rows_end=rows_end)
                        written.update(dict.fromkeys(new.tolist(), cut))
                case 1:
                    used = array(row for row in rows.tolist() if row in written)
                    marks.mark(used)
                    written.update(dict.fromkeys(used.tolist(), cut))
                case 2:
                    marks.mark_used(rows[rows < rows_end] if rows_end else rows[:0])
                    written.update({row: cut for row in rows.tolist() if row in written})
                case 3:
                    freed = array(row for row in rows.tolist() if row in written)
                    marks.remove(freed, freed * 1000 + cut, used_count=len(written))
                    gone += [(cut, row * 1000 + cut) for row in freed.tolist()]
                    for row in freed.tolist():
                        del written[row]
        versions.append(marks.end_epoch())
        for back in (0, 1, int(random.integers(0, 200)), cut):
            if back <= cut:
                version = versions[cut - back]
                found, later = touched(marks, version), cut - back + 1
                assert found in (None, sorted(row for row, at in written.items() if at >= later)), (cut, back)
                assert found is not None or back > 100, (cut, back)
                ids = removed(marks, version)
                assert ids in (None, sorted({id for at, id in gone if at >= later})), (cut, back)
    assert removed(marks, versions[0]) is None
    assert touched(marks, versions[0]) is None


def test_the_log_of_removed_ids_may_be_as_long_as_there_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_rows, "REMOVED_IDS_MAX", 3)
    marks = marks_of(used=range(10))
    version = marks.end_epoch()
    marks.remove(array(range(10)), array(range(10)), used_count=10)
    assert removed(marks, version) == list(range(10))
    marks.end_epoch()
    marks.remove(array([0]), array([77]), used_count=1)
    assert removed(marks, version) is None
    assert touched_rows.FIRST_ROOM > 10


def test_rows_that_begin_are_told_apart_from_others() -> None:
    marks = TouchedRows(100)
    first = marks.end_epoch()
    marks.begin_rows(np.arange(10), rows_end=10)
    second = marks.end_epoch()
    marks.mark(np.array([3, 4]))
    marks.begin_rows(np.array([10, 11]), rows_end=12)
    for version, expected in ((second, [10, 11]), (first, list(range(12)))):
        begun = marks.begun_since(version)
        assert begun is not None
        assert begun.tolist() == expected
    marks.lose_all()
    assert marks.begun_since(second) is None


def test_too_many_rows_that_begin_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_rows, "BEGUN_ROWS_MAX", 5)
    marks = TouchedRows(100)
    version = marks.end_epoch()
    marks.begin_rows(np.arange(10), rows_end=10)
    assert marks.begun_since(version) is None
    touched = marks.touched_since(version)
    assert touched is not None
    assert len(touched) == 10
