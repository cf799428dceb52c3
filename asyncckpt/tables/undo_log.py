"""First touch: rows of an open cut are kept, as they were at the cut, just before they change.

    from       to         done by                                  the rows of the cut
    OPEN       OPEN       rows_change                              are kept before they change; the change waits while
                                                                   the log is full
    OPEN       GIVEN_UP   PAUSE_S_MAX without progress, no memory  change freely; exports raise IOFailedError
    any        ENDED      end                                      change freely; exports raise UsageError

1. The thread that changes rows (it holds the table's lock) keeps them here first: rows_change.
2. An export reads a window from the live storage. Rows may change under it, and be torn.
3. Then it marks the window as exported and lays the kept rows over what it read. A row is kept before it changes, so
   every row that 2 can have read torn or changed is among them; after the mark nothing of the window needs keeping.

An export takes the log's lock only, never the table's: a change that waits here, holding the table's lock, always finds
an exporter that can go on. The log is bounded; memory of exported windows is used again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from asyncckpt.errors import IOFailedError, UsageError
from asyncckpt.native import I64, Memory, core
from asyncckpt.tables.cut_places import CutPlaces
from asyncckpt.tables.row_copy import RowMemory, copy_rows

# How long a change of rows waits without a window being exported, before training goes on without this cut.
PAUSE_S_MAX = 300.0
# Columns begin on cache lines.
ALIGNMENT = 64
# What the log itself holds per row: its place, its entry, and its entry once more when it is free again.
ENTRY_OVERHEAD_BYTES = 24


class LogState(Enum):
    """See the table at the head of this file."""

    OPEN = "open"
    GIVEN_UP = "given up"
    ENDED = "ended"


class UndoLog:
    """The old values of rows of one open cut. Implements RowWatcher for the store, and serves one export at a time.

    columns: the live storage, `id` included. spared: storage rows that need no keeping. on_pause is told the seconds of
    every wait.
    """

    def __init__(
        self,
        table: str,
        *,
        places: CutPlaces,
        columns: Mapping[str, RowMemory],
        spared: I64,
        bytes_max: int,
        on_pause: Callable[[float], None],
    ) -> None:
        self._table = table
        self._places = places
        self._columns = columns
        self._spared = spared
        self._on_pause = on_pause
        entry_bytes = ENTRY_OVERHEAD_BYTES + sum(column.row_bytes for column in columns.values())
        self._entries = _Entries(max(1, min(bytes_max // entry_bytes, places.rows_count)))
        self._changed = threading.Condition()
        self._state = LogState.OPEN
        self._reason = ""
        self._readers_count = 0
        self._exported = np.zeros(places.windows_count, dtype=np.bool_)
        self._exported_count = 0
        # Per window: (place, entry) of every kept row, in the batches in which they came.
        self._kept: dict[int, list[tuple[I64, I64]]] = {}
        self._kept_count = np.zeros(places.windows_count, dtype=np.int64)
        # Which storage rows are kept or need no keeping; made at the first change, outside the stall.
        self._settled: NDArray[np.bool_] | None = None
        self._memory: Memory | None = None
        self._targets: Mapping[str, int] = {}

    def rows_change(self, rows: I64) -> None:
        """Keep what rows (distinct) hold now, unless they are kept, exported or not of the cut; wait for room."""
        with self._changed:
            try:
                self._keep_all(rows)
            except (MemoryError, OSError) as error:
                self._give_up(f"no memory to keep old values of rows: {error}")

    def storage_moves(self) -> None:
        """Wait until no export needs the storage any more."""
        with self._changed:
            self._wait(lambda: self._exported_count == len(self._exported), what="storage that has to grow or move")
            # One copy of one window, which always ends; leaving earlier would let it read memory that is gone.
            self._changed.wait_for(lambda: not self._readers_count)

    def most_urgent(self, left: Sequence[int]) -> int:
        """Return the window of left with most kept rows when the log is more than half full, else the first."""
        with self._changed:
            if 2 * self._entries.used_count <= self._entries.count_max:
                return left[0]
            return left[int(np.argmax(self._kept_count[list(left)]))]

    @contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Hold live storage and log in their place while a window is exported.

        Raises IOFailedError when the cut was given up, UsageError when it has ended or the window was exported before.
        """
        with self._changed:
            self._check_open()
            if self._exported[index]:
                raise UsageError(f"window {index} of a cut of table {self._table!r} was exported before")
            self._readers_count += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers_count -= 1
                self._changed.notify_all()

    def lay_over(self, index: int, targets: Mapping[str, int]) -> None:
        """Lay the kept rows of a window over what was read of it, at the address of each column. While `reading`."""
        with self._changed:
            self._check_open()
            self._exported[index] = True
            self._exported_count += 1
            batches = self._kept.pop(index, [])
            self._changed.notify_all()
        if not batches:
            return
        places, entries = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        places = places - self._places.bounds(index)[0]
        for name, target in targets.items():
            kept = RowMemory(self._targets[name], self._columns[name].row_bytes, owner=self._memory)
            copy_rows(kept, entries, target=target, target_rows=places)
        with self._changed:
            self._kept_count[index] = 0
            self._entries.give_back(entries)
            self._changed.notify_all()

    def end(self) -> None:
        """Keep nothing more, wake who waits, give the memory back. A second call does nothing."""
        with self._changed:
            if self._state is LogState.ENDED:
                return
            self._state = LogState.ENDED
            self._changed.notify_all()
            # As in storage_moves: an export in this moment reads the memory that goes.
            self._changed.wait_for(lambda: not self._readers_count)
            self._kept.clear()
            self._settled = None
            if self._memory is not None:
                self._memory.close()

    def _keep_all(self, rows: I64) -> None:
        if self._state is not LogState.OPEN or self._exported_count == len(self._exported):
            return
        rows, places = self._to_keep(rows)
        while rows.size:
            room = self._entries.count_max - self._entries.used_count
            if room:
                self._keep(rows[:room], places[:room])
                rows, places = rows[room:], places[room:]
                continue
            self._wait(lambda: self._entries.used_count < self._entries.count_max, what="a full log of old values")
            if self._state is not LogState.OPEN:
                return
            left = ~self._exported[places // self._places.window_rows]
            rows, places = rows[left], places[left]

    def _to_keep(self, rows: I64) -> tuple[I64, I64]:
        """Those of rows that have to be kept, and their places, ascending."""
        if self._settled is None:
            self._settled = np.zeros(self._places.storage_end, dtype=np.bool_)
            self._settled[self._spared] = True
        rows = rows[rows < len(self._settled)]
        rows = rows[~self._settled[rows]]
        places = self._places.of(rows)
        # Window -1 of a place -1 is the last one, which does no harm: the place itself rules the row out.
        needed = (places >= 0) & ~self._exported[places // self._places.window_rows]
        rows, places = rows[needed], places[needed]
        order = np.argsort(places)
        return rows[order], places[order]

    def _keep(self, rows: I64, places: I64) -> None:
        """Copy rows into the log; there is room."""
        assert self._settled is not None
        if self._memory is None:
            self._map_memory()
        entries = self._entries.take(rows.size)
        for name, column in self._columns.items():
            copy_rows(column, rows, target=self._targets[name], target_rows=entries)
        windows = places // self._places.window_rows
        begins = np.flatnonzero(np.diff(windows, prepend=-1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(windows)], strict=True):
            index = int(windows[begin])
            # Copies: a view of one window's part would hold the arrays of all.
            self._kept.setdefault(index, []).append((places[begin:end].copy(), entries[begin:end].copy()))
            self._kept_count[index] += end - begin
        self._settled[rows] = True

    def _map_memory(self) -> None:
        # Pages that no row has reached yet cost nothing, so the whole bound is mapped at once.
        at, offsets = 0, {}
        for name, column in self._columns.items():
            offsets[name] = at
            at += -(-self._entries.count_max * column.row_bytes // ALIGNMENT) * ALIGNMENT
        self._memory = core.map_memory(at)
        self._targets = {name: self._memory.address + offset for name, offset in offsets.items()}

    def _wait(self, done: Callable[[], bool], *, what: str) -> None:
        """Wait until done or not open any more; give the cut up when no window comes out for PAUSE_S_MAX."""
        if self._state is not LogState.OPEN or done():
            return
        begin = time.monotonic()
        while self._state is LogState.OPEN and not done():
            if not self._changed.wait_for(partial(self._has_moved, done, self._exported_count), PAUSE_S_MAX):
                self._give_up(f"training waited {PAUSE_S_MAX} s for {what}, and no row was exported meanwhile")
        self._on_pause(time.monotonic() - begin)

    def _has_moved(self, done: Callable[[], bool], exported_before: int) -> bool:
        return self._state is not LogState.OPEN or done() or self._exported_count != exported_before

    def _give_up(self, reason: str) -> None:
        if self._state is LogState.OPEN:
            self._state, self._reason = LogState.GIVEN_UP, reason
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._state is LogState.GIVEN_UP:
            what = f"cut of table {self._table!r} was given up: {self._reason}"
            raise IOFailedError(what, hint="training went on; save again")
        if self._state is LogState.ENDED:
            raise UsageError(f"export of a cut of table {self._table!r} was asked for after its end")


class _Entries:
    """Which entries of the log are free: those given back, and those never used yet, which cost no memory."""

    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self.used_count = 0
        self._fresh = 0
        self._free: list[I64] = []

    def take(self, count: int) -> I64:
        """Return count entries, those given back last first."""
        assert count <= self.count_max - self.used_count
        self.used_count += count
        parts: list[I64] = []
        while count and self._free:
            last = self._free.pop()
            parts.append(last[:count])
            if last.size > count:
                self._free.append(last[count:])
            count -= parts[-1].size
        parts.append(np.arange(self._fresh, self._fresh + count, dtype=np.int64))
        self._fresh += count
        return np.concatenate(parts)

    def give_back(self, entries: I64) -> None:
        """Let entries be used again."""
        self.used_count -= entries.size
        self._free.append(entries)
