"""HashTable: int64 id -> row of embedding, optimizer slots and metadata, growing as new ids come.

The id map is the native core's; the columns are torch tensors `[capacity, *row_shape]` that training code reads and
updates in place by row. An id keeps its row until it is removed; growth moves the columns to new memory but keeps every
row number, so fetch `embedding` and `slot(name)` anew after a lookup that may insert. What free rows hold is undefined.

Threads: any method may be called from any thread; one lock is held during a call, by a cut until its fence and by a
load until its end (see table_lock.py). In-place updates of columns are the caller's to keep apart from a cut: the
training thread makes the cut, or stands still while another does.

On a device a call queues its work on the current stream, behind that of the call before on whichever stream that was,
and waits for nothing but ids that are on a device.

Marks: a cut knows which rows were written since an earlier one (`TracksRows`). A lookup with insert marks the rows that
it returns, `insert` those that it sets, and the optimizers of this package those that they update. Code that changes
rows in place otherwise, behind a cut or a lookup without insert, tells the table by `touch`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.model.table import TableSchema
from asyncckpt.tables.cut import HashTableCut, HashTableLoad
from asyncckpt.tables.expiry import is_below
from asyncckpt.tables.ids import IdsLike, RowsLike, check_owned, flat_ids, flat_rows, one_id, owned_mask
from asyncckpt.tables.initializer import Initializer, check_initializer
from asyncckpt.tables.row_device import row_device, sent
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.slots import EMBEDDING_COLUMN, SlotSpec, table_layout
from asyncckpt.tables.table_arguments import (
    check_eviction,
    check_slot,
    checked_count,
    checked_device,
    checked_name,
    checked_shard,
    checked_values,
    last_mentions,
)
from asyncckpt.tables.table_lock import TableLock


class HashTable:
    """A sparse table that a Saver can save. Implements `asyncckpt.model.table.Table`.

    optimizer_slots and metadata name further columns (see slots.py for the ways to describe one). shard is (index,
    count): the table holds the ids whose bit pattern, as an unsigned number, modulo count is index. A new row starts
    from the initializer and the fills, also where its row belonged to a removed id. Raises UsageError for wrong
    arguments and UnsupportedError for a dtype that tables cannot hold.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        optimizer_slots: Mapping[str, SlotSpec] | None = None,
        metadata: Mapping[str, SlotSpec] | None = None,
        shard: tuple[int, int] = (0, 1),
        device: torch.device | str = "cpu",
        capacity: int = 1024,
        initializer: Initializer = None,
    ) -> None:
        self._name = checked_name(name)
        layout = table_layout(dim, dtype=dtype, optimizer_slots=optimizer_slots, metadata=metadata)
        checked_count("capacity", capacity, table=name)
        check_initializer(initializer, table=name)
        self._shard = checked_shard(name, shard)
        self._schema = layout.schema
        self._lock = TableLock(name)
        place = row_device(checked_device(name, device))
        self._store = RowStore(layout, capacity=capacity, initializer=initializer, place=place)

    @property
    def name(self) -> str:
        return self._name

    @property
    def dim(self) -> int:
        return int(self.embedding.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._store.place.device

    @property
    def shard(self) -> tuple[int, int]:
        return self._shard

    @property
    def capacity(self) -> int:
        """How many rows the columns have room for now; rows are below it."""
        return self._store.capacity

    @property
    def embedding(self) -> torch.Tensor:
        """The live embedding column, `[capacity, dim]`; fetch it anew after a lookup that may insert."""
        return self._store.column(EMBEDDING_COLUMN)

    def slot(self, name: str) -> torch.Tensor:
        """Return the live tensor, `[capacity, *row_shape]`, of an optimizer slot or metadata column.

        Raises UsageError.
        """
        check_slot(self._schema, name, table=self._name)
        return self._store.column(name)

    def schema(self) -> TableSchema:
        """Return the columns in their order: id, embedding, optimizer slots, metadata."""
        return self._schema

    def __len__(self) -> int:
        """How many ids there are, without waiting for the lock: a number for logs while a load runs elsewhere."""
        return len(self._store)

    def __contains__(self, id: object) -> bool:
        flat = one_id(id, table=self._name)
        with self._lock.hold("lookup"):
            return bool(self._store.find(flat)[0] >= 0)

    def __repr__(self) -> str:
        return f"HashTable({self._name!r}, dim={self.dim}, rows={len(self)}, shard={self._shard})"

    def lookup(self, ids: IdsLike, insert: bool = True) -> torch.Tensor:
        """Return the rows of ids (int64, any shape) in the shape of ids, on the table's device.

        Absent ids get a new row, or -1 when insert is False. With insert all of the rows count as written from now on.
        Raises UsageError, before any insert, when ids are not int64 or one that would be inserted belongs to another
        shard.
        """
        rows = self.lookup_rows(ids, insert)
        return sent(torch.from_numpy(rows).view(ids.shape), self.device)

    def lookup_rows(self, ids: IdsLike, insert: bool = True) -> NDArray[np.int64]:
        """As `lookup`, for who needs the rows on the host: int64 [n], without a wait for the table's device."""
        flat = flat_ids(ids, table=self._name)
        if insert:
            check_owned(flat, shard=self._shard, table=self._name)
        with self._lock.hold("lookup"):
            return self._store.insert(flat, touch=True) if insert else self._store.find(flat)

    def touch(self, rows: RowsLike) -> None:
        """Mark rows (int64, any shape, as `lookup` returns them) as written, before or after they are.

        For code that changes rows in place which it got by a lookup without insert, or before the last cut. -1 and rows
        whose id is gone are passed over. Raises UsageError for rows out of range or of another dtype.
        """
        flat = flat_rows(rows, end=self.capacity, table=self._name)
        with self._lock.hold("touch"):
            self._store.marks.mark_used(flat)

    def insert(self, ids: IdsLike, rows: torch.Tensor, /, **slots: torch.Tensor) -> None:
        """Set the embedding rows of ids, and the slots given by keyword; the last of equal ids in a batch wins.

        rows is `[*ids.shape, dim]` in the table's dtype, a slot `[*ids.shape, *row_shape]` in its own. Slots that are
        not given start from their fill for new ids and stay as they are for known ones. Raises UsageError before any
        change.
        """
        flat = flat_ids(ids, table=self._name)
        check_owned(flat, shard=self._shard, table=self._name)
        values = checked_values(self._schema, rows, slots, ids_shape=tuple(ids.shape), table=self._name)
        with self._lock.hold("insert"):
            found = self._store.insert(flat)
            order = last_mentions(found)
            source = torch.from_numpy(order)
            self._store.write(found[order], {name: value[sent(source, value.device)] for name, value in values.items()})

    def remove(self, ids: IdsLike) -> int:
        """Forget ids (int64, any shape) and return how many of them were there; their rows are free for others."""
        flat = flat_ids(ids, table=self._name)
        with self._lock.hold("removal"):
            return self._store.remove(flat)

    def evict(self, column: str, *, below: float) -> int:
        """Forget the ids whose number in a metadata column (row shape ()) is below a bound; return how many.

        Age and frequency: `evict("last_seen", below=step - 1000)`, `evict("count", below=3)` on the columns that
        HashEmbedding keeps. Raises UsageError.
        """
        check_eviction(self._schema, column, below, table=self._name)
        with self._lock.hold("eviction"):
            rows = self._store.rows()
            self._store.place.follow()
            values = self._store.column(column)[self._store.place.index(rows)]
            return self._store.remove(self._store.ids_of(rows[is_below(values, below)]))

    def clear(self) -> None:
        """Forget all ids; the capacity stays."""
        with self._lock.hold("clear"):
            self._store.clear()

    def ids(self) -> torch.Tensor:
        """Return the ids, int64 [n] on the CPU, ordered by row; a copy."""
        with self._lock.hold("listing"):
            return torch.from_numpy(self._store.ids())

    def rows(self) -> torch.Tensor:
        """Return the rows in use, int64 [n] on the table's device, ascending: the order of `ids()`."""
        with self._lock.hold("listing"):
            return sent(torch.from_numpy(self._store.rows()), self.device)

    def owns(self, ids: IdsLike) -> torch.Tensor:
        """Return which of ids (int64, any shape) belong to this shard: bool, in the shape and on the device of ids."""
        flat = flat_ids(ids, table=self._name)
        mask = torch.from_numpy(owned_mask(flat, shard=self._shard)).view(ids.shape)
        return mask.to(ids.device) if isinstance(ids, torch.Tensor) else mask

    def begin_cut(self) -> HashTableCut:
        """Hold the table still until the cut's fence. Raises DeadlineError when another use of it does not end."""
        self._lock.acquire("cut")
        try:
            self._store.place.follow()
            return HashTableCut(self._name, store=self._store, lock=self._lock)
        except BaseException:
            self._lock.release()
            raise

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str] = ()) -> HashTableLoad:
        """Take the table for a load until its end, emptied first when clear, with room for rows_count more rows.

        Columns named in `filled` get no initial values: the load writes them for every row it inserts.
        """
        checked_count("rows_count of a load", rows_count, table=self._name, at_least=0)
        self._lock.acquire("load")
        try:
            self._store.place.follow()
            if clear:
                self._store.clear()
            self._store.reserve(len(self._store) + rows_count)
            return HashTableLoad(self._name, store=self._store, lock=self._lock, shard=self._shard, filled=filled)
        except BaseException:
            self._lock.release()
            raise
