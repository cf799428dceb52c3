"""Copy-on-write for deferred cuts: keep rows as they were at the cut, just before they first change.

    from       to         done by                                  the rows of the cut
    OPEN       OPEN       rows_change                              are kept before they change; the change waits while
                                                                   the log is full
    OPEN       GIVEN_UP   PAUSE_S_MAX without progress, no memory  change freely; exports raise IOFailedError
    any        ENDED      end                                      change freely; exports raise UsageError

1. The thread that changes rows (it holds the table's lock) keeps them here first: rows_change.
2. An export reads a window from the live storage. Rows may change meanwhile, so reads may be torn.
3. Then it marks the window as exported and overlays what it read with the kept rows. A row is kept before it changes,
   so every row that step 2 can have read torn or changed is among them; after the mark, the window needs no keeping.

An export takes only the log's lock, never the table's: a change that waits here while it holds the table's lock cannot
block the exporter. The log is bounded; memory of exported windows is reused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from asyncckpt.errors import DeadlineError, IOFailedError, UsageError
from asyncckpt.model.row_runs import window
from asyncckpt.native import I64, Memory, core
from asyncckpt.tables.row_device import RowMemory, copy_rows

# How long a change of rows waits without any window being exported, before the cut is given up.
PAUSE_S_MAX = 300.0
READERS_S_MAX = 600.0  # The export of one window, a copy in memory.
# Columns begin on cache lines.
ALIGNMENT = 64
# What the log itself holds per row: its place, its entry, and its entry again when it is free.
ENTRY_OVERHEAD_BYTES = 24


class CutPlaces:
    """The rows of a cut by place: place p is its p-th row, window i the places `[i, i + 1) * window_rows`.

    The constructor does no work; sums over the runs are computed when they are first needed.
    """

    def __init__(self, runs: I64, *, rows_count: int, window_rows: int) -> None:
        self.rows_count = rows_count
        self.window_rows = window_rows
        self.windows_count = -(-rows_count // window_rows)
        self._runs = runs

    @property
    def storage_end(self) -> int:
        """The last storage row of the cut plus one."""
        return int(self._runs[-1, 1]) if len(self._runs) else 0

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the places `[begin, end)` of a window."""
        begin = index * self.window_rows
        return begin, min(begin + self.window_rows, self.rows_count)

    def runs_of(self, index: int) -> I64:
        """Return the storage rows of a window as ascending runs, int64 [k, 2]."""
        return window(self._runs, *self.bounds(index))

    def of(self, rows: I64) -> I64:
        """Return the place of each storage row, int64 [n]; -1 for a row that does not belong to the cut."""
        if not self.rows_count:
            return np.full(rows.size, -1, dtype=np.int64)
        begins, ends, before = self._borders
        run = np.searchsorted(begins, rows, side="right") - 1
        # A row before the first run has run -1, which NumPy reads as the last one.
        inside = (run >= 0) & (rows < ends[run])
        places: I64 = np.where(inside, rows - begins[run] + before[run], -1)
        return places

    @cached_property
    def _borders(self) -> tuple[I64, I64, I64]:
        begins, ends = np.ascontiguousarray(self._runs[:, 0]), np.ascontiguousarray(self._runs[:, 1])
        lengths = ends - begins
        return begins, ends, np.cumsum(lengths) - lengths


class LogState(Enum):
    """See the table at the head of this file."""

    OPEN = "open"
    GIVEN_UP = "given up"
    ENDED = "ended"


class UndoLog:
    """The old values of rows of one deferred cut. Implements RowWatcher for the store, and serves one export at a time.

    columns: the live storage, `id` included. spared: storage rows that need no keeping. on_pause is called with the
    seconds of every wait.
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
        self.places = places
        self.columns = columns
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
        # Per window: (places, entries) of the kept rows, in batches.
        self._kept: dict[int, list[tuple[I64, I64]]] = {}
        self._kept_count = np.zeros(places.windows_count, dtype=np.int64)
        # Which storage rows are kept or need no keeping; made at the first change, outside the stall.
        self._settled: NDArray[np.bool_] | None = None
        self._memory: Memory | None = None
        self._targets: Mapping[str, int] = {}

    def rows_change(self, rows: I64, columns: Collection[str] | None) -> None:
        """Keep the values of rows (distinct) that are not kept, exported or outside of the cut; wait for room."""
        with self._changed:
            try:
                self._keep_all(rows)
            except (MemoryError, OSError) as error:
                self._give_up(f"no memory to keep old values of rows: {error}")

    def storage_moves(self) -> None:
        """Wait until no export needs the storage."""
        with self._changed:
            self._wait(lambda: self._exported_count == len(self._exported), what="storage that has to grow or move")
            self._wait_for_readers()

    def most_urgent(self, left: Sequence[int]) -> int:
        """Return the window of `left` with most kept rows if the log is more than half full, else the first."""
        with self._changed:
            if 2 * self._entries.used_count <= self._entries.count_max:
                return left[0]
            return left[int(np.argmax(self._kept_count[list(left)]))]

    @contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Keep live storage and log in place while a window is exported.

        Raises IOFailedError if the cut was given up, UsageError if it has ended or the window was exported before.
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
        """Overlay a window, read to the address of each column, with its kept rows. Call it while `reading`."""
        with self._changed:
            self._check_open()
            self._exported[index] = True
            self._exported_count += 1
            batches = self._kept.pop(index, [])
            self._changed.notify_all()
        if not batches:
            return
        places, entries = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        places = places - self.places.bounds(index)[0]
        for name, target in targets.items():
            kept = RowMemory(self._targets[name], self.columns[name].row_bytes, owner=self._memory)
            copy_rows(kept, entries, target=target, target_rows=places)
        with self._changed:
            self._kept_count[index] = 0
            self._entries.give_back(entries)
            self._changed.notify_all()

    def end(self) -> None:
        """Stop keeping rows, wake waiting threads and free the memory. Idempotent."""
        with self._changed:
            if self._state is LogState.ENDED:
                return
            self._state = LogState.ENDED
            self._changed.notify_all()
            self._wait_for_readers()
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
            left = ~self._exported[places // self.places.window_rows]
            rows, places = rows[left], places[left]

    def _to_keep(self, rows: I64) -> tuple[I64, I64]:
        """Return the rows that have to be kept, ordered by place, and their places."""
        if self._settled is None:
            self._settled = np.zeros(self.places.storage_end, dtype=np.bool_)
            self._settled[self._spared] = True
        rows = rows[rows < len(self._settled)]
        rows = rows[~self._settled[rows]]
        places = self.places.of(rows)
        # Place -1 gives window -1, the last one, which does no harm: the place itself excludes the row.
        needed = (places >= 0) & ~self._exported[places // self.places.window_rows]
        rows, places = rows[needed], places[needed]
        order = np.argsort(places)
        return rows[order], places[order]

    def _keep(self, rows: I64, places: I64) -> None:
        assert self._settled is not None
        if self._memory is None:
            self._map_memory()
        entries = self._entries.take(rows.size)
        for name, column in self.columns.items():
            copy_rows(column, rows, target=self._targets[name], target_rows=entries)
        windows = places // self.places.window_rows
        begins = np.flatnonzero(np.diff(windows, prepend=-1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(windows)], strict=True):
            index = int(windows[begin])
            # Copies: a view would keep the arrays of all windows alive.
            self._kept.setdefault(index, []).append((places[begin:end].copy(), entries[begin:end].copy()))
            self._kept_count[index] += end - begin
        self._settled[rows] = True

    def _map_memory(self) -> None:
        # Pages that no row has reached cost nothing, so map the whole bound at once.
        at, offsets = 0, {}
        for name, column in self.columns.items():
            offsets[name] = at
            at += -(-self._entries.count_max * column.row_bytes // ALIGNMENT) * ALIGNMENT
        self._memory = core.map_memory(at)
        self._targets = {name: self._memory.address + offset for name, offset in offsets.items()}

    def _wait(self, done: Callable[[], bool], *, what: str) -> None:
        """Wait until done or no longer open; give the cut up if no window is exported for PAUSE_S_MAX."""
        if self._state is not LogState.OPEN or done():
            return
        begin = time.monotonic()
        while self._state is LogState.OPEN and not done():
            if not self._changed.wait_for(partial(self._has_moved, done, self._exported_count), PAUSE_S_MAX):
                self._give_up(f"training waited {PAUSE_S_MAX} s for {what}, and no row was exported meanwhile")
        self._on_pause(time.monotonic() - begin)

    def _wait_for_readers(self) -> None:
        """Wait until nobody exports a window, which reads storage and log. DeadlineError: neither may move or go."""
        if not self._changed.wait_for(lambda: not self._readers_count, READERS_S_MAX):
            raise DeadlineError(f"a window of table {self._table!r} was not exported within {READERS_S_MAX} s")

    def _has_moved(self, done: Callable[[], bool], exported_before: int) -> bool:
        return self._state is not LogState.OPEN or done() or self._exported_count != exported_before

    def _give_up(self, reason: str) -> None:
        if self._state is LogState.OPEN:
            self._state, self._reason = LogState.GIVEN_UP, reason
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._state is LogState.GIVEN_UP:
            what = f"cut of table {self._table!r} was given up: {self._reason}"
            raise IOFailedError(what, hint="training continued; save again")
        if self._state is LogState.ENDED:
            raise UsageError(f"export of a cut of table {self._table!r} was asked for after its end")


class _Entries:
    """The free entries of the log: those given back, and those never used, which cost no memory."""

    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self.used_count = 0
        self._fresh = 0
        self._free: list[I64] = []

    def take(self, count: int) -> I64:
        """Return `count` entries, starting with those given back last."""
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
        """Make entries free again."""
        self.used_count -= entries.size
        self._free.append(entries)
