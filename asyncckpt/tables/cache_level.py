"""The cache level of a multi-level table: which ids are cached where, and their rows in every column but `id`.

Callers hold the table's lock, and have called `follow` of its place. The invariants:
1. The directory's rows are the cache rows: it gives out the row freed last, else the next one, and callers make room
   first. So a used row is always below `rows_count`.
2. A cache row holds the host row `host_rows[row]`, or nothing where that is -1; no host row is in two cache rows.
3. Map and rows change in one call: whoever reads both under the lock reads them of the same step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from asyncckpt.model.table import ID_COLUMN, TableSchema
from asyncckpt.native import I64, core
from asyncckpt.tables.cache_use import CacheUse
from asyncckpt.tables.row_device import Landing, RowDevice, move_rows


class CacheLevel:
    """`rows` rows of every column but `id`, at one place; fully associative."""

    def __init__(self, schema: TableSchema, *, rows: int, place: RowDevice, policy: str) -> None:
        self.place = place
        self._ids = core.id_map(rows)
        self._tensors = {
            column.name: place.new_column((rows, *column.row_shape), dtype=column.dtype)
            for column in schema.columns
            if column.name != ID_COLUMN
        }
        self.host_rows: I64 = np.full(rows, -1, dtype=np.int64)
        self.use = CacheUse(rows, policy=policy)

    @property
    def rows_count(self) -> int:
        """How many rows there are room for."""
        return len(self.host_rows)

    @property
    def free_count(self) -> int:
        """How many of them are free."""
        return len(self.host_rows) - len(self._ids)

    def column(self, name: str) -> torch.Tensor:
        """Return the live tensor of a column, `[rows_count, *row_shape]`."""
        return self._tensors[name]

    def columns(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors of all columns."""
        return self._tensors

    def ids_by_row(self) -> I64:
        """Return the id of every cache row that was ever used, undefined where none is now; dead after the next put."""
        return self._ids.ids_by_row()

    def used_rows(self) -> I64:
        """Return the rows that hold something, ascending."""
        return np.flatnonzero(self.host_rows >= 0)

    def find(self, ids: I64) -> I64:
        """Return the cache row of every id, -1 for one that is not cached."""
        return self._ids.find(ids)

    def put(self, ids: I64, host_rows: I64, host: Mapping[str, torch.Tensor], *, awaited: bool) -> None:
        """Cache ids (distinct, not cached), which have host_rows in the columns of the host; there must be room."""
        assert ids.size <= self.free_count
        rows, new_rows = self._ids.insert(ids)
        assert new_rows.size == ids.size
        try:
            move_rows(host, host_rows, self._tensors, rows, place=self.place)
        except BaseException:  # A device without memory.
            self._ids.remove(ids)
            raise
        self.host_rows[rows] = host_rows
        self.use.begin_rows(rows, awaited=awaited)

    def begin_to_host(self, rows: I64, *, only: str | None = None) -> Landing:
        """Begin to bring copies of rows of every column, or of one only, to the host: the rows may change at once."""
        index = self.place.index(rows)
        names = self._tensors if only is None else [only]
        with torch.no_grad():
            return self.place.begin_to_host({name: self._tensors[name].index_select(0, index) for name in names})

    def write(self, rows: I64, values: Mapping[str, torch.Tensor]) -> None:
        """Set used rows (distinct) of the columns named to their values, `[n, *row_shape]` on any device."""
        index = self.place.index(rows)
        with torch.no_grad():
            for name, value in values.items():
                self._tensors[name].index_copy_(0, index, self.place.to_device(value))

    def drop(self, rows: I64) -> None:
        """Free used rows (distinct)."""
        if rows.size:
            self._ids.remove(self._ids.ids_by_row()[rows])
            self.host_rows[rows] = -1
            self.use.awaited[rows] = False

    def clear(self) -> None:
        """Free all rows."""
        self._ids.clear()
        self.host_rows[:] = -1
        self.use.clear()

    def grow(self, rows: int) -> None:
        """Make room for rows in all; used rows keep their numbers, the tensors move."""
        old_count = self.rows_count
        assert rows > old_count
        grown = {}
        with torch.no_grad():
            for name, old in self._tensors.items():
                grown[name] = self.place.new_column((rows, *old.shape[1:]), dtype=old.dtype)
                grown[name][:old_count].copy_(old)
                self.place.let_go(old)
        self._tensors = grown
        self.host_rows = np.concatenate([self.host_rows, np.full(rows - old_count, -1, dtype=np.int64)])
        self.use.grow(rows)
