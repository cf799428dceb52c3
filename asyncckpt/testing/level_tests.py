"""Tests of tables with a cache level: overlays and deferred cuts. Other tables skip them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from asyncckpt.model.table import ID_COLUMN, DeferredCut, OverlaidCut, Table
from asyncckpt.testing.case import STEPS, TableCase, ends_soon, finish, shuffled, start
from asyncckpt.testing.cuts import Windows, cache_copy, cut_image, ended
from asyncckpt.testing.image import Image

STEPS_MAX = 40


class LevelTests(TableCase):
    """Cached rows win over those of the storage, even if training goes on while the storage is exported."""

    def test_cache_map_names_rows_of_the_storage(self) -> None:
        table = self._trained()
        with overlaid(table) as cut:
            cache_map = cut.cache_map
            assert cache_map.dtype is torch.int64
            assert cache_map.is_cpu
            assert cache_map.dim() == 1
            held = cache_map[cache_map != -1].numpy()
            assert len(set(held.tolist())) == len(held), "a row of the storage is in the cache twice"
            assert set(held.tolist()) <= set(_rows(cut)), "the cache map names rows that the cut does not have"
            assert cut.cached_column(ID_COLUMN) is None
            for column in table.schema().columns[1:]:
                cached = cut.cached_column(column.name)
                if cached is not None:
                    assert cached.dtype is column.dtype
                    assert tuple(cached.shape[1:]) == column.row_shape
                    assert cached.is_contiguous()
                    assert len(cached) >= len(cache_map)

    def test_cached_rows_win(self) -> None:
        """Training must reach a step at which the storage alone is stale, so that the overlay matters."""
        table = self._trained()
        stale = 0
        for step in range(STEPS, STEPS_MAX):
            expected, schema = self.image(table), table.schema()
            with overlaid(table) as cut:
                cut_image(cut, schema).assert_equals(expected, what="the cut")
                stale += cut_image(cut, schema, overlay=False).difference(expected) is not None
            if stale >= 2:
                return
            self.train(table, step, 1)
        raise AssertionError(f"in {STEPS_MAX} steps no cached row was newer than the storage: is the table flushed?")

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("window_rows", [1, 3, 1000])
    def test_windows_hold_the_cut_while_training_goes_on(self, window_rows: int, seed: int) -> None:
        """Windows in any order, training steps between them."""
        table = self._trained(stays_open=True, seed=seed)
        expected = self.image(table)
        with deferred_cut(table, window_rows=window_rows) as (cut, windows):
            self._export_beside_training(table, cut, windows, seed=seed)
        windows.image().assert_equals(expected, what=f"windows with seed {seed}")

    def test_most_urgent_is_one_of_those_left(self) -> None:
        table = self._trained(stays_open=True)
        expected = self.image(table)
        with deferred_cut(table, window_rows=2) as (cut, windows), training(self, table, seed=1):
            while windows.left:
                chosen = cut.most_urgent(list(windows.left))
                assert chosen in windows.left
                windows.export(chosen)
            cut.end(True)
        windows.image().assert_equals(expected, what="windows by urgency")

    def test_two_cuts_are_open_at_once(self) -> None:
        """As with queued saves: the older cut is exported first, the newer one holds a later step."""
        table = self._trained(stays_open=True)
        first_expected = self.image(table)
        with contextlib.ExitStack() as stack:
            first, first_windows = stack.enter_context(deferred_cut(table, window_rows=2))
            step = start(partial(self.train, table, STEPS, 1))
            if not ends_soon(step[0]):  # The table may let the step wait for the end of the cut.
                first_windows.export_all(shuffled(len(first_windows.left), 1))
                first.end(True)
            finish(step)
            second_expected = self.image(table)
            second, second_windows = stack.enter_context(deferred_cut(table, window_rows=3))
            with training(self, table, seed=2):
                for cut, windows in ((first, first_windows), (second, second_windows)):
                    windows.export_all(shuffled(len(windows.left), 2))
                    cut.end(True)
        for windows, expected in ((first_windows, first_expected), (second_windows, second_expected)):
            windows.image().assert_equals(expected, what="windows of one of two cuts")

    @pytest.mark.parametrize("ok", [True, False])
    def test_a_cut_may_end_before_all_is_exported(self, ok: bool) -> None:
        table = self._trained(stays_open=True)
        with deferred_cut(table, window_rows=2) as (cut, windows):
            windows.export(windows.left[-1])
            cut.end(ok)
            cut.end(ok)
        with training(self, table, seed=1):
            pass
        self.assert_holds(table, self._trained_beside(seed=1), what="a table whose open cut ended early")

    def test_an_open_cut_changes_nothing(self) -> None:
        table = self._trained(stays_open=True)
        expected, inside = self.image(table), self.inside(table)
        with deferred_cut(table, window_rows=2) as (_, windows):
            windows.export_all(shuffled(len(windows.left), 0))
        self.assert_holds(table, expected, what="the table after an open cut")
        assert self.inside(table) == inside

    def _trained(self, *, stays_open: bool = False, seed: int = 1) -> Table:
        """Return a trained table with a cache level; skip the test, before training, if there is none."""
        table = self.make_table()
        with ended(table.begin_cut()) as cut:
            has_level, is_open = isinstance(cut, OverlaidCut), isinstance(cut, DeferredCut)
        if not has_level:
            pytest.skip("the table has no cache level: its cuts are no OverlaidCut")
        if stays_open and not is_open:
            pytest.skip("cuts of the table cannot stay open: they are no DeferredCut")
        self.train_steps(table, range(STEPS), seed)
        return table

    def _export_beside_training(self, table: Table, cut: DeferredCut, windows: Windows, *, seed: int) -> None:
        """Train a step per window while that works: a table may let its growth wait for the end of the cut."""
        order = shuffled(len(windows.left), seed)
        with training(self, table, seed=seed) as steps:
            goes_on = True
            for number, index in enumerate(order):
                if goes_on and number < len(steps):
                    goes_on = ends_soon(steps[number])
                windows.export(index)
            cut.end(True)

    def _trained_beside(self, *, seed: int) -> Image:
        table = self.trained()
        self.train_steps(table, range(STEPS, 2 * STEPS), seed)
        return self.image(table)


@contextlib.contextmanager
def overlaid(table: Table) -> Iterator[OverlaidCut]:
    """Make a cut with a cache level and end it."""
    with ended(table.begin_cut()) as cut:
        assert isinstance(cut, OverlaidCut), "cuts of the table are not always of one kind"
        yield cut


@contextlib.contextmanager
def deferred_cut(table: Table, *, window_rows: int) -> Iterator[tuple[DeferredCut, Windows]]:
    """Make a deferred cut and end it."""
    with ended(table.begin_cut()) as cut:
        assert isinstance(cut, DeferredCut), "cuts of the table are not always of one kind"
        windows = Windows(cut, table.schema(), window_rows=window_rows)
        cut.be_deferred(cache_copy(cut, table.schema()), window_rows=window_rows)
        cut.fence()
        yield cut, windows


@contextlib.contextmanager
def training(case: TableCase, table: Table, *, seed: int) -> Iterator[list[Future[None]]]:
    """Train in another thread; wait for all of its steps at the end, unless a test fails: they may wait for a cut."""
    steps = start(*(partial(case.train, table, step, seed) for step in range(STEPS, 2 * STEPS)))
    yield steps
    finish(steps)


def _rows(cut: OverlaidCut) -> list[int]:
    return [row for begin, end in cut.runs.tolist() for row in range(begin, end)]
