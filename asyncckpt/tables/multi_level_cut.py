"""A multi-level table frozen for a save, whose export may be deferred past its fence. Implements DeferredCut.

    from   to     done by                          the table
    free   held   MultiLevelTable.begin_cut        does not change; columns of both levels may be read
    held   open   be_deferred, then fence            may change; old values of host rows are kept (undo_log.py)
    held   free   fence, or end                    may change, nothing is kept
    open   free   end, or rows could not be kept   as above; in the second case exports raise

The table's lock is held in the state held. The cut never flushes the cache: cache rows overlay host rows in what is
copied out, and the live table stays as it is. Cache map, cache rows, host rows and runs are read under one lock, so the
map belongs to the same step as the weights, whatever a prefetch has moved before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from asyncckpt.errors import UsageError, must_be
from asyncckpt.model.table import ID_COLUMN, CacheCopy
from asyncckpt.native import I64
from asyncckpt.signals import Guard
from asyncckpt.tables.cache_level import CacheLevel
from asyncckpt.tables.row_device import RowMemory, copy_rows, copy_runs
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.table_lock import HashTableCut, TableLock
from asyncckpt.tables.undo_log import CutPlaces, UndoLog


class CacheOverlay:
    """The cache level as it was at the cut, laid over windows of the host rows: a cached row wins.

    ids: the id of every cache row, int64 [>= used cache rows].

    `id` is overlaid too, so a row that was cached at the cut needs nothing of what its storage row holds later.
    """

    def __init__(self, copy: CacheCopy, *, ids: I64, places: CutPlaces) -> None:
        self._map = copy.map
        self._places = places
        self._columns = {name: RowMemory.of(column) for name, column in copy.columns.items()}
        self._columns[ID_COLUMN] = RowMemory.of(torch.from_numpy(ids))
        self._guard = Guard()
        self._by_place: tuple[I64, I64] | None = None

    def lay_over(self, index: int, targets: Mapping[str, int]) -> None:
        """Copy the cached rows of a window to their places after the address of each column."""
        places, cache_rows = self._sorted()
        begin, end = self._places.bounds(index)
        low, high = np.searchsorted(places, [begin, end])
        if low == high:
            return
        for name, target in targets.items():
            copy_rows(self._columns[name], cache_rows[low:high], target=target, target_rows=places[low:high] - begin)

    def _sorted(self) -> tuple[I64, I64]:
        """Return the places, ascending, and the cache row of each. Sorts at the first export, not during the stall."""
        with self._guard:
            if self._by_place is None:
                cache_rows = np.flatnonzero(self._map >= 0)
                places = self._places.of(self._map[cache_rows])
                order = np.argsort(places)
                self._by_place = places[order], cache_rows[order]
            return self._by_place


class MultiLevelCut(HashTableCut):
    """A DeferredCut of a MultiLevelTable. The caller holds the lock, which `fence` releases from any thread.

    `column`, `runs`, `rows_count` and marks are those of the host level: a row that was written in the cache is marked
    at its host row.
    """

    def __init__(
        self,
        table: str,
        *,
        store: RowStore,
        cache: CacheLevel,
        lock: TableLock,
        undo_bytes_max: int,
        on_pause: Callable[[float], None],
        on_lost: Callable[[], object],
    ) -> None:
        super().__init__(table, store=store, lock=lock, on_lost=on_lost)
        self._cache = cache
        self._undo_bytes_max = undo_bytes_max
        self._on_pause = on_pause
        self._open: tuple[UndoLog, CacheOverlay] | None = None

    @property
    def cache_map(self) -> torch.Tensor:
        """The live host row of every cache row, -1 for a free one: int64 [cache rows]. Raises UsageError."""
        self._check_held("the cache map")
        return torch.from_numpy(self._cache.host_rows)

    def cached_column(self, name: str) -> torch.Tensor | None:
        """Return the live cache level of a column; None for `id`. Raises UsageError."""
        self._check_held(f"the cache level of column {name!r}")
        return None if name == ID_COLUMN else self._one_of(self._cache.columns(), name)

    def be_deferred(self, copy: CacheCopy, *, window_rows: int) -> None:
        """Keep old values of host rows from now on, so that windows of them can be exported after the fence.

        Exports read `copy`, which the caller owns. Copies the ids of the cache; the cost does not depend on the size of
        the host level. Raises UsageError.
        """
        self._check_held("be_deferred")
        if self._open is not None:
            raise UsageError(f"be_deferred of a cut of table {self._table!r} was called before")
        if window_rows < 1:
            raise must_be(f"window_rows of table {self._table!r}", "at least 1", window_rows)
        assert len(copy.map) == len(self._cache.host_rows)
        assert copy.columns.keys() == self._cache.columns().keys()
        places = CutPlaces(self.runs, rows_count=self.rows_count, window_rows=window_rows)
        columns = {name: RowMemory.of(self.column(name)) for name in (ID_COLUMN, *copy.columns)}
        log = UndoLog(
            self._table,
            places=places,
            columns=columns,
            # Overlaid at export whatever the host row holds then, so the first write-back needs no old value.
            spared=copy.map[copy.map >= 0],
            bytes_max=self._undo_bytes_max,
            on_pause=self._on_pause,
        )
        self._open = log, CacheOverlay(copy, ids=self._cache.ids_by_row().copy(), places=places)
        self._store.watchers.add(log)

    def most_urgent(self, left: Sequence[int]) -> int:
        """Return the window with most kept rows when the log of old values is more than half full, else the first."""
        return self._opened()[0].most_urgent(left)

    def export(self, index: int, targets: Mapping[str, int]) -> None:
        """Copy the rows of a window, as they were at the cut, to the address of each column.

        Runs on any thread, without the table's lock; exports each window once. Raises IOFailedError if old values could
        not be kept, UsageError out of order.
        """
        log, overlay = self._opened()
        if not 0 <= index < log.places.windows_count:
            raise must_be(f"window of a cut of table {self._table!r}", f"below {log.places.windows_count}", index)
        with log.reading(index):
            runs = log.places.runs_of(index)
            for name, target in targets.items():
                copy_runs(log.columns[name], runs, target=target)
            log.lay_over(index, targets)
        overlay.lay_over(index, targets)

    def end(self, ok: bool) -> None:
        """End the save: drop the old values and let waiting changes go on. Idempotent."""
        self.fence()
        if self._open is not None:
            log, _ = self._open
            # In this order: after the drop, a change no longer waits for an export that reads.
            try:
                log.end()
            finally:
                self._store.watchers.drop(log)

    def _opened(self) -> tuple[UndoLog, CacheOverlay]:
        if self._open is None:
            raise UsageError(f"export of a cut of table {self._table!r} was asked for without be_deferred")
        return self._open
