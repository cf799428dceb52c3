"""Ids on trial: how often each of them was looked up before it got a row.

A table of its own beside the table it serves, with the columns `id` and `count` (int64), so that it is saved in the
same cut and loaded like any other. An id leaves it when it is admitted.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from asyncckpt.model.table import ID_COLUMN, Column, Role, TableSchema
from asyncckpt.native import I64
from asyncckpt.tables.cut import HashTableCut, HashTableLoad
from asyncckpt.tables.expiry import is_below
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.slots import Layout
from asyncckpt.tables.table_arguments import check_eviction, checked_count
from asyncckpt.tables.table_lock import TableLock

COUNT_COLUMN = "count"
FIRST_ROWS = 1024
_SCHEMA = TableSchema(
    columns=(
        Column(name=ID_COLUMN, dtype=torch.int64, row_shape=(), role=Role.ID),
        Column(name=COUNT_COLUMN, dtype=torch.int64, row_shape=(), role=Role.METADATA),
    )
)


class CandidateTable:
    """Counts of ids that have no row yet. Implements `asyncckpt.model.table.Table`.

    Its lock is its own, and never taken by a thread that holds another table's: a save cuts both in either order. It
    grows by every new id that is looked up; `evict("count", below=2)` now and then forgets the rare ones.
    """

    def __init__(self, name: str, *, shard: tuple[int, int]) -> None:
        self._name = name
        self._shard = shard
        self._lock = TableLock(name)
        layout = Layout(schema=_SCHEMA, fills={COUNT_COLUMN: 0})
        self._store = RowStore(layout, capacity=FIRST_ROWS, initializer=None)

    @property
    def name(self) -> str:
        return self._name

    @property
    def shard(self) -> tuple[int, int]:
        return self._shard

    def schema(self) -> TableSchema:
        """Return the columns: id, count."""
        return _SCHEMA

    def __len__(self) -> int:
        """How many ids are on trial, without waiting for the lock."""
        return len(self._store)

    def __repr__(self) -> str:
        return f"CandidateTable({self._name!r}, rows={len(self)}, shard={self._shard})"

    def counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the ids and of their counts, both int64 [n] on the CPU."""
        with self._lock.hold("listing"):
            rows = self._store.rows()
            values = self._store.column(COUNT_COLUMN)[torch.from_numpy(rows)]
            return torch.from_numpy(self._store.ids_of(rows)), values

    def add(self, ids: I64, *, admit_at: int) -> I64:
        """Count one lookup of each of ids (distinct); return those that reach admit_at, which are forgotten here."""
        with self._lock.hold("count"):
            rows = torch.from_numpy(self._store.insert(ids, touch=True))
            counts = self._store.column(COUNT_COLUMN)
            seen = counts[rows] + 1
            counts[rows] = seen
            admitted: I64 = ids[(seen >= admit_at).numpy()]
            self._store.remove(admitted)
            return admitted

    def forget(self, ids: I64) -> int:
        """Forget ids and return how many of them were there."""
        with self._lock.hold("removal"):
            return self._store.remove(ids)

    def evict(self, column: str, *, below: float) -> int:
        """Forget the ids whose number in a column (`count`) is below a bound; return how many. Raises UsageError."""
        check_eviction(_SCHEMA, column, below, table=self._name)
        with self._lock.hold("eviction"):
            rows = self._store.rows()
            values = self._store.column(column)[torch.from_numpy(rows)]
            return self._store.remove(self._store.ids_of(rows[is_below(values, below)]))

    def clear(self) -> None:
        """Forget all ids."""
        with self._lock.hold("clear"):
            self._store.clear()

    def begin_cut(self) -> HashTableCut:
        """Hold the table still until the cut's fence. Raises DeadlineError when another use of it does not end."""
        self._lock.acquire("cut")
        try:
            return HashTableCut(self._name, store=self._store, lock=self._lock)
        except BaseException:
            self._lock.release()
            raise

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str] = ()) -> HashTableLoad:
        """Take the table for a load until its end, emptied first when clear, with room for rows_count more rows."""
        checked_count("rows_count of a load", rows_count, table=self._name, at_least=0)
        self._lock.acquire("load")
        try:
            if clear:
                self._store.clear()
            self._store.reserve(len(self._store) + rows_count)
            return HashTableLoad(self._name, store=self._store, lock=self._lock, shard=self._shard, filled=filled)
        except BaseException:
            self._lock.release()
            raise
