"""HashTable: int64 id -> row of embedding, optimizer slots and metadata, growing as new ids come.

The id map is the native core's; the columns are torch tensors `[capacity, *row_shape]` that training code reads and
updates in place by row. An id keeps its row until it is removed. Growth moves the columns to new memory but keeps the
row numbers, so fetch `embedding` and `slot(name)` again after a lookup that may insert. Free rows are undefined.

Threads: see stored_table.py. The table cannot see in-place updates of columns, so callers keep them apart from a cut:
the training thread makes the cut, or waits while another thread does.

On a device, a call queues its work on the current stream, after the work of the previous call on whatever stream that
used, and waits only for ids that are on a device.

Marks: a cut knows which rows were written since an earlier one (`TracksRows`). A lookup with insert marks the rows that
it returns, `insert` marks those that it sets, and the optimizers of this package mark those that they update. Code that
changes rows in place in any other way, after a cut or a lookup without insert, reports them with `touch`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncckpt.native import I64
from asyncckpt.tables.ids import IdsLike, RowsLike, check_owned, flat_ids, flat_rows
from asyncckpt.tables.initializer import Initializer, check_initializer
from asyncckpt.tables.row_device import row_device, sent
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.slots import EMBEDDING_COLUMN, SlotSpec, table_layout
from asyncckpt.tables.stored_table import StoredTable
from asyncckpt.tables.table_arguments import (
    check_slot,
    checked_count,
    checked_device,
    checked_name,
    checked_shard,
    checked_values,
    last_mentions,
)


class HashTable(StoredTable):
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
        checked_name(name)
        layout = table_layout(dim, dtype=dtype, optimizer_slots=optimizer_slots, metadata=metadata)
        checked_count("capacity", capacity, table=name)
        check_initializer(initializer, table=name)
        checked_shard(name, shard)
        place = row_device(checked_device(name, device))
        store = RowStore(layout, capacity=capacity, initializer=initializer, place=place)
        super().__init__(name, schema=layout.schema, store=store, shard=shard)

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
    def embedding(self) -> torch.Tensor:
        """The live embedding column, `[capacity, dim]`; fetch it again after a lookup that may insert."""
        return self._store.column(EMBEDDING_COLUMN)

    def slot(self, name: str) -> torch.Tensor:
        """Return the live tensor, `[capacity, *row_shape]`, of an optimizer slot or metadata column.

        Raises UsageError.
        """
        check_slot(self._schema, name, table=self._name)
        return self._store.column(name)

    def __repr__(self) -> str:
        return f"HashTable({self._name!r}, dim={self.dim}, rows={len(self)}, shard={self._shard})"

    def lookup(self, ids: IdsLike, insert: bool = True) -> torch.Tensor:
        """Return the rows of ids (int64, any shape) in the shape of ids, on the table's device.

        Absent ids get a new row, or -1 if insert is False. With insert, all of the rows count as written from now on.
        Raises UsageError, before any insert, if ids are not int64 or one that would be inserted belongs to another
        shard.
        """
        rows = self.lookup_rows(ids, insert)
        return sent(torch.from_numpy(rows).view(ids.shape), self.device)

    def lookup_rows(self, ids: IdsLike, insert: bool = True) -> I64:
        """Like `lookup`, but return the rows on the host, int64 [n], without waiting for the table's device."""
        flat = flat_ids(ids, table=self._name)
        if insert:
            check_owned(flat, shard=self._shard, table=self._name)
        with self._lock.hold("lookup"):
            return self._store.insert(flat, touch=True) if insert else self._store.find(flat)

    def touch(self, rows: RowsLike) -> None:
        """Mark rows (int64, any shape, as `lookup` returns them) as written, before or after they are.

        For code that changes rows in place that it got from a lookup without insert, or before the last cut. Skips -1
        and rows whose id is gone. Raises UsageError for rows out of range or of another dtype.
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

    def rows(self) -> torch.Tensor:
        """Return the rows in use, int64 [n] on the table's device, ascending: the order of `ids()`."""
        with self._lock.hold("listing"):
            return sent(torch.from_numpy(self._store.rows()), self.device)
