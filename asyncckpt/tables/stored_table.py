"""What the tables of this package share: rows for ids in a RowStore, one lock, and an embedding that training updates.

Any method may be called from any thread. A call holds the lock while it runs, a cut until its fence, a load until its
end (table_lock.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import torch

from asyncckpt.arguments import check_int, check_type
from asyncckpt.model.table import TableSchema
from asyncckpt.native import I64, U8
from asyncckpt.tables.cut import HashTableCut, HashTableLoad
from asyncckpt.tables.ids import IdsLike, RowsLike, check_owned, flat_ids, flat_rows, one_id, owned_mask
from asyncckpt.tables.initializer import Initializer, check_initializer
from asyncckpt.tables.row_device import RowDevice, sent
from asyncckpt.tables.row_store import Level, RowStore
from asyncckpt.tables.slots import EMBEDDING_COLUMN, Layout
from asyncckpt.tables.table_arguments import check_eviction, check_name, check_shard, check_slot, checked_values
from asyncckpt.tables.table_lock import LockedTable


class StoredTable(LockedTable):
    """A table whose ids have rows in a RowStore."""

    def __init__(self, name: str, schema: TableSchema, *, shard: tuple[int, int], store: RowStore) -> None:
        super().__init__(name, schema, shard=shard)
        self._store = store

    @property
    def capacity(self) -> int:
        """How many ids there is room for before the columns have to grow."""
        return self._store.capacity

    def __len__(self) -> int:
        """How many ids have a row. Does not wait for the lock, so it can be logged while a load runs elsewhere."""
        return len(self._store)

    def __contains__(self, id: object) -> bool:
        flat = one_id(id, table=self._name)
        with self._lock.hold("lookup"):
            return bool(self._store.find(flat)[0] >= 0)

    def ids(self) -> torch.Tensor:
        """Return a copy of the ids, int64 [n] on the CPU, ordered by row (of the host level, if there are two)."""
        with self._lock.hold("listing"):
            return torch.from_numpy(self._store.ids())

    def owns(self, ids: IdsLike) -> torch.Tensor:
        """Return which of ids (int64, any shape) belong to this shard: bool, in the shape and on the device of ids."""
        flat = flat_ids(ids, table=self._name)
        mask = torch.from_numpy(owned_mask(flat, shard=self._shard)).view(ids.shape)
        return mask.to(ids.device) if isinstance(ids, torch.Tensor) else mask

    def remove(self, ids: IdsLike) -> int:
        """Remove ids (int64, any shape) and return how many of them were there; other ids may get their rows."""
        flat = flat_ids(ids, table=self._name)
        with self._lock.hold("removal"):
            self._begin()
            return self._remove(flat)

    def evict(self, column: str, *, below: float) -> int:
        """Remove the ids whose newest number in a metadata column (row shape ()) is below a bound; return how many.

        By age or frequency: `evict("last_seen", below=step - 1000)`, `evict("count", below=3)` on the columns that
        HashEmbedding keeps. Raises UsageError.
        """
        check_eviction(self._schema, column, below, table=self._name)
        with self._lock.hold("eviction"):
            self._begin()
            return self._remove(self._expired(column, below))

    def clear(self) -> None:
        """Remove all ids; the capacity stays."""
        with self._lock.hold("clear"):
            self._store.clear()

    def begin_cut(self) -> HashTableCut:
        """Keep the table unchanged until the cut's fence. Raises DeadlineError if another use of it does not end."""
        with self._lock.hold_for_result("cut"):
            self._begin()
            return self._new_cut()

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str] = ()) -> HashTableLoad:
        """Take the table for a load until its end, emptied first if `clear`, with room for rows_count more rows.

        Columns named in `filled` get no initial values: the load writes them for every row it inserts. A load fills the
        host level of a table with two levels, whose cache is empty when it begins.
        """
        check_int(f"rows_count of a load of table {self._name!r}", rows_count, at_least=0)
        with self._lock.hold_for_result("load"):
            self._begin()
            self._prepare_load(clear=clear)
            if clear:
                self._store.clear()
            self._store.reserve(len(self._store) + rows_count)
            return HashTableLoad(self._name, store=self._store, lock=self._lock, shard=self._shard, filled=filled)

    # The rest is called with the lock held. --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Order what this thread queues on a device from now on after the calls before."""
        if not self._store.place.is_host:
            self._store.place.follow()

    def _remove(self, ids: I64) -> int:
        return self._store.remove(ids)

    def _expired(self, column: str, below: float) -> I64:
        return self._store.expired(column, below)

    def _new_cut(self) -> HashTableCut:
        return HashTableCut(self._name, store=self._store, lock=self._lock)

    def _prepare_load(self, *, clear: bool) -> None:
        """Make the store ready for a load."""


# Called with rows of `embedding` and the slots, int64 [n], -1 for an id without a row, and the marks to set for the
# others (uint8 by row, and the value); None if they are marked already. It must not use the table.
WriteRows: TypeAlias = Callable[[I64, tuple[U8, int] | None], None]


class TrainedTable(StoredTable):
    """A table with an embedding, whose rows training reads and updates in place, in `_level`."""

    _level: Level

    def __init__(
        self,
        name: str,
        layout: Layout,
        *,
        shard: tuple[int, int],
        capacity: int,
        initializer: Initializer,
        place: RowDevice | None,
    ) -> None:
        check_name(name)
        check_int(f"capacity of table {name!r}", capacity, at_least=1)
        check_initializer(initializer, table=name)
        check_shard(name, shard)
        store = RowStore(layout, capacity=capacity, initializer=initializer, place=place)
        super().__init__(name, layout.schema, shard=shard, store=store)

    @property
    def dim(self) -> int:
        return int(self.embedding.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows that training sees."""
        return self._level.place.device

    @property
    def embedding(self) -> torch.Tensor:
        """The live embedding column, `[rows, dim]`; fetch it again after a lookup."""
        return self._level.column(EMBEDDING_COLUMN)

    def slot(self, name: str) -> torch.Tensor:
        """Return the live tensor, `[rows, *row_shape]`, of an optimizer slot or metadata column. Raises UsageError."""
        check_slot(self._schema, name, table=self._name)
        return self._level.column(name)

    def lookup(self, ids: IdsLike, insert: bool = True) -> torch.Tensor:
        """Return the rows of ids (int64, any shape) in the shape of ids, on the table's device.

        Absent ids get a new row, or -1 if insert is False. With insert, all of the rows count as written from now on.
        Raises UsageError, before any insert, if ids are not int64 or one that would be inserted belongs to another
        shard.

        A MultiLevelTable brings the rows into the cache and returns cache rows. An absent id gets its row at the
        admit_after-th lookup with insert, and -1 before that; one call counts an id once. Warns once per table if the
        cache had to grow.
        """
        return sent(torch.from_numpy(self.lookup_rows(ids, insert)).view(ids.shape), self.device)

    def lookup_rows(self, ids: IdsLike, insert: bool = True) -> I64:
        """Like `lookup`, but return the rows on the host, int64 [n], without waiting for the table's device."""
        check_type("insert", insert, bool)
        flat = flat_ids(ids, table=self._name)
        if insert:
            check_owned(flat, shard=self._shard, table=self._name)
        return self._lookup(flat, insert=insert)

    def touch(self, rows: RowsLike) -> None:
        """Mark rows (int64, any shape, as the latest `lookup` returned them) as written, before or after they are.

        For code that changes rows in place that it got from a lookup without insert, or before the last cut. Skips -1
        and rows whose id is gone. Raises UsageError for rows out of range or of another dtype.
        """
        flat = flat_rows(rows, end=self._level.capacity, table=self._name)
        with self._lock.hold("touch"):
            self._touch(flat)

    def insert(self, ids: IdsLike, rows: torch.Tensor, /, **slots: torch.Tensor) -> None:
        """Set the embedding rows of ids, and the slots given by keyword; the last of equal ids in a batch wins.

        rows is `[*ids.shape, dim]` in the table's dtype, a slot `[*ids.shape, *row_shape]` in its own. Slots that are
        not given start from their fill for new ids and stay as they are for known ones. A MultiLevelTable sets each id
        where its newest row is; absent ids get a row, admitted or not. Raises UsageError before any change.
        """
        flat = flat_ids(ids, table=self._name)
        check_owned(flat, shard=self._shard, table=self._name)
        self._insert(flat, checked_values(self._schema, rows, slots, ids_shape=tuple(ids.shape), table=self._name))

    def update_ids(self, ids: I64, write: WriteRows) -> None:
        """Let `write` change the rows of ids, int64 [n], distinct, in place, and mark them, under the table's lock.

        No other thread gives the rows to other ids or moves them meanwhile. Ids without a row get none.
        """
        raise NotImplementedError

    # These acquire the lock themselves. ------------------------------------------------------------------------------

    def _lookup(self, ids: I64, *, insert: bool) -> I64:
        raise NotImplementedError

    def _insert(self, ids: I64, values: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def _touch(self, rows: I64) -> None:
        """Mark rows of `_level`. The lock is held."""
        raise NotImplementedError
