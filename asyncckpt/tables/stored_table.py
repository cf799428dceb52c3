"""What the tables of this package share: a name, a shard, a RowStore for their ids, and one lock.

Any method may be called from any thread. A call holds the lock while it runs, a cut until its fence, a load until its
end (table_lock.py).
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from asyncckpt.model.table import TableSchema
from asyncckpt.tables.cut import HashTableCut, HashTableLoad
from asyncckpt.tables.expiry import is_below
from asyncckpt.tables.ids import IdsLike, flat_ids, one_id, owned_mask
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.table_arguments import check_eviction, checked_count
from asyncckpt.tables.table_lock import TableLock


class StoredTable:
    """A table whose ids have rows in a RowStore. Its arguments have been checked."""

    def __init__(self, name: str, *, schema: TableSchema, store: RowStore, shard: tuple[int, int]) -> None:
        self._name = name
        self._schema = schema
        self._store = store
        self._shard = shard
        self._lock = TableLock(name)

    @property
    def name(self) -> str:
        return self._name

    @property
    def shard(self) -> tuple[int, int]:
        return self._shard

    @property
    def capacity(self) -> int:
        """How many ids there is room for before the columns have to grow."""
        return self._store.capacity

    def schema(self) -> TableSchema:
        """Return the columns in their order: id, embedding, optimizer slots, metadata."""
        return self._schema

    def __len__(self) -> int:
        """How many ids have a row. Does not wait for the lock, so it can be logged while a load runs elsewhere."""
        return len(self._store)

    def ids(self) -> torch.Tensor:
        """Return a copy of the ids, int64 [n] on the CPU, ordered by row (of the host level, if there are two)."""
        with self._lock.hold("listing"):
            return torch.from_numpy(self._store.ids())

    def owns(self, ids: IdsLike) -> torch.Tensor:
        """Return which of ids (int64, any shape) belong to this shard: bool, in the shape and on the device of ids."""
        flat = flat_ids(ids, table=self._name)
        mask = torch.from_numpy(owned_mask(flat, shard=self._shard)).view(ids.shape)
        return mask.to(ids.device) if isinstance(ids, torch.Tensor) else mask

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str] = ()) -> HashTableLoad:
        """Take the table for a load until its end, emptied first if `clear`, with room for rows_count more rows.

        Columns named in `filled` get no initial values: the load writes them for every row it inserts. A load fills the
        host level of a table with two levels, whose cache is empty when it begins.
        """
        checked_count("rows_count of a load", rows_count, table=self._name, at_least=0)
        with self._lock.hold_for_result("load"):
            self._prepare_load(clear=clear)
            if clear:
                self._store.clear()
            self._store.reserve(len(self._store) + rows_count)
            return HashTableLoad(self._name, store=self._store, lock=self._lock, shard=self._shard, filled=filled)

    def __contains__(self, id: object) -> bool:
        flat = one_id(id, table=self._name)
        with self._lock.hold("lookup"):
            return bool(self._store.find(flat)[0] >= 0)

    def remove(self, ids: IdsLike) -> int:
        """Remove ids (int64, any shape) and return how many of them were there; other ids may get their rows."""
        flat = flat_ids(ids, table=self._name)
        with self._lock.hold("removal"):
            return self._store.remove(flat)

    def evict(self, column: str, *, below: float) -> int:
        """Remove the ids whose number in a metadata column (row shape ()) is below a bound; return how many.

        By age or frequency: `evict("last_seen", below=step - 1000)`, `evict("count", below=3)` on the columns that
        HashEmbedding keeps. Raises UsageError.
        """
        check_eviction(self._schema, column, below, table=self._name)
        with self._lock.hold("eviction"):
            rows = self._store.rows()
            self._store.place.follow()
            values = self._store.column(column)[self._store.place.index(rows)]
            return self._store.remove(self._store.ids_of(rows[is_below(values, below)]))

    def clear(self) -> None:
        """Remove all ids; the capacity stays."""
        with self._lock.hold("clear"):
            self._store.clear()

    def begin_cut(self) -> HashTableCut:
        """Keep the table unchanged until the cut's fence. Raises DeadlineError if another use of it does not end."""
        with self._lock.hold_for_result("cut"):
            self._store.place.follow()
            return HashTableCut(self._name, store=self._store, lock=self._lock)

    def _prepare_load(self, *, clear: bool) -> None:
        """Make the store ready for a load. The lock is held."""
        self._store.place.follow()
