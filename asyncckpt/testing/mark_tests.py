"""Tests of tables that know which rows were written since a cut. Other tables skip them.

A cut may report more rows than were written, or that it does not know. It must never leave one out: a row that was
changed and not reported is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncckpt.model.table import CutVersion, Table, TableCut, TableSchema, TracksIds, TracksRows
from asyncckpt.native import I64
from asyncckpt.testing.case import STEPS, TableCase, shuffled
from asyncckpt.testing.cuts import cut_rows, ended, run_rows

MANY_CUTS = 300
# How many cuts a table must remember at least: two savers, a failed save or two, and other cuts meanwhile.
CUTS_KNOWN = 8


@dataclass(frozen=True)
class Remembered:
    """A table at a cut: rows of the storage, int64 [n], the id of each, and all bytes of each, uint8 [n, bytes]."""

    version: CutVersion
    rows: I64
    ids: I64
    contents: NDArray[np.uint8]

    @staticmethod
    def of(cut: TracksRows, schema: TableSchema) -> Remembered:
        contents = cut_rows(cut, schema)
        # `id` is the first column.
        ids = np.ascontiguousarray(contents[:, :8]).view(np.int64).reshape(-1)
        return Remembered(version=cut.version, rows=run_rows(cut.runs), ids=ids, contents=contents)

    def changed_rows(self, since: Remembered) -> I64:
        """Return the storage rows that differ from an earlier cut, or were unused then."""
        _, now, then = np.intersect1d(self.rows, since.rows, assume_unique=True, return_indices=True)
        differ = (self.contents[now] != since.contents[then]).any(axis=1)
        return np.union1d(self.rows[now[differ]], np.setdiff1d(self.rows, since.rows))

    def begun_rows(self, since: Remembered) -> I64:
        """Return the storage rows that hold another id than at an earlier cut, or were unused then."""
        _, now, then = np.intersect1d(self.rows, since.rows, assume_unique=True, return_indices=True)
        others = self.rows[now[self.ids[now] != since.ids[then]]]
        return np.union1d(others, np.setdiff1d(self.rows, since.rows))


class MarkTests(TableCase):
    """The second of two cuts reports everything that changed between them."""

    @pytest.mark.parametrize("seed", range(3))
    def test_touched_rows_cover_every_change(self, seed: int) -> None:
        """Since the last cut and since earlier ones, across saves that failed."""
        table = self._tracking(seed=seed)
        earlier: list[Remembered] = []
        for step in range(STEPS, STEPS + CUTS_KNOWN):
            now = self._check_cut(table, earlier, ok=bool((step + seed) % 2), must_know=True)
            earlier.append(now)
            self.train(table, step, seed)
        self._check_cut(table, earlier, ok=True, must_know=True)

    def test_cut_beside_cut(self) -> None:
        """Two cuts with nothing between them report the same."""
        table = self._tracking()
        first = self._check_cut(table, [], ok=True)
        self.train(table, STEPS, 1)
        second = self._check_cut(table, [first], ok=True, must_know=True)
        assert second.version.source == first.version.source
        assert second.version.number > first.version.number, "versions of one table do not ascend"
        self._check_cut(table, [first, second], ok=True, must_know=True)

    def test_a_version_never_becomes_wrong(self) -> None:
        """After any number of cuts, it is known and right, or unknown. Counters must not wrap around."""
        table = self._tracking()
        earlier = [self._check_cut(table, [], ok=True)]
        for number in range(MANY_CUTS):
            if number % 25 == 0:
                self.train(table, STEPS + number, 1)
            # Only few cuts are read completely, which is slow.
            if number % 30 == 0:
                earlier.append(self._check_cut(table, earlier, ok=True))
            else:
                table.begin_cut().end(True)
        last = self._check_cut(table, earlier, ok=True)
        self.train(table, STEPS + MANY_CUTS, 1)
        self._check_cut(table, [last], ok=True, must_know=True)

    def test_versions_of_others_are_not_known(self) -> None:
        table, other = self._tracking(), self._tracking()
        theirs = self._check_cut(other, [], ok=True).version
        own = self._check_cut(table, [], ok=True).version
        assert own.source != theirs.source, "two tables have one source of versions"
        coming = CutVersion(source=own.source, number=own.number + 1000)
        with _tracked(table) as cut:
            for version in (theirs, coming):
                assert cut.touched_since(version) is None, f"{version} is not a version of this table"
                assert cut.removed_since(version) is None, f"{version} is not a version of this table"

    @pytest.mark.parametrize("clear", [True, False])
    @pytest.mark.parametrize("ok", [True, False])
    def test_a_load_is_a_change(self, clear: bool, ok: bool) -> None:
        """A load may write any row: earlier versions are unknown, or report everything that it changed."""
        if clear and self.fixed_ids:
            pytest.skip("the table cannot be emptied (fixed_ids)")
        table = self._tracking()
        earlier = [self._check_cut(table, [], ok=True)]
        self._load_rows_of(self._tracking(seed=2), table, clear=clear, ok=ok)
        now = self._check_cut(table, earlier, ok=True)
        if ok:
            assert now.changed_rows(earlier[0]).size, "training with two seeds leads to the same rows"
        self.train(table, STEPS, 1)
        self._check_cut(table, [*earlier, now], ok=True)

    def _load_rows_of(self, source: Table, table: Table, *, clear: bool, ok: bool) -> None:
        """Do what a Loader does, without files, and end the load with ok."""
        with ended(source.begin_cut()) as cut:
            rows = run_rows(cut.runs)
            columns = {column.name: cut.column(column.name)[rows].clone() for column in source.schema().columns}
        ids = columns.pop("id")
        load = table.begin_load(clear=clear, rows_count=len(ids), filled=set(columns))
        try:
            targets = load.insert(ids)
            for name, values in columns.items():
                load.column(name)[targets] = values
        finally:
            load.end(ok)

    def _tracking(self, *, seed: int = 1) -> Table:
        """Return a trained table whose cuts track rows; skip the test, before training, if they do not."""
        table = self.make_table()
        cut: TableCut = table.begin_cut()
        cut.end(True)
        if not isinstance(cut, TracksRows):
            pytest.skip("the table does not know which rows were written: its cuts are no TracksRows")
        self.train_steps(table, range(STEPS), seed)
        return table

    def _check_cut(self, table: Table, earlier: list[Remembered], *, ok: bool, must_know: bool = False) -> Remembered:
        """Make a cut, compare what it reports with earlier ones, and remember it."""
        with _tracked(table, ok=ok) as cut:
            now = Remembered.of(cut, table.schema())
            for index in shuffled(len(earlier), len(earlier)):
                since = earlier[index]
                touched, removed = cut.touched_since(since.version), cut.removed_since(since.version)
                what = f"since {since.version}, {len(earlier) - index} remembered cuts ago"
                assert touched is not None or not must_know, f"touched rows are not known {what}"
                assert removed is not None or not must_know, f"removed ids are not known {what}"
                if touched is not None:
                    _check_touched(touched, now, since, what=what)
                if removed is not None:
                    _check_removed(removed, now, since, what=what)
                begun = cut.begun_since(since.version) if isinstance(cut, TracksIds) else None
                if begun is not None:
                    _check_begun(begun, now, since, what=what)
            own = cut.touched_since(cut.version)
            assert own is None or not own.size, "rows were written after the cut that is being made"
        return now


@contextmanager
def _tracked(table: Table, *, ok: bool = True) -> Iterator[TracksRows]:
    with ended(table.begin_cut(), ok) as cut:
        assert isinstance(cut, TracksRows), "cuts of the table are not always of one kind"
        yield cut


def _check_rows(rows: I64, *, what: str) -> None:
    assert rows.dtype == np.int64
    assert rows.ndim == 1
    assert bool((np.diff(rows) > 0).all()), f"not ascending and distinct: {what}"


def _check_touched(touched: I64, now: Remembered, since: Remembered, *, what: str) -> None:
    _check_rows(touched, what=f"touched rows {what}")
    outside = np.setdiff1d(touched, now.rows)
    assert not outside.size, f"touched rows are not of the cut {what}: {outside[:5].tolist()}"
    missed = np.setdiff1d(now.changed_rows(since), touched)
    assert not missed.size, f"{missed.size} rows changed and are not among the touched {what}: {missed[:5].tolist()}"


def _check_begun(begun: I64, now: Remembered, since: Remembered, *, what: str) -> None:
    _check_rows(begun, what=f"begun rows {what}")
    missed = np.setdiff1d(now.begun_rows(since), begun)
    assert not missed.size, f"{missed.size} rows have another id and are not reported {what}: {missed[:5].tolist()}"


def _check_removed(removed: I64, now: Remembered, since: Remembered, *, what: str) -> None:
    assert removed.dtype == np.int64
    assert removed.ndim == 1
    assert len(np.unique(removed)) == len(removed), f"removed ids are not distinct {what}"
    missed = np.setdiff1d(np.setdiff1d(since.ids, now.ids), removed)
    assert not missed.size, f"{missed.size} ids are gone and not among the removed {what}: {missed[:5].tolist()}"
