"""The rows of a hash table: the id -> row map and one tensor per column, kept in step.

Callers hold the table's lock; nothing here does. The invariants:
1. Every row below the map's rows_end lies inside every column tensor.
2. A row that an id got by `insert` holds initial values in every column, whatever the row held for an earlier id.
3. An insert that fails (no memory, a faulty initializer) leaves no id behind that was not there before.
4. `watchers` are told before a used row changes in any column, and before any column moves, the map's ids included.
5. `marks` know of every row that was written in any column, `id` included, and of every id that was removed. Who writes
   to a column himself marks the rows himself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.native import I64, core
from asyncckpt.tables.initializer import Initializer, Uniform
from asyncckpt.tables.row_device import RowDevice, move_rows
from asyncckpt.tables.row_watchers import RowWatchers
from asyncckpt.tables.slots import EMBEDDING_COLUMN, Layout
from asyncckpt.tables.touched_rows import TouchedRows

# Half again as large: growth stays geometric, and the pages of the new half are not touched before rows reach them.
GROWTH_NUMERATOR, GROWTH_DENOMINATOR = 3, 2
INITIALIZER_ROWS_MAX = 1 << 16


class RowStore:
    """Ids and columns of one table at one place, the host by default."""

    def __init__(
        self, layout: Layout, *, capacity: int, initializer: Initializer, place: RowDevice | None = None
    ) -> None:
        self.watchers = RowWatchers()
        self.marks = TouchedRows(capacity)
        self._layout = layout
        self.place = RowDevice(torch.device("cpu")) if place is None else place
        self._initializer = initializer
        self._ids = core.id_map(capacity)
        # Beside the map, which must not be asked by a second thread while it works.
        self._rows_count = 0
        self._capacity = capacity
        self._tensors = {
            column.name: self.place.new_column((capacity, *column.row_shape), dtype=column.dtype)
            for column in layout.schema.columns
            if column.name != ID_COLUMN
        }

    def __len__(self) -> int:
        """How many ids there are; unlike all else here it may be asked without the lock."""
        return self._rows_count

    @property
    def capacity(self) -> int:
        return self._capacity

    def column(self, name: str) -> torch.Tensor:
        """Return the live storage of a column; `id` is a view of the map, `[rows_end]`, dead after the next insert."""
        if name == ID_COLUMN:
            return torch.from_numpy(self._ids.ids_by_row())
        tensor = self._tensors.get(name)
        if tensor is None:
            raise UsageError("there is no such column", found=name, expected=[ID_COLUMN, *self._tensors])
        return tensor

    def columns(self) -> Mapping[str, torch.Tensor]:
        """Return the live storage of all columns but `id`."""
        return self._tensors

    def find(self, ids: I64) -> I64:
        """Return the row of every id, -1 for an absent one."""
        self.place.follow()
        return self._ids.find(ids)

    def insert(self, ids: I64, *, filled: Collection[str] = (), touch: bool = False) -> I64:
        """Give every id a row and return the rows; new ones hold initial values, except in the columns `filled`.

        touch: mark them all, not only the new ones, for a caller who is about to write to them.
        """
        self.place.follow()
        rows, new_rows = self._ids.insert(ids) if not self.watchers else self._insert_watched(ids)
        if new_rows.size:
            self._begin_rows(new_rows, filled)
            self.marks.begin_rows(new_rows, rows_end=self._ids.rows_end)
        if touch:
            self.marks.mark(rows)
        return rows

    def write(self, rows: I64, values: Mapping[str, torch.Tensor]) -> None:
        """Set rows (distinct) of the columns named to their values, `[n, *row_shape]` on any device."""
        self.place.follow()
        self.watchers.rows_change(rows)
        self.marks.mark(rows)
        index = self.place.index(rows)
        with torch.no_grad():
            for name, value in values.items():
                self._tensors[name].index_copy_(0, index, self.place.to_device(value))

    def take_over(self, rows: I64, columns: Mapping[str, torch.Tensor], source_rows: I64) -> None:
        """Set rows (distinct) of all columns but `id` to source_rows of columns of the same names, on the host.

        Marks nothing: the table holds what it held, in another place. A row was marked when its newest values came.
        """
        self.place.follow()
        self.watchers.rows_change(rows)
        move_rows(columns, source_rows, self._tensors, rows, place=self.place)

    def read(self, rows: I64) -> dict[str, torch.Tensor]:
        """Return rows of every column but `id`, each a new tensor `[n, *row_shape]`."""
        self.place.follow()
        index = self.place.index(rows)
        with torch.no_grad():
            return {name: column.index_select(0, index) for name, column in self._tensors.items()}

    def remove(self, ids: I64) -> int:
        """Free the rows of ids and return how many of them were there."""
        if self.watchers:
            # A later insert takes the row and writes its id in one go: now is the last time to tell.
            rows = self._ids.find(ids)
            self.watchers.rows_change(np.unique(rows[rows >= 0]))
        rows = self._ids.remove(ids)
        were_there = rows >= 0
        rows = rows[were_there]
        self.marks.remove(rows, ids[were_there], used_count=self._rows_count)
        self._rows_count -= rows.size
        return rows.size

    def clear(self) -> None:
        """Free all rows; the capacity stays."""
        self.watchers.storage_moves()
        self._ids.clear()
        self.marks.clear()
        self._rows_count = 0

    def reserve(self, rows_count: int) -> None:
        """Make room for rows_count rows in all, so that inserts up to there do not grow."""
        if rows_count > self._capacity:
            self.place.follow()
            self.watchers.storage_moves()
            self._grow(rows_count)

    def runs(self) -> I64:
        """Return the used rows as ascending ranges, int64 [k, 2]."""
        return self._ids.runs()

    def first_row(self) -> int | None:
        """Return the row that the next new id gets when all further ones follow it; None when free rows are mixed in.

        Only an empty store can say so: to another one an id may be known already.
        """
        return 0 if self._ids.rows_end == 0 else None

    def rows(self) -> I64:
        """Return the used rows, ascending, int64 [n]."""
        runs = self.runs()
        begins, counts = runs[:, 0], runs[:, 1] - runs[:, 0]
        # Row i of a run is i places behind the run's begin, and the run starts where the earlier ones end.
        places_before = np.cumsum(counts) - counts
        return np.repeat(begins - places_before, counts) + np.arange(int(counts.sum()), dtype=np.int64)

    def ids(self) -> I64:
        """Return a copy of the ids in the order of `rows`, int64 [n]."""
        return self.ids_of(self.rows())

    def ids_of(self, rows: I64) -> I64:
        """Return a copy of the ids of used rows."""
        return self._ids.ids_by_row()[rows]

    def _insert_watched(self, ids: I64) -> tuple[I64, I64]:
        """Do what the map's insert does, but let watchers know before the map moves its ids.

        The map makes room for every id it is given, known or not, so it is given the absent ones only; up to the
        capacity it has room. New ids get the rows that they would get unwatched: the order is the same.
        """
        rows = self._ids.find(ids)
        missing = rows < 0
        absent = _first_mentions(ids[missing])
        if not absent.size:
            return rows, absent
        if max(self._ids.rows_end, len(self._ids) + absent.size) > self._capacity:
            self.watchers.storage_moves()
            return self._ids.insert(ids)
        _, new_rows = self._ids.insert(absent)
        rows[missing] = self._ids.find(ids[missing])
        return rows, new_rows

    def _begin_rows(self, new_rows: I64, filled: Collection[str]) -> None:
        """Bring rows that the map has just given out to life, or take their ids out of the map again."""
        new_ids = self._ids.ids_by_row()[new_rows]
        try:
            if self._ids.rows_end > self._capacity:
                self._grow(max(self._ids.rows_end, self._capacity * GROWTH_NUMERATOR // GROWTH_DENOMINATOR))
            self._initialize(new_rows, new_ids, filled)
        except BaseException:
            self._ids.remove(new_ids)
            raise
        self._rows_count += new_rows.size

    def _initialize(self, rows: I64, ids: I64, filled: Collection[str]) -> None:
        index = _fill_index(rows, place=self.place)
        with torch.no_grad():
            for name, fill in self._layout.fills.items():
                if name not in filled:
                    _fill_rows(self._tensors[name], index, fill)
            if EMBEDDING_COLUMN in filled or EMBEDDING_COLUMN not in self._tensors:
                return
            match self._initializer:
                case None:
                    _fill_rows(self._tensors[EMBEDDING_COLUMN], index, 0.0)
                case int() | float() as constant:
                    _fill_rows(self._tensors[EMBEDDING_COLUMN], index, constant)
                case _:
                    for begin in range(0, rows.size, INITIALIZER_ROWS_MAX):
                        part = slice(begin, begin + INITIALIZER_ROWS_MAX)
                        self._write_first_embeddings(rows[part], ids[part])

    def _write_first_embeddings(self, rows: I64, ids: I64) -> None:
        embedding = self._tensors[EMBEDDING_COLUMN]
        shape = (rows.size, embedding.shape[1])
        if isinstance(self._initializer, Uniform):
            values = torch.from_numpy(self._initializer.rows(ids, dim=shape[1]))
        else:
            # Its own copy: a function that sorts or edits its ids must not reach ours.
            values = _call(self._initializer, torch.from_numpy(ids.copy()), shape=shape)
        embedding.index_copy_(0, self.place.index(rows), self.place.to_device(values.to(embedding.dtype)))

    def _grow(self, capacity: int) -> None:
        if capacity <= self._capacity:
            return
        rows_used_count = min(self._capacity, self._ids.rows_end)
        # So that inserts up to the capacity move the ids as little as the columns.
        self._ids.reserve(capacity)
        with torch.no_grad():
            # One column after the other, so that old and new storage of only one of them are alive at once. Should
            # memory end halfway, some columns are longer than the capacity says, which breaks no invariant.
            for name, old in self._tensors.items():
                new = self.place.new_column((capacity, *old.shape[1:]), dtype=old.dtype)
                new[:rows_used_count].copy_(old[:rows_used_count])
                self.place.let_go(old)
                self._tensors[name] = new
        self.marks.grow(capacity)
        self._capacity = capacity


def _first_mentions(ids: I64) -> I64:
    """Return the distinct ids in the order of their first mention."""
    distinct, first = np.unique(ids, return_index=True)
    return distinct[np.argsort(first)]


def _fill_index(rows: I64, *, place: RowDevice) -> slice | torch.Tensor:
    """Return how to name rows (distinct) to a fill: a slice when they are one run, in whatever order."""
    begin, end = int(rows.min()), int(rows.max()) + 1
    return slice(begin, end) if end - begin == rows.size else place.index(rows)


def _fill_rows(tensor: torch.Tensor, index: slice | torch.Tensor, value: float) -> None:
    if isinstance(index, slice):
        tensor[index].fill_(value)
    else:
        tensor.index_fill_(0, index, value)


def _call(initializer: Initializer, ids: torch.Tensor, *, shape: tuple[int, int]) -> torch.Tensor:
    assert callable(initializer)
    values = cast(object, initializer(ids))
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values)
    if not isinstance(values, torch.Tensor) or tuple(values.shape) != shape:
        found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values)
        raise UsageError("initializer returned something else than a row for every id", found=found, expected=shape)
    return values.detach()
