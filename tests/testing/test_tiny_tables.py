"""TableSuite passes for a sound table of a stranger, and each broken one fails the test that is there for its fault."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncckpt.model.table import CacheCopy
from asyncckpt.testing.case import TableCase
from tests.testing.one_test import FAILURES, run_one
from tests.testing.tiny_table import OpenTinyCut, OpenTinyTable, TinyCut, TinyLoad, TinySuite, TinyTable


class TestTinyTable(TinySuite):
    pass


class TestCachedTinyTable(TinySuite):
    cache_rows = 5


class TestOpenTinyTable(TinySuite):
    table_class = OpenTinyTable
    cache_rows = 5


# -- broken tables -----------------------------------------------------------------------------------------------------


class FlushesAtTheCut(TinyTable):
    def begin_cut(self) -> Any:
        cut = super().begin_cut()
        self.flush()
        return cut


class HoldsNothing(TinyTable):
    """Its cut does not keep training away."""

    def begin_cut(self) -> Any:
        cut = super().begin_cut()
        cut.fence()
        return cut


class KeepsTheLock(TinyTable):
    """A cut that ends before its fence never gives the table back."""

    def begin_cut(self) -> Any:
        class Cut(TinyCut):
            def end(self, ok: bool) -> None:
                pass

        self.hold()
        return Cut(self)


class LetsGoTwice(TinyTable):
    """The fence of an old cut gives the table back that a new one holds."""

    def begin_cut(self) -> Any:
        class Cut(TinyCut):
            def fence(self) -> None:
                if self.table.lock.locked():
                    self.table.lock.release()

        self.hold()
        return Cut(self)


class AnotherRowOrder(TinyTable):
    """One column is not in the row order of the ids."""

    def begin_cut(self) -> Any:
        class Cut(TinyCut):
            def column(self, name: str) -> torch.Tensor:
                if name != "momentum":
                    return super().column(name)
                self.table.flipped = super().column(name).flip(0)  # Storage must live until the fence.
                return self.table.flipped

        self.hold()
        return Cut(self)


class CutForgetsRemovals(TinyTable):
    """Rows of removed ids are still in the runs."""

    def begin_cut(self) -> Any:
        cut = super().begin_cut()
        used = len(self.rows)
        if used:
            cut.runs = torch.tensor([[0, used]]).numpy()
        return cut


class CacheIsForgotten(TinyTable):
    """Cached rows do not win: the cut does not show the cache of one column."""

    def begin_cut(self) -> Any:
        class Cut(TinyCut):
            def cached_column(self, name: str) -> torch.Tensor | None:
                return None if name == "momentum" else super().cached_column(name)

        self.hold()
        return Cut(self)


class TearsBehindTheFence(OpenTinyTable):
    """Exports rows as they are now, not as they were at the cut."""

    def begin_cut(self) -> Any:
        class Cut(OpenTinyCut):
            def be_deferred(self, copy: CacheCopy, *, window_rows: int) -> None:
                super().be_deferred(copy, window_rows=window_rows)
                self.kept = self.table.stored

        self.hold()
        return Cut(self)


class EvictedRowsAreTorn(OpenTinyTable):
    """Cached rows do not win any more once they were written back."""

    def begin_cut(self) -> Any:
        class Cut(OpenTinyCut):
            def export(self, index: int, targets: Mapping[str, int]) -> None:
                self.copy.map[self.copy.map != self.table.cache_map.numpy()] = -1
                super().export(index, targets)

        self.hold()
        return Cut(self)


class DropsOptimizerRows(TinyTable):
    """A loaded table begins with new optimizer rows."""

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> Any:
        class Load(TinyLoad):
            def column(self, name: str) -> torch.Tensor:
                if name != "momentum":
                    return super().column(name)
                self.table.scratch = torch.zeros_like(super().column(name))
                return self.table.scratch

        super().begin_load(clear=clear, rows_count=rows_count, filled=filled)
        return Load(self)


class IgnoresClear(TinyTable):
    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> Any:
        return super().begin_load(clear=False, rows_count=rows_count, filled=filled)


class ClearsOnMerge(TinyTable):
    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> Any:
        return super().begin_load(clear=True, rows_count=rows_count, filled=filled)


class KeepsHalfLoadedRows(TinyTable):
    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> Any:
        class Load(TinyLoad):
            def end(self, ok: bool) -> None:
                super().end(True)

        super().begin_load(clear=clear, rows_count=rows_count, filled=filled)
        return Load(self)


class LeavesTheCacheAtALoad(TinyTable):
    """The cache still holds rows from before the load, which win over those that were loaded."""

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> Any:
        cache_map = self.cache_map.clone()
        load = super().begin_load(clear=clear, rows_count=rows_count, filled=filled)
        self.cache_map.copy_(cache_map)
        return load


class SchemaHasNoIds(TinyTable):
    def schema(self) -> Any:
        schema = super().schema()
        return type(schema)(columns=schema.columns[1:])


BROKEN: list[tuple[type[TinyTable], int, str]] = [
    (FlushesAtTheCut, 5, "test_a_cut_changes_nothing"),
    (FlushesAtTheCut, 5, "test_a_save_changes_nothing"),
    (FlushesAtTheCut, 5, "test_cached_rows_win"),
    (HoldsNothing, 0, "test_cut_does_not_change_before_the_fence"),
    (KeepsTheLock, 0, "test_end_without_fence"),
    (LetsGoTwice, 0, "test_fence_and_end_do_nothing_the_second_time"),
    (AnotherRowOrder, 0, "test_cut_holds_the_contents"),
    (AnotherRowOrder, 0, "test_blocking_save"),
    (CutForgetsRemovals, 0, "test_cut_holds_the_contents"),
    (CacheIsForgotten, 5, "test_cached_rows_win"),
    (CacheIsForgotten, 5, "test_save_async_holds_the_table_of_the_call"),
    (TearsBehindTheFence, 5, "test_windows_hold_the_cut_while_training_goes_on"),
    (EvictedRowsAreTorn, 5, "test_windows_hold_the_cut_while_training_goes_on"),
    (DropsOptimizerRows, 0, "test_blocking_save"),
    (DropsOptimizerRows, 0, "test_merge_keeps_other_rows"),
    (IgnoresClear, 0, "test_load_empties_first"),
    (ClearsOnMerge, 0, "test_merge_keeps_other_rows"),
    (KeepsHalfLoadedRows, 0, "test_a_failed_load"),
    (LeavesTheCacheAtALoad, 5, "test_load_empties_first"),
    (SchemaHasNoIds, 0, "test_schema_is_sound"),
]


def suite_of(table: type[TinyTable], cache_rows: int) -> TinySuite:
    suite = TinySuite()
    suite.table_class = table
    suite.cache_rows = cache_rows
    return suite


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is never given back is found out after a moment."""
    monkeypatch.setattr("tests.testing.tiny_table.LOCK_S_MAX", 1.5)


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize(("broken", "cache_rows", "test"), BROKEN)
def test_broken_table_fails(broken: type[TinyTable], cache_rows: int, test: str, tmp_path: Path) -> None:
    with pytest.raises(FAILURES):
        run_one(suite_of(broken, cache_rows), test, tmp_path / "broken")
    sound = OpenTinyTable if issubclass(broken, OpenTinyTable) else TinyTable
    run_one(suite_of(sound, cache_rows), test, tmp_path / "sound")


def test_hooks_must_be_there() -> None:
    suite = TableCase()
    for missing in (suite.make_table, lambda: suite.train(TinyTable(), 0, 0), lambda: suite.contents(TinyTable())):
        with pytest.raises(NotImplementedError, match="a TableSuite needs"):
            missing()


def test_training_that_is_not_repeatable_is_found() -> None:
    class Restless(TinySuite):
        calls = 0

        def train(self, table: Any, step: int, seed: int) -> None:
            self.calls += 1
            super().train(table, step, self.calls)

    with pytest.raises(AssertionError, match="train depends on more than table, step and seed"):
        Restless().test_contents_have_the_columns_of_the_schema()


def test_training_that_leaves_a_column_alone_is_found() -> None:
    class Half(TinySuite):
        def train(self, table: Any, step: int, seed: int) -> None:
            with torch.no_grad():
                for number in range(6):
                    table.write(number, {"weight": torch.full((3,), float(step))})

    with pytest.raises(AssertionError, match="training never changes column 'momentum'"):
        Half().test_contents_have_the_columns_of_the_schema()
