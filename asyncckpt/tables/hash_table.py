"""HashTable: int64 id -> row of embedding, optimizer slots and metadata, growing as new ids come.

The id map is the native core's; the columns are torch tensors `[capacity, *row_shape]` that training code reads and
updates in place by row. An id keeps its row until it is removed; growth moves the columns to new memory but keeps every
row number, so fetch `embedding` and `slot(name)` anew after a lookup that may insert. What free rows hold is undefined.

Threads: any method may be called from any thread; one lock is held during a call, by a cut until its fence and by a
load until its end (see table_lock.py). In-place updates of columns are the caller's to keep apart from a cut: the
training thread makes the cut, or stands still while another does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Role, TableSchema
from asyncckpt.tables.cut import HashTableCut, HashTableLoad
from asyncckpt.tables.ids import IdsLike, check_owned, flat_ids, one_id, owned_mask
from asyncckpt.tables.initializer import Initializer, check_initializer
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.slots import EMBEDDING_COLUMN, SlotSpec, table_layout
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
        if not isinstance(name, str) or not name:
            raise UsageError("name of a table is wrong", found=name, expected="a non-empty str")
        layout = table_layout(dim, dtype=dtype, optimizer_slots=optimizer_slots, metadata=metadata)
        if not _is_int(capacity) or capacity < 1:
            raise UsageError(f"capacity of table {name!r} is wrong", found=capacity, expected="an int >= 1")
        check_initializer(initializer, table=name)
        self._name = name
        self._shard = _checked_shard(name, shard)
        self._schema = layout.schema
        self._lock = TableLock(name)
        self._store = RowStore(layout, device=_checked_device(name, device), capacity=capacity, initializer=initializer)

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
        return self.embedding.device

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
        column = self._schema.column(name)
        if column is None or column.role not in (Role.OPTIMIZER, Role.METADATA):
            known = [c.name for c in self._schema.columns if c.role in (Role.OPTIMIZER, Role.METADATA)]
            raise UsageError(f"table {self._name!r} has no such slot", found=name, expected=known)
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

        Absent ids get a new row, or -1 when insert is False. Raises UsageError, before any insert, when ids are not
        int64 or one that would be inserted belongs to another shard.
        """
        flat = flat_ids(ids, table=self._name)
        if insert:
            check_owned(flat, shard=self._shard, table=self._name)
        with self._lock.hold("lookup"):
            rows = self._store.insert(flat) if insert else self._store.find(flat)
        return torch.from_numpy(rows).view(ids.shape).to(self.device)

    def insert(self, ids: IdsLike, rows: torch.Tensor, /, **slots: torch.Tensor) -> None:
        """Set the embedding rows of ids, and the slots given by keyword; the last of equal ids in a batch wins.

        rows is `[*ids.shape, dim]` in the table's dtype, a slot `[*ids.shape, *row_shape]` in its own. Slots that are
        not given start from their fill for new ids and stay as they are for known ones. Raises UsageError before any
        change.
        """
        flat = flat_ids(ids, table=self._name)
        check_owned(flat, shard=self._shard, table=self._name)
        values = {EMBEDDING_COLUMN: rows}
        for name, value in slots.items():
            self.slot(name)
            values[name] = value
        for name, value in values.items():
            self._check_values(name, value, ids_shape=tuple(ids.shape))
        with self._lock.hold("insert"), torch.no_grad():
            found = self._store.insert(flat)
            order = _last_mentions(found)
            index = torch.from_numpy(found[order]).to(self.device)
            source = torch.from_numpy(order)
            for name, value in values.items():
                column = self._store.column(name)
                per_id = value.detach().reshape(flat.size, *column.shape[1:])
                column.index_copy_(0, index, per_id[source.to(value.device)].to(column.device))

    def remove(self, ids: IdsLike) -> int:
        """Forget ids (int64, any shape) and return how many of them were there; their rows are free for others."""
        flat = flat_ids(ids, table=self._name)
        with self._lock.hold("removal"):
            return self._store.remove(flat)

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
            return torch.from_numpy(self._store.rows()).to(self.device)

    def owns(self, ids: IdsLike) -> torch.Tensor:
        """Return which of ids (int64, any shape) belong to this shard: bool, in the shape and on the device of ids."""
        flat = flat_ids(ids, table=self._name)
        mask = torch.from_numpy(owned_mask(flat, shard=self._shard)).view(ids.shape)
        return mask.to(ids.device) if isinstance(ids, torch.Tensor) else mask

    def begin_cut(self) -> HashTableCut:
        """Hold the table still until the cut's fence. Raises DeadlineError when another use of it does not end."""
        self._lock.acquire("cut")
        try:
            return HashTableCut(self._name, store=self._store, lock=self._lock)
        except BaseException:
            self._lock.release()
            raise

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str] = ()) -> HashTableLoad:
        """Take the table for a load until its end, emptied first when clear, with room for rows_count more rows.

        Columns named in `filled` get no initial values: the load writes them for every row it inserts.
        """
        if not _is_int(rows_count) or rows_count < 0:
            what = f"rows_count of a load of table {self._name!r} is wrong"
            raise UsageError(what, found=rows_count, expected="an int >= 0")
        self._lock.acquire("load")
        try:
            if clear:
                self._store.clear()
            self._store.reserve(len(self._store) + rows_count)
            return HashTableLoad(self._name, store=self._store, lock=self._lock, shard=self._shard, filled=filled)
        except BaseException:
            self._lock.release()
            raise

    def _check_values(self, name: str, values: object, *, ids_shape: tuple[int, ...]) -> None:
        what = f"values for column {name!r} of table {self._name!r}"
        column = self._store.column(name)
        if not isinstance(values, torch.Tensor):
            raise UsageError(f"{what} are wrong", found=type(values), expected=torch.Tensor)
        if values.dtype is not column.dtype:
            hint = f"use values.to({column.dtype})"
            raise UsageError(f"{what} have the wrong dtype", found=values.dtype, expected=column.dtype, hint=hint)
        shape = (*ids_shape, *column.shape[1:])
        if tuple(values.shape) != shape:
            raise UsageError(f"{what} have the wrong shape", found=tuple(values.shape), expected=shape)


def _last_mentions(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each row is mentioned last, ordered by row: index_copy_ promises no order among equal rows."""
    _, first_from_end = np.unique(rows[::-1], return_index=True)
    return np.asarray(rows.size - 1 - first_from_end, dtype=np.int64)


def _checked_shard(name: str, shard: object) -> tuple[int, int]:
    if isinstance(shard, tuple) and len(shard) == 2 and all(_is_int(part) for part in shard):
        index, count = shard
        if 0 <= index < count:
            return index, count
    raise UsageError(f"shard of table {name!r} is wrong", found=shard, expected="(index, count), 0 <= index < count")


def _checked_device(name: str, device: torch.device | str) -> torch.device:
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device of table {name!r} is wrong", found=device) from error
    if checked.type == "meta":
        raise UsageError(f"device of table {name!r} is wrong", found=device, hint="rows need memory")
    return checked


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
