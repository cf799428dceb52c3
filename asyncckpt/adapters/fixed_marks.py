"""Marks of tables with fixed rows: which were written since a cut. Off until a caller promises to report every write.

A HashTable sees all lookups. Any code may write to the memory of a FixedTable, so its cuts know touched rows only after
`FixedTable.track()`, or `track_lookups` for supported modules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from asyncckpt.model.table import CutVersion
from asyncckpt.native import I64
from asyncckpt.tables.touched_rows import TouchedRows


class FixedMarks:
    """The marks of rows_count rows, which are never removed.

    Any thread may call the methods: autograd has threads of its own. before_cut is called before an epoch ends, without
    the lock, to fetch marks that are collected elsewhere.
    """

    def __init__(self, rows_count: int, *, before_cut: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._before_cut = before_cut
        self._rows = TouchedRows(rows_count)
        self._rows.begin_rows(np.arange(rows_count, dtype=np.int64), rows_end=rows_count)

    def mark(self, rows: I64) -> None:
        """Mark rows, int64 [n] in range, as written in this epoch."""
        with self._lock:
            self._rows.mark(rows)

    def lose_all(self) -> None:
        """Note that any row may have been written; earlier cuts cannot be asked about any more."""
        with self._lock:
            self._rows.lose_all()

    def end_epoch(self) -> CutVersion:
        """End this epoch by a cut and return the cut's version."""
        self._before_cut()
        with self._lock:
            return self._rows.end_epoch()

    def touched_since(self, version: CutVersion) -> I64 | None:
        """See TracksRows."""
        with self._lock:
            return self._rows.touched_since(version)

    def removed_since(self, version: CutVersion) -> I64 | None:
        """See TracksRows."""
        with self._lock:
            return self._rows.removed_since(version)


class TracksFixedRows:
    """Makes a cut of a FixedTable a TracksRows; call `start_tracking` first."""

    _marks: FixedMarks
    version: CutVersion

    def touched_since(self, version: CutVersion) -> I64 | None:
        """Return the rows marked since a cut, ascending int64 [n]; None if unknown. Raises UsageError."""
        self._check_open("touched rows")
        return self._marks.touched_since(version)

    def removed_since(self, version: CutVersion) -> I64 | None:
        """Return no ids: fixed rows are never removed. None if unknown. Raises UsageError."""
        self._check_open("removed ids")
        return self._marks.removed_since(version)

    def begun_since(self, version: CutVersion) -> I64 | None:
        """Return no rows: ids never change. None if unknown. Raises UsageError."""
        self._check_open("begun rows")
        return None if self._marks.touched_since(version) is None else np.empty(0, dtype=np.int64)

    def start_tracking(self, marks: FixedMarks) -> None:
        """End an epoch of the marks with this cut."""
        self._marks = marks
        self.version = marks.end_epoch()

    def _check_open(self, use: str) -> None:
        raise NotImplementedError
