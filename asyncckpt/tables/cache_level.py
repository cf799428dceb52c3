"""The cache level of a multi-level table: which ids are cached where, and their rows in every column but `id`.

Callers hold the table's lock and have called `follow` of its place. The invariants:
1. The rows of the id map are the cache rows. It assigns the row that was freed last, else the next one, and callers
   make room first. So a used row is always below `capacity`.
2. A cache row holds the host row `host_rows[row]`, or nothing if that is -1; no host row is in two cache rows.
3. Map and rows change in one call, so a reader that holds the lock sees both of the same step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from asyncckpt.model.table import TableSchema
from asyncckpt.native import I64
from asyncckpt.tables.cache_use import CacheUse
from asyncckpt.tables.row_device import Landing, RowDevice
from asyncckpt.tables.row_store import Level


class CacheLevel(Level):
    """`rows` rows of every column but `id`; fully associative."""

    def __init__(self, schema: TableSchema, *, rows: int, place: RowDevice, policy: str) -> None:
        super().__init__(schema, rows=rows, place=place)
        self.host_rows: I64 = np.full(rows, -1, dtype=np.int64)
        self.use = CacheUse(rows, policy=policy)

    @property
    def free_count(self) -> int:
        """How many of the rows are free."""
        return self.capacity - len(self._ids)

    def used_rows(self) -> I64:
        """Return the used rows, ascending."""
        return np.flatnonzero(self.host_rows >= 0)

    def put(self, ids: I64, host_rows: I64, host: Mapping[str, torch.Tensor], *, awaited: bool) -> None:
        """Cache ids (distinct, not cached) with host_rows of the host's columns; there must be room."""
        if not ids.size:
            return
        assert ids.size <= self.free_count
        rows, new_rows = self._ids.insert(ids)
        assert new_rows.size == ids.size
        try:
            self.take_rows(rows, host, host_rows)
        except BaseException:  # For example, a device without memory.
            self._ids.remove(ids)
            raise
        self.host_rows[rows] = host_rows
        self.use.begin_rows(rows, awaited=awaited)

    def begin_to_host(self, rows: I64, *, only: str | None = None) -> Landing:
        """Begin to copy rows of every column, or of one only, to the host; the rows may change when this returns."""
        return self.place.begin_to_host(self.read(rows, only=only))

    def drop(self, rows: I64) -> None:
        """Free used rows (distinct)."""
        if rows.size:
            self._ids.remove(self._ids.ids_by_row()[rows])
            self.host_rows[rows] = -1
            self.use.awaited_until[rows] = 0

    def clear(self) -> None:
        """Free all rows."""
        self._ids.clear()
        self.host_rows[:] = -1
        self.use.clear()

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows in all; used rows keep their numbers, the tensors move."""
        old_count = self.capacity
        assert rows > old_count
        self._grow_columns(rows, used_count=old_count)
        self.host_rows = np.concatenate([self.host_rows, np.full(rows - old_count, -1, dtype=np.int64)])
        self.use.grow(rows)
