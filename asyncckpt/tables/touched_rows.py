"""Marks: in which epoch each row of a table was last written, so that a save can copy or write only what changed.

An epoch lasts from one cut to the next. A failed save takes nothing back: to get the rows written since a cut, keep the
version of that cut and ask with it later.

The epoch counter is unbounded, a mark is one byte: the epoch minus an offset.

    0         the row is free
    1         written at or before the end of epoch offset + 1, in an unknown epoch
    2 .. 255  written in epoch offset + mark

When the bytes are used up, the older half of the marks becomes 1, the others are lowered, and versions of the older
half are no longer known. Removed ids are logged beside the marks (EpochLog), because their rows may belong to other
ids by now, and so are rows that were assigned to an id.

A copy of rows while training continues does not ask afterwards: it is told before they change (RowWatchers).
"""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from asyncckpt.model.table import CutVersion, RowWatcher
from asyncckpt.native import I64, U8, core
from asyncckpt.signals import Guard
from asyncckpt.system import register_at_fork

FREE, OLD, FIRST, LAST = 0, 1, 2, 255
# By how much marks are lowered when they have reached the last one.
STEP_DOWN = (LAST - FIRST + 1) // 2
# Marks are lowered in parts that fit a core's cache.
PART_ROWS = 1 << 18
# The log of removed ids may hold as many as there are rows in use, and always this many.
REMOVED_IDS_MAX = 1_000_000
# The log of rows assigned to an id may hold this many. Beyond it, ids are copied for all touched rows.
BEGUN_ROWS_MAX = 1 << 18
# Room of a log to begin with.
FIRST_ROOM = 1024

_sources = itertools.count(1)


class TouchedRows:
    """The marks of one table's rows, and its removed ids. Callers hold the table's lock.

    Marks of rows up to the capacity that were never used cost no memory.
    """

    def __init__(self, capacity: int) -> None:
        self._source = next(_sources)
        self._marks = _no_marks(capacity)
        self._rows_end = 0
        self._epoch = 1
        self._offset = self._epoch - FIRST
        # The oldest cut that can be asked about; cuts are numbered by the epochs that they end.
        self._known_from = self._epoch
        self._written_by_others = 0  # The epoch in which that was noticed last.
        self._removed = EpochLog()
        self._begun = EpochLog()

    @property
    def bytes(self) -> int:
        """The memory of the marks, used or not."""
        return self._marks.nbytes

    # -- writes --------------------------------------------------------------------------------------------------------

    def mark(self, rows: I64) -> None:
        """Mark used rows, int64 [n], as written in this epoch; skip -1; a row may be mentioned several times."""
        if rows.size:
            core.mark(self._marks, rows, self._mark_now())

    def mark_used(self, rows: I64) -> NDArray[np.bool_]:
        """Mark the used rows among rows, int64 [n] below the capacity, return which these are, bool [n]; skip -1."""
        mark, marks = self._mark_now(), self._marks.take(rows)
        # A free row must stay unmarked, and a caller that keeps row numbers may not know of a removal.
        used: NDArray[np.bool_] = (marks != FREE) & (rows >= 0)
        if not (marks == mark).all():  # A lookup has marked them before.
            self.mark(rows if used.all() else rows[used])
        return used

    def to_set(self, rows_count: int) -> tuple[U8, int]:
        """Return the marks of rows below a count and the mark of this epoch, for who sets them while it writes rows."""
        return self._marks[:rows_count], self._mark_now()

    def begin_rows(self, rows: I64, *, rows_end: int) -> None:
        """Mark rows that were free until now; rows_end is the last used row plus one."""
        self._rows_end = max(self._rows_end, rows_end)
        self._begun.add(rows, epoch=self._epoch, count_max=BEGUN_ROWS_MAX)
        self.mark(rows)

    def remove(self, rows: I64, ids: I64, *, used_count: int) -> None:
        """Note that rows, int64 [n], are free again and their ids removed; used_count rows were used before."""
        if rows.size:
            core.mark(self._marks, rows, FREE)
            self._removed.add(ids, epoch=self._epoch, count_max=max(REMOVED_IDS_MAX, used_count))

    def clear(self) -> None:
        """Note that all rows are free; earlier cuts cannot be asked about any more."""
        self._marks[: self._rows_end] = FREE
        self.lose_all()

    def lose_all(self, *, by_others: bool = False) -> None:
        """Note that any row may have been written or removed; earlier cuts cannot be asked about any more.

        by_others: other code has written columns, which the table could have followed.
        """
        self._known_from = self._epoch
        if by_others:
            self._written_by_others = self._epoch
        self._removed.forget_all(epoch=self._epoch)
        self._begun.forget_all(epoch=self._epoch)

    def renumber(self, rows_count: int, *, capacity: int) -> None:
        """Note that the used rows are the first of a new capacity now, and that earlier cuts cannot be asked about."""
        self._marks = _no_marks(capacity)
        self._rows_end = rows_count
        self.lose_all()
        self.mark(np.arange(rows_count, dtype=np.int64))

    def grow(self, capacity: int) -> None:
        """Make room for rows up to a capacity; marks stay."""
        if capacity > len(self._marks):
            # The system zeroes pages on first access; copying all of the old marks would touch them at once.
            marks = _no_marks(capacity)
            marks[: self._rows_end] = self._marks[: self._rows_end]
            self._marks = marks

    # -- cuts ----------------------------------------------------------------------------------------------------------

    def end_epoch(self) -> CutVersion:
        """End this epoch by a cut and return the cut's version: later writes are newer."""
        self._epoch += 1
        return CutVersion(source=self._source, number=self._epoch - 1)

    def touched_since(self, version: CutVersion) -> I64 | None:
        """Return the used rows written since a cut, ascending int64 [n]; None if unknown."""
        if not self._knows(version):
            return None
        return core.marked(self._marks[: self._rows_end], min(version.number - self._offset, LAST))

    def removed_since(self, version: CutVersion) -> I64 | None:
        """Return the distinct ids removed since a cut, ascending int64 [n]; None if unknown."""
        return self._removed.since(version.number) if self._knows(version) else None

    def begun_since(self, version: CutVersion) -> I64 | None:
        """Return the rows assigned to an id since a cut, ascending int64 [n], some free again; None if unknown."""
        return self._begun.since(version.number) if self._knows(version) else None

    def lost_by_others(self, version: CutVersion) -> bool:
        """Return whether a cut cannot be asked about because of what others have written since."""
        return version.source == self._source and version.number < self._written_by_others

    def _knows(self, version: CutVersion) -> bool:
        return version.source == self._source and self._known_from <= version.number < self._epoch

    def _mark_now(self) -> int:
        # Here and not in the cut that ends an epoch, for which training waits.
        if self._epoch - self._offset > LAST:
            self._step_down()
        return self._epoch - self._offset

    def _step_down(self) -> None:
        """Make room for newer marks: see the table at the head of this file."""
        # More after many cuts without a write between them; what is lowered by this much is old in any case.
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


class TracksMarks:
    """Makes a cut a TracksRows and a TracksIds by the marks of its table, from `start_tracking` to its fence.

    The cut ends an epoch of the marks, whether its save succeeds or not. The methods raise UsageError after the fence.
    """

    _marks: TouchedRows
    version: CutVersion

    def touched_since(self, version: CutVersion) -> I64 | None:
        """Return the rows of `runs` written since a cut, ascending int64 [n]; None if unknown.

        Costs one pass over the marks, a byte per row.
        """
        self._check_held("touched rows")
        return self._marks.touched_since(version)

    def removed_since(self, version: CutVersion) -> I64 | None:
        """Return the distinct ids removed since a cut, ascending int64 [n], even if inserted again; None if unknown."""
        self._check_held("removed ids")
        return self._marks.removed_since(version)

    def begun_since(self, version: CutVersion) -> I64 | None:
        """Return the rows assigned to an id since a cut, ascending int64 [n]; None if unknown."""
        self._check_held("begun rows")
        return self._marks.begun_since(version)

    def start_tracking(self, marks: TouchedRows) -> None:
        self._marks = marks
        self.version = marks.end_epoch()

    def _check_held(self, what: str) -> None:
        raise NotImplementedError


class EpochLog:
    """A log of int64 numbers by epoch: ids that were removed, rows that were assigned to an id.

    Epochs are ascending. Frequent calls of `add` with few numbers are cheap: all are in one array that doubles. Above
    its bound the log drops the oldest epochs, and then cannot answer for cuts before them. Callers hold the table's
    lock.
    """

    def __init__(self) -> None:
        # The log knows nothing of what happened up to the end of this epoch.
        self._known_from = 0
        self._reset()

    def __len__(self) -> int:
        return self._end - self._begin

    def add(self, numbers: I64, *, epoch: int, count_max: int) -> None:
        """Log numbers of an epoch, then drop oldest epochs until at most count_max numbers are left."""
        if not numbers.size:
            return
        if numbers.size > count_max:
            self.forget_all(epoch=epoch)
            return
        self._make_room(numbers.size)
        if not self._epochs or self._epochs[-1] != epoch:
            self._epochs.append(epoch)
            self._begins.append(self._end)
        self._numbers[self._end : self._end + numbers.size] = numbers
        self._end += numbers.size
        self._drop_oldest(count_max)

    def since(self, epoch: int) -> I64 | None:
        """Return the distinct numbers logged after the end of an epoch, ascending; None if unknown."""
        if epoch < self._known_from:
            return None
        later = bisect_right(self._epochs, epoch)
        begin = self._begins[later] if later < len(self._begins) else self._end
        found = self._numbers[begin : self._end]
        return np.unique(found) if len(found) else found.copy()

    def forget_all(self, *, epoch: int) -> None:
        """Drop everything; the log is complete again from the end of `epoch` on."""
        self._known_from = epoch
        self._reset()

    def _reset(self) -> None:
        self._numbers: I64 = np.empty(FIRST_ROOM, dtype=np.int64)
        self._begin = self._end = 0
        # Epoch i of the log begins at index begins[i] of the array.
        self._epochs: list[int] = []
        self._begins: list[int] = []

    def _make_room(self, more: int) -> None:
        if self._end + more <= len(self._numbers):
            return
        held = self._numbers[self._begin : self._end]
        # Not zeroed: pages that no number has reached cost nothing.
        self._numbers = np.empty(max(FIRST_ROOM, 2 * (held.size + more)), dtype=np.int64)
        self._numbers[: held.size] = held
        self._begins = [begin - self._begin for begin in self._begins]
        self._begin, self._end = 0, held.size

    def _drop_oldest(self, count_max: int) -> None:
        if len(self) <= count_max:
            return
        # Keep the epochs that begin within the last count_max numbers.
        kept = bisect_right(self._begins, self._end - count_max - 1)
        self._known_from = self._epochs[kept - 1]
        self._begin = self._begins[kept] if kept < len(self._begins) else self._end
        del self._epochs[:kept]
        del self._begins[:kept]


def _no_marks(capacity: int) -> U8:
    """Return zeros, in pages that the system allocates on first access."""
    marks: U8 = np.zeros(capacity, dtype=np.uint8)
    # A cut reads all of them. Not memory of the core, which forked children, where ids may be looked up, do not have.
    core.advise_huge(marks.ctypes.data, marks.nbytes)
    return marks


# -- watchers ----------------------------------------------------------------------------------------------------------


class RowWatchers:
    """The watchers of one table. They are added under the table's lock and dropped from any thread, without it.

    A forked child has none: it has neither the memory nor the threads of its parent's saves.
    """

    def __init__(self) -> None:
        self._guard = Guard()
        # Replaced and never modified, so that notifying needs no lock while a watcher blocks.
        self._all: tuple[RowWatcher, ...] = ()
        _of_all_tables.add(self)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, watcher: RowWatcher) -> None:
        with self._guard:
            self._all = (*self._all, watcher)

    def drop(self, watcher: RowWatcher) -> None:
        """Remove a watcher, if it is there."""
        with self._guard:
            self._all = tuple(other for other in self._all if other is not watcher)

    def rows_change(self, rows: I64, columns: Collection[str] | None = None) -> None:
        """See RowWatcher."""
        if rows.size:
            for watcher in self._all:
                watcher.rows_change(rows, columns)

    def storage_moves(self) -> None:
        for watcher in self._all:
            watcher.storage_moves()

    def forget(self) -> None:
        """Start over in a forked child."""
        self._all = ()


_of_all_tables: weakref.WeakSet[RowWatchers] = weakref.WeakSet()


def _forget_in_child() -> None:
    for watchers in _of_all_tables:
        watchers.forget()


register_at_fork(after_in_child=_forget_in_child)
