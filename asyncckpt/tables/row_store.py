"""The rows of a hash table: the id -> row map and one tensor per column, kept in step.

Callers hold the table's lock, and `follow` of the place has ordered their work after that of earlier calls. The
invariants:
1. Every row below the map's rows_end is inside every column tensor.
2. A row that `insert` assigns to an id holds initial values in every column, whatever an earlier id left there.
3. An insert that fails (no memory, a faulty initializer) adds no id.
4. `watchers` are notified before a used row changes in any column, and before any column moves, the ids included.
5. `marks` know every row that was written here in any column, `id` included, and every id that was removed.
6. torch counts the in-place writes of a tensor (`_version`), also those through views of it. Here they are counted too,
   as far as they are the table's own, so `written_by_others` knows whether there were more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.row_runs import rows_of
from asyncckpt.model.table import ID_COLUMN, IdsHeld, TableSchema
from asyncckpt.native import I64, core
from asyncckpt.tables.initializer import Initializer, Uniform
from asyncckpt.tables.row_device import RowDevice
from asyncckpt.tables.slots import EMBEDDING_COLUMN, Layout
from asyncckpt.tables.table_arguments import ids_held
from asyncckpt.tables.table_statistics import RowCounts
from asyncckpt.tables.touched_rows import RowWatchers, TouchedRows

# By half: growth stays geometric, and the new pages are not touched before rows reach them.
GROWTH_NUMERATOR, GROWTH_DENOMINATOR = 3, 2
INITIALIZER_ROWS_MAX = 1 << 16


class Level:
    """Ids and the columns of their rows at one place: a host level, or a cache over it."""

    def __init__(self, schema: TableSchema, *, rows: int, place: RowDevice) -> None:
        self.place = place
        self.capacity = rows  # Rows that there is room for.
        self._ids = core.id_map(rows)
        self._tensors = {
            column.name: place.new_column((rows, *column.row_shape), dtype=column.dtype)
            for column in schema.columns
            if column.name != ID_COLUMN
        }
        # The versions that the tensors have if nobody else writes to them; and columns to which others have written.
        self._versions = {name: tensor._version for name, tensor in self._tensors.items()}
        self._written_by_others: set[str] = set()
        self._others_counts = dict.fromkeys(self._tensors, 0)  # Of writes that are known to be theirs.

    def column(self, name: str) -> torch.Tensor:
        """Return the live tensor of a column but `id`: at least as many rows as there is room for."""
        return self._tensors[name]

    def columns(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors of all columns but `id`, a view that follows growth."""
        return self._tensors

    def bytes(self) -> int:
        """Return the memory of ids, their index and the columns, used or not."""
        return self._ids.bytes + sum(tensor.nbytes for tensor in self._tensors.values())

    def written_by_others(self) -> list[str]:
        """Return the columns that other code has written since the last call, as far as torch counts it."""
        for name in self._tensors:
            self._look_for_others(name)
        found = [name for name in self._tensors if name in self._written_by_others]
        self._written_by_others.clear()
        return found

    def writes_by_others(self, name: str) -> int:
        """Return how often other code has written to a column; needs no lock, see WatchedCut."""
        return self._others_counts[name] + self._tensors[name]._version - self._versions[name]

    def count_write_by_others(self) -> None:
        """Count a write of other code to any column, which torch has not."""
        for name in self._others_counts:
            self._others_counts[name] += 1

    def ids_by_row(self) -> I64:
        """Return the id of every row up to the last used one, a view until the next insert; undefined if free."""
        return self._ids.ids_by_row()

    def find(self, ids: I64) -> I64:
        """Return the row of every id, -1 for an absent one."""
        return self._ids.find(ids)

    def read(self, rows: I64, *, only: str | None = None) -> dict[str, torch.Tensor]:
        """Return rows of every column but `id`, or of one only, each a new tensor `[n, *row_shape]` at this place."""
        index = self.place.index(rows)
        names = self._tensors if only is None else [only]
        with torch.no_grad():
            return {name: self._tensors[name].index_select(0, index) for name in names}

    def write(self, rows: I64, values: Mapping[str, torch.Tensor]) -> None:
        """Set rows (distinct) of the named columns to their values, `[n, *row_shape]` on any device."""
        index = self.place.index(rows)
        with torch.no_grad():
            for name, value in values.items():
                self._tensors[name].index_copy_(0, index, self.place.to_device(value))
                self._count_write(name)

    def take_rows(self, rows: I64, columns: Mapping[str, torch.Tensor], source_rows: I64) -> None:
        """Set rows (distinct) of all columns but `id` to source_rows of columns of the same names, on the host.

        The host waits for no device. Source rows may change when this has returned, except those that a device reads
        itself (pinned_host.py).
        """
        if rows.size:
            with torch.no_grad():
                writes_count = self.place.take_rows(columns, source_rows, self._tensors, rows)
            for name in columns:
                self._count_write(name, writes_count)

    def _count_write(self, name: str, count: int = 1) -> None:
        """Count writes of this table itself, after each of which torch has counted one."""
        self._versions[name] += count

    def _look_for_others(self, name: str) -> None:
        version = self._tensors[name]._version
        if version != self._versions[name]:
            self._written_by_others.add(name)
            self._others_counts[name] += version - self._versions[name]
            self._versions[name] = version

    def _moved_columns(self, rows: I64, *, capacity: int) -> dict[str, torch.Tensor]:
        """Return copies of the columns with room for `capacity` rows, of which the first are `rows`."""
        index = self.place.index(rows)
        columns = {}
        with torch.no_grad():
            for name, old in self._tensors.items():
                columns[name] = self.place.new_column((capacity, *old.shape[1:]), dtype=old.dtype)
                torch.index_select(old, 0, index, out=columns[name][: rows.size])
        return columns

    def _replace_columns(self, columns: Mapping[str, torch.Tensor]) -> None:
        for name, new in columns.items():
            self._look_for_others(name)
            self.place.let_go(self._tensors[name])
            self._tensors[name], self._versions[name] = new, new._version

    def _grow_columns(self, rows: int, *, used_count: int) -> None:
        """Move the columns to larger memory, with their first used_count rows."""
        with torch.no_grad():
            # One column at a time, so that only one of them exists twice at any moment. If memory runs out halfway,
            # some columns are longer than there is room for, which breaks no invariant.
            for name, old in self._tensors.items():
                new = self.place.new_column((rows, *old.shape[1:]), dtype=old.dtype)
                new[:used_count].copy_(old[:used_count])
                self._replace_columns({name: new})  # After the copy, which has taken what others wrote.
        self.capacity = rows


class RowStore(Level):
    """Ids and columns of one table at one place, the host by default.

    fingerprints_ids: keep the sum of the fingerprints of all ids, too. ids_held: replaced and never modified, so that
    it can be read without the lock, like the length; its count is a copy of the map's, which no second thread may ask
    while it works.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        capacity: int,
        initializer: Initializer,
        place: RowDevice | None = None,
        fingerprints_ids: bool = False,
    ) -> None:
        super().__init__(layout.schema, rows=capacity, place=place or RowDevice(torch.device("cpu")))
        self.watchers = RowWatchers()
        self.marks = TouchedRows(capacity)
        self.fills = layout.fills  # The initial value of each column but `id` and the embedding.
        self._initializer = initializer
        self._fingerprints_ids = fingerprints_ids
        self.ids_held = IdsHeld()
        self.counts = RowCounts()

    def __len__(self) -> int:
        """How many ids there are; the only method that needs no lock."""
        return self.ids_held.count

    def bytes(self) -> int:
        """Return the memory of a level, and of the marks."""
        return super().bytes() + self.marks.bytes

    def insert(self, ids: I64, *, filled: Collection[str] = (), touch: bool = False) -> I64:
        """Give every id a row and return the rows; new ones hold initial values, except in the columns `filled`.

        touch: mark all of the rows, not only the new ones, for a caller that is about to write to them.
        """
        if is_watched := bool(self.watchers):
            rows, new_rows = self._insert_watched(ids)
        else:
            rows, new_rows = self._ids.insert(ids, self.marks.to_set(self.capacity) if touch else None)
        if new_rows.size:
            self._begin_rows(new_rows, filled)
            self.marks.begin_rows(new_rows, rows_end=self._ids.rows_end)
        if touch and is_watched:
            self.marks.mark(rows)
        return rows

    def write(self, rows: I64, values: Mapping[str, torch.Tensor]) -> None:
        """Set rows like Level.write, and mark them."""
        self.marks.mark(rows)
        self.write_marked(rows, values)

    def write_marked(self, rows: I64, values: Mapping[str, torch.Tensor]) -> None:
        """Set rows that are marked already like Level.write."""
        self.watchers.rows_change(rows, values.keys())
        super().write(rows, values)

    def take_rows(self, rows: I64, columns: Mapping[str, torch.Tensor], source_rows: I64) -> None:
        """Set rows like Level.take_rows.

        Marks nothing: the table's values stay the same and only move. A row was marked when its newest values were set.
        """
        self.watchers.rows_change(rows, columns.keys())
        super().take_rows(rows, columns, source_rows)

    def remove(self, ids: I64) -> int:
        """Free the rows of ids and return how many of them were there."""
        if self.watchers:
            # A later insert takes the row and writes its id at once, so this is the last chance to notify.
            rows = self._ids.find(ids)
            self.watchers.rows_change(np.unique(rows[rows >= 0]))
        rows = self._ids.remove(ids)
        were_there = rows >= 0
        rows = rows[were_there]
        self.marks.remove(rows, ids[were_there], used_count=len(self))
        self._count(ids[were_there], sign=-1)
        self.counts.removed_count += rows.size
        return rows.size

    def clear(self) -> None:
        """Free all rows; the capacity stays."""
        self.watchers.storage_moves()
        self._ids.clear()
        self.marks.clear()
        self.counts.removed_count += len(self)
        self.ids_held = IdsHeld()

    def reserve(self, rows_count: int) -> None:
        """Make room for rows_count rows in all, so that inserts up to there do not grow."""
        if rows_count > self.capacity:
            self.watchers.storage_moves()
            self._grow(rows_count)

    def shrink(self) -> None:
        """Move all rows together, in their order, into columns that have room for no more; they get new numbers."""
        rows = self.rows()
        capacity = max(rows.size, 1)
        if capacity >= self.capacity:
            return
        self.watchers.storage_moves()
        # Everything is made before anything is replaced: where memory runs out, the rows are where they were.
        ids = core.id_map(capacity)
        ids.insert(self.ids_of(rows))
        columns = self._moved_columns(rows, capacity=capacity)
        self._ids, self.capacity = ids, capacity
        self._replace_columns(columns)
        self.marks.renumber(rows.size, capacity=capacity)

    def runs(self) -> I64:
        """Return the used rows as ascending ranges, int64 [k, 2]."""
        return self._ids.runs()

    def first_row(self) -> int | None:
        """Return the row that the next new id gets if all further ones follow it; None if that is not certain.

        It is certain only for an empty store: another one may know some of the ids already.
        """
        return 0 if self._ids.rows_end == 0 else None

    def rows(self) -> I64:
        """Return the used rows, ascending, int64 [n]."""
        return rows_of(self.runs())

    def ids(self) -> I64:
        """Return a copy of the ids in the order of `rows`, int64 [n]."""
        return self.ids_of(self.rows())

    def ids_of(self, rows: I64) -> I64:
        """Return a copy of the ids of used rows."""
        return self._ids.ids_by_row()[rows]

    def read_all(self, *, only: str | None = None) -> tuple[I64, dict[str, torch.Tensor]]:
        """Return all ids in the order of `rows`, and their rows like `read`."""
        rows = self.rows()
        return self.ids_of(rows), self.read(rows, only=only)

    def _insert_watched(self, ids: I64) -> tuple[I64, I64]:
        """Do what the map's insert does, but notify watchers before the map moves its ids.

        The map makes room for every id it is given, known or not, so give it only the absent ones; it has room up to
        the capacity. New ids get the same rows as without watchers: the order is the same.
        """
        rows = self._ids.find(ids)
        missing = rows < 0
        distinct, first = np.unique(ids[missing], return_index=True)
        absent = distinct[np.argsort(first)]
        if not absent.size:
            return rows, absent
        if max(self._ids.rows_end, len(self._ids) + absent.size) > self.capacity:
            self.watchers.storage_moves()
            return self._ids.insert(ids)
        _, new_rows = self._ids.insert(absent)
        rows[missing] = self._ids.find(ids[missing])
        return rows, new_rows

    def _begin_rows(self, new_rows: I64, filled: Collection[str]) -> None:
        """Initialize rows that the map has just assigned, or take their ids out of the map again."""
        new_ids = self._ids.ids_by_row()[new_rows]
        try:
            if self._ids.rows_end > self.capacity:
                self._grow(max(self._ids.rows_end, self.capacity * GROWTH_NUMERATOR // GROWTH_DENOMINATOR))
            self._initialize(new_rows, new_ids, filled)
            self._count(new_ids, sign=1)
            self.counts.inserted_count += new_ids.size
        except BaseException:
            self._ids.remove(new_ids)
            raise

    def _count(self, ids: I64, *, sign: int) -> None:
        """Note distinct ids that have come (sign 1) or gone (-1)."""
        held = self.ids_held
        fingerprint = ids_held(ids).fingerprint if self._fingerprints_ids else 0
        self.ids_held = IdsHeld(held.count + sign * ids.size, (held.fingerprint + sign * fingerprint) % 2**64)

    def _initialize(self, rows: I64, ids: I64, filled: Collection[str]) -> None:
        index = _fill_index(rows, place=self.place)
        with torch.no_grad():
            for name, fill in self.fills.items():
                if name not in filled:
                    self._fill_rows(name, index, fill)
            if EMBEDDING_COLUMN in filled or EMBEDDING_COLUMN not in self._tensors:
                return
            match self._initializer:
                case None | int() | float() as constant:
                    self._fill_rows(EMBEDDING_COLUMN, index, constant or 0.0)
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
            # A copy: a function may sort or edit its ids.
            values = _call(self._initializer, torch.from_numpy(ids.copy()), shape=shape)
        embedding.index_copy_(0, self.place.index(rows), self.place.to_device(values.to(embedding.dtype)))
        self._count_write(EMBEDDING_COLUMN)

    def _fill_rows(self, name: str, index: slice | torch.Tensor, value: float) -> None:
        tensor = self._tensors[name]
        if isinstance(index, slice):
            tensor[index].fill_(value)
        else:
            tensor.index_fill_(0, index, value)
        self._count_write(name)

    def _grow(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        rows_used_count = min(self.capacity, self._ids.rows_end)
        # So that inserts up to the capacity do not move the ids either.
        self._ids.reserve(capacity)
        self.marks.grow(capacity)
        self._grow_columns(capacity, used_count=rows_used_count)
        self.counts.growths_count += 1


def _fill_index(rows: I64, *, place: RowDevice) -> slice | torch.Tensor:
    """Return the index of rows (distinct) for a fill: a slice if they are one run, in any order."""
    begin, end = int(rows.min()), int(rows.max()) + 1
    return slice(begin, end) if end - begin == rows.size else place.index(rows)


def _call(initializer: Initializer, ids: torch.Tensor, *, shape: tuple[int, int]) -> torch.Tensor:
    assert callable(initializer)
    values = cast(object, initializer(ids))
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values)
    if not isinstance(values, torch.Tensor) or tuple(values.shape) != shape:
        found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values)
        raise UsageError("initializer returned something else than a row for every id", found=found, expected=shape)
    return values.detach()
