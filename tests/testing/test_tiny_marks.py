"""TableSuite passes for a stranger's table that tracks its rows, and finds one that forgets to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncckpt.model.table import CutVersion
from asyncckpt.testing.mark_tests import MarkTests
from tests.testing.one_test import FAILURES, run_one
from tests.testing.tiny_table import TinySuite, TinyTable
from tests.testing.tracked_tiny_table import TrackedTinyCut, TrackedTinySuite, TrackedTinyTable


class TestTrackedTinyTable(TrackedTinySuite):
    cache_rows = 5


# -- broken tables -----------------------------------------------------------------------------------------------------


class ForgetsUpdates(TrackedTinyTable):
    """Only new rows are marked."""

    def row(self, id: int) -> int:
        return super().row(id) if id not in self.rows else self.rows[id]

    def write(self, id: int, values: Mapping[str, torch.Tensor]) -> None:
        TinyTable.write(self, id, values)


class MarksAtWriteBack(TrackedTinyTable):
    """A row that was changed in the cache counts as changed only when it leaves the cache."""

    def row(self, id: int) -> int:
        return super().row(id) if id not in self.rows else self.rows[id]

    def write(self, id: int, values: Mapping[str, torch.Tensor]) -> None:
        TinyTable.write(self, id, values)

    def write_back(self, at: int) -> None:
        row = int(self.cache_map[at])
        super().write_back(at)
        if row in self.rows.values():
            self.mark(row)


class KeepsMarksOfFreeRows(TrackedTinyTable):
    def remove(self, id: int) -> None:
        row = self.rows[id]
        super().remove(id)
        self.mark(row)


class ForgetsRemovals(TrackedTinyTable):
    def remove(self, id: int) -> None:
        super().remove(id)
        self.gone.clear()


class DropsMarksAtTheCut(TrackedTinyTable):
    """As if there were one user of the marks, and no save ever failed."""

    def new_cut(self) -> TrackedTinyCut:
        class Cut(TrackedTinyCut):
            def end(self, ok: bool) -> None:
                self.table.marks.clear()
                super().end(ok)

        return Cut(self)


class CountsInAByte(TrackedTinyTable):
    """Epochs come around, and old versions look new."""

    def new_cut(self) -> TrackedTinyCut:
        class Cut(TrackedTinyCut):
            def touched_since(self, version: CutVersion) -> NDArray[np.int64] | None:
                if not self.knows(version):
                    return None
                rows = [row for row, epoch in self.table.marks.items() if epoch % 256 > version.number % 256]
                return np.array(sorted(rows), dtype=np.int64)

        return Cut(self)


class ForgetsThatItWasLoaded(TrackedTinyTable):
    """Marks do not know what a load wrote."""

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> Any:
        return TinyTable.begin_load(self, clear=clear, rows_count=rows_count, filled=filled)

    def row(self, id: int) -> int:
        return TinyTable.row(self, id)


class KnowsEveryVersion(TrackedTinyTable):
    """Whosever it is."""

    def new_cut(self) -> TrackedTinyCut:
        class Cut(TrackedTinyCut):
            def knows(self, version: CutVersion) -> bool:
                return True

        return Cut(self)


class KnowsNothing(TrackedTinyTable):
    """Never wrong, and of no use."""

    def new_cut(self) -> TrackedTinyCut:
        class Cut(TrackedTinyCut):
            def knows(self, version: CutVersion) -> bool:
                return False

        return Cut(self)


class VersionsStandStill(TrackedTinyTable):
    """A cut does not end an epoch."""

    def new_cut(self) -> TrackedTinyCut:
        cut = TrackedTinyCut(self)
        self.epoch -= 1
        return cut


class TellsNoNewIds(TrackedTinyTable):
    """Claims that no row has another id."""

    def new_cut(self) -> TrackedTinyCut:
        class Cut(TrackedTinyCut):
            def begun_since(self, version: CutVersion) -> NDArray[np.int64] | None:
                return np.empty(0, dtype=np.int64)

        return Cut(self)


BROKEN: list[tuple[type[TrackedTinyTable], int, str]] = [
    (ForgetsUpdates, 0, "test_touched_rows_cover_every_change"),
    (ForgetsUpdates, 5, "test_touched_rows_cover_every_change"),
    (MarksAtWriteBack, 5, "test_touched_rows_cover_every_change"),
    (KeepsMarksOfFreeRows, 0, "test_touched_rows_cover_every_change"),
    (ForgetsRemovals, 0, "test_touched_rows_cover_every_change"),
    (DropsMarksAtTheCut, 0, "test_touched_rows_cover_every_change"),
    (DropsMarksAtTheCut, 0, "test_cut_beside_cut"),
    (CountsInAByte, 0, "test_a_version_never_becomes_wrong"),
    (ForgetsThatItWasLoaded, 0, "test_a_load_is_a_change"),
    (KnowsEveryVersion, 0, "test_versions_of_others_are_not_known"),
    (KnowsNothing, 0, "test_touched_rows_cover_every_change"),
    (VersionsStandStill, 0, "test_cut_beside_cut"),
    (TellsNoNewIds, 0, "test_touched_rows_cover_every_change"),
]


@pytest.mark.parametrize(("broken", "cache_rows", "test"), BROKEN)
def test_broken_marks_fail(broken: type[TrackedTinyTable], cache_rows: int, test: str, tmp_path: Path) -> None:
    for table, is_sound in ((broken, False), (TrackedTinyTable, True)):
        suite = TrackedTinySuite()
        suite.table_class, suite.cache_rows = table, cache_rows
        if is_sound:
            run_one(suite, test, tmp_path)
        else:
            with pytest.raises(FAILURES):
                run_one(suite, test, tmp_path)


def test_tables_without_marks_skip_with_a_reason() -> None:
    tests = [name for name in vars(MarkTests) if name.startswith("test_")]
    assert len(tests) >= 5
    for test in tests:
        with pytest.raises(pytest.skip.Exception, match="does not know which rows were written"):
            run_one(TinySuite(), test, Path())
