"""Marks of tables with fixed rows: which were written since a cut. Off until somebody promises to tell of every write.

A HashTable sees who looks rows up. The memory behind a FixedTable may be written by anybody, so its cuts know of
touched rows only after `FixedTable.track()`, or `track_lookups` for the modules that it knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from asyncckpt.model.table import CutVersion
from asyncckpt.native import I64
from asyncckpt.tables.touched_rows import TouchedRows


class FixedMarks:
    """The marks of rows_count rows, none of which is ever removed.

    Methods may be called from any thread: gradients come on threads of their own. before_cut is called before an epoch
    ends, without the lock, for marks that are collected elsewhere.
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
        """Take note that any row may have been written: no cut so far can be asked about any more."""
        with self._lock:
            self._rows.lose_all()

    def end_epoch(self) -> CutVersion:
        """End this epoch by a cut and return the cut's version."""
        self._before_cut()
        with self._lock:
            return self._rows.end_epoch()

    def touched_since(self, version: CutVersion) -> I64 | None:
        """As TracksRows."""
        with self._lock:
            return self._rows.touched_since(version)

    def removed_since(self, version: CutVersion) -> I64 | None:
        """As TracksRows."""
        with self._lock:
            return self._rows.removed_since(version)


class TracksFixedRows:
    """What makes a cut of a FixedTable a TracksRows; `start_tracking` comes before the rest."""

    _marks: FixedMarks
    _version: CutVersion

    @property
    def version(self) -> CutVersion:
        """Names the table's state at this cut; stays valid after the fence."""
        return self._version

    def touched_since(self, version: CutVersion) -> I64 | None:
        """Return the rows marked since a cut, ascending int64 [n]; None when it is not known. Raises UsageError."""
        self._check_open("touched rows")
        return self._marks.touched_since(version)

    def removed_since(self, version: CutVersion) -> I64 | None:
        """Return no ids: fixed rows are never removed. None when it is not known. Raises UsageError."""
        self._check_open("removed ids")
        return self._marks.removed_since(version)

    def begun_since(self, version: CutVersion) -> I64 | None:
        """Return no rows: ids never change. None when it is not known. Raises UsageError."""
        self._check_open("begun rows")
        return None if self._marks.touched_since(version) is None else np.empty(0, dtype=np.int64)

    def start_tracking(self, marks: FixedMarks) -> None:
        """End an epoch of the marks by this cut."""
        self._marks = marks
        self._version = marks.end_epoch()

    def _check_open(self, use: str) -> None:
        raise NotImplementedError
