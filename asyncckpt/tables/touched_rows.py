"""Marks: in which epoch each row of a table was last written, so that a save can copy or write only what changed.

An epoch lasts from one cut to the next. Nothing is taken back when a save fails: whoever needs the rows written since
some cut keeps the version of that cut and asks with it later.

Epochs are counted without end, a mark is one byte: the epoch minus an offset.

    0         the row is free
    1         written at or before the end of epoch offset + 1: nobody can tell any more in which
    2 .. 255  written in epoch offset + mark

When the epochs have gone through all bytes, the older half of the marks becomes 1, the others go down, and versions of
that time are not known any more. Removed ids are logged beside the marks (epoch_log.py), for their rows may have gone
to other ids; and so are rows that were given to an id.
"""

from __future__ import annotations

import itertools

import numpy as np

from asyncckpt.model.table import CutVersion
from asyncckpt.native import I64, U8, core
from asyncckpt.tables.epoch_log import EpochLog

FREE, OLD, FIRST, LAST = 0, 1, 2, 255
# How far marks go down when they have reached the last one.
STEP_DOWN = (LAST - FIRST + 1) // 2
# Marks go down in parts that stay in a core's cache.
PART_ROWS = 1 << 18
# The log of removed ids may hold as many as there are rows in use, and always this many.
REMOVED_IDS_MAX = 1_000_000
# The log of rows given to an id may hold so many. More of them are copied with all touched rows.
BEGUN_ROWS_MAX = 1 << 18

_sources = itertools.count(1)


class TouchedRows:
    """The marks of one table's rows, and its removed ids. Callers hold the table's lock.

    capacity is how many rows there is room for; marks of rows that were never used cost no memory.
    """

    def __init__(self, capacity: int) -> None:
        self._source = next(_sources)
        self._marks = _no_marks(capacity)
        self._rows_end = 0
        self._epoch = 1
        self._offset = self._epoch - FIRST
        # The oldest cut that can be asked about; cuts are numbered by the epochs that they end.
        self._known_from = self._epoch
        self._removed = EpochLog()
        self._begun = EpochLog()

    # -- writes --------------------------------------------------------------------------------------------------------

    def mark(self, rows: I64) -> None:
        """Mark used rows, int64 [n], as written in this epoch; -1 is passed over, a row may be mentioned often."""
        if rows.size:
            core.mark(self._marks, rows, self._mark_now())

    def mark_used(self, rows: I64) -> None:
        """Mark those of rows, int64 [n] below the capacity, that are used; -1 is passed over."""
        # A free row must stay unmarked, and whoever keeps row numbers may not know of a removal.
        used = self._marks.take(rows) != FREE
        self.mark(rows if used.all() else rows[used])

    def begin_rows(self, rows: I64, *, rows_end: int) -> None:
        """Mark rows that were free until now; rows_end is one more than the last row in use."""
        self._rows_end = max(self._rows_end, rows_end)
        self._begun.add(rows, epoch=self._epoch, count_max=BEGUN_ROWS_MAX)
        self.mark(rows)

    def remove(self, rows: I64, ids: I64, *, used_count: int) -> None:
        """Take note that rows, int64 [n], are free again and that their ids are gone; used_count were used before."""
        if rows.size:
            core.mark(self._marks, rows, FREE)
            self._removed.add(ids, epoch=self._epoch, count_max=max(REMOVED_IDS_MAX, used_count))

    def clear(self) -> None:
        """Take note that all rows are free; no cut so far can be asked about any more."""
        self._marks[: self._rows_end] = FREE
        self.lose_all()

    def lose_all(self) -> None:
        """Take note that any row may have been written or removed: no cut so far can be asked about any more."""
        self._known_from = self._epoch
        self._removed.forget_all(epoch=self._epoch)
        self._begun.forget_all(epoch=self._epoch)

    def grow(self, capacity: int) -> None:
        """Make room for rows up to a capacity; marks stay."""
        if capacity > len(self._marks):
            # Zeroed by the system when a page is reached, which copying all of the old marks would do at once.
            marks = _no_marks(capacity)
            marks[: self._rows_end] = self._marks[: self._rows_end]
            self._marks = marks

    # -- cuts ----------------------------------------------------------------------------------------------------------

    def end_epoch(self) -> CutVersion:
        """End this epoch by a cut and return the cut's version: what is written from now on is newer."""
        self._epoch += 1
        return CutVersion(source=self._source, number=self._epoch - 1)

    def touched_since(self, version: CutVersion) -> I64 | None:
        """Return the used rows written since a cut, ascending int64 [n]; None when that is not known."""
        if not self._knows(version):
            return None
        return core.marked(self._marks[: self._rows_end], min(version.number - self._offset, LAST))

    def removed_since(self, version: CutVersion) -> I64 | None:
        """Return the distinct ids removed since a cut, ascending int64 [n]; None when that is not known."""
        return self._removed.since(version.number) if self._knows(version) else None

    def begun_since(self, version: CutVersion) -> I64 | None:
        """Return the rows given to an id since a cut, ascending int64 [n], some free again; None when not known."""
        return self._begun.since(version.number) if self._knows(version) else None

    def _knows(self, version: CutVersion) -> bool:
        return version.source == self._source and self._known_from <= version.number < self._epoch

    def _mark_now(self) -> int:
        # Not done by the cut that ends an epoch, which training waits for.
        if self._epoch - self._offset > LAST:
            self._step_down()
        return self._epoch - self._offset

    def _step_down(self) -> None:
        """Make room for newer marks: see the table at the head of this file."""
        # Further down after many cuts without a write between them; what goes down by this much is old in any case.
        offset = max(self._offset + STEP_DOWN, self._epoch - LAST)
        down = min(offset - self._offset, LAST - OLD)
        for begin in range(0, self._rows_end, PART_ROWS):
            part = self._marks[begin : min(begin + PART_ROWS, self._rows_end)]
            used = part != FREE
            np.maximum(part, down + OLD, out=part)
            part -= np.uint8(down)
            part *= used
        self._offset = offset
        self._known_from = max(self._known_from, offset + OLD)


def _no_marks(capacity: int) -> U8:
    """Zeros, which the system makes when a page is reached."""
    marks: U8 = np.zeros(capacity, dtype=np.uint8)
    # A cut reads all of them. Not memory of the core's own: forked children, which may look ids up, do not have that.
    core.advise_huge(marks.ctypes.data, marks.nbytes)
    return marks
