"""A multi-level table frozen for a save, whose export may be deferred behind its fence. Implements DeferredCut.

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
from dataclasses import dataclass

import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import ID_COLUMN, CacheCopy
from asyncckpt.tables.cache_level import CacheLevel
from asyncckpt.tables.cache_overlay import CacheOverlay
from asyncckpt.tables.cut import HashTableCut
from asyncckpt.tables.cut_places import CutPlaces
from asyncckpt.tables.row_copy import RowMemory, copy_runs
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.table_lock import TableLock
from asyncckpt.tables.undo_log import UndoLog


@dataclass(frozen=True)
class _OpenParts:
    """What a deferred cut needs behind its fence."""

    places: CutPlaces
    columns: Mapping[str, RowMemory]
    log: UndoLog
    overlay: CacheOverlay


class MultiLevelCut(HashTableCut):
    """An DeferredCut of a MultiLevelTable. The caller holds the lock, which `fence` releases from any thread.

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
    ) -> None:
        super().__init__(table, store=store, lock=lock)
        self._cache = cache
        self._undo_bytes_max = undo_bytes_max
        self._on_pause = on_pause
        self._open: _OpenParts | None = None

    @property
    def cache_map(self) -> torch.Tensor:
        """The live host row of every cache row, -1 for a free one: int64 [cache rows]. Raises UsageError."""
        self._check_held("the cache map")
        return torch.from_numpy(self._cache.host_rows)

    def cached_column(self, name: str) -> torch.Tensor | None:
        """Return the live cache level of a column; None for `id`. Raises UsageError."""
        self._check_held(f"the cache level of column {name!r}")
        if name == ID_COLUMN:
            return None
        columns = self._cache.columns()
        if name not in columns:
            raise UsageError("there is no such column", found=name, expected=[ID_COLUMN, *columns])
        return columns[name]

    def be_deferred(self, copy: CacheCopy, *, window_rows: int) -> None:
        """Keep old values of host rows from now on, so that windows of them can be exported behind the fence.

        Exports read `copy`, which the caller owns. Copies the ids of the cache; the cost does not depend on the size of
        the host level. Raises UsageError.
        """
        self._check_held("be_deferred")
        if self._open is not None:
            raise UsageError(f"be_deferred of a cut of table {self._table!r} was called before")
        if window_rows < 1:
            raise UsageError(f"window_rows of table {self._table!r} is wrong", found=window_rows, expected=">= 1")
        assert len(copy.map) == len(self._cache.host_rows)
        assert copy.columns.keys() == self._cache.columns().keys()
        places = CutPlaces(self.runs, rows_count=self.rows_count, window_rows=window_rows)
        names = [ID_COLUMN, *copy.columns]
        columns = {name: RowMemory.of(self._store.column(name)) for name in names}
        log = UndoLog(
            self._table,
            places=places,
            columns=columns,
            # Overlaid at export whatever the host row holds then, so the first write-back needs no old value.
            spared=copy.map[copy.map >= 0],
            bytes_max=self._undo_bytes_max,
            on_pause=self._on_pause,
        )
        overlay = CacheOverlay(copy, ids=self._cache.ids_by_row().copy(), places=places)
        self._open = _OpenParts(places=places, columns=columns, log=log, overlay=overlay)
        self._store.watchers.add(log)

    def most_urgent(self, left: Sequence[int]) -> int:
        """Return the window with most kept rows when the log of old values is more than half full, else the first."""
        return self._opened().log.most_urgent(left)

    def export(self, index: int, targets: Mapping[str, int]) -> None:
        """Copy the rows of a window, as they were at the cut, to the address of each column.

        Runs on any thread, without the table's lock; exports each window once. Raises IOFailedError if old values could
        not be kept, UsageError out of order.
        """
        parts = self._opened()
        if not 0 <= index < parts.places.windows_count:
            what = f"window of a cut of table {self._table!r} is wrong"
            raise UsageError(what, found=index, expected=f"below {parts.places.windows_count}")
        with parts.log.reading(index):
            runs = parts.places.runs_of(index)
            for name, target in targets.items():
                copy_runs(parts.columns[name], runs, target=target)
            parts.log.lay_over(index, targets)
        parts.overlay.lay_over(index, targets)

    def end(self, ok: bool) -> None:
        """End the save: drop the old values and let waiting changes go on. Idempotent."""
        self.fence()
        parts = self._open
        if parts is not None:
            # In this order: after the drop, a change no longer waits for an export that reads.
            parts.log.end()
            self._store.watchers.drop(parts.log)

    def _opened(self) -> _OpenParts:
        if self._open is None:
            raise UsageError(f"export of a cut of table {self._table!r} was asked for without be_deferred")
        return self._open
