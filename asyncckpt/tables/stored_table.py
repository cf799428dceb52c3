"""What the tables of this package share: rows for ids in a RowStore, one lock, and an embedding that training updates.

Any method may be called from any thread. A call holds the lock while it runs, a cut until its fence, a load until its
end (table_lock.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.arguments import check_int, check_type
from asyncckpt.errors import UsageError, warn
from asyncckpt.model.table import IdsHeld, TableSchema
from asyncckpt.model.table_shard import Shard, owned_mask
from asyncckpt.native import I64, U8
from asyncckpt.tables.cut import HashTableCut, HashTableLoad
from asyncckpt.tables.ids import IdsLike, RowsLike, check_owned, flat_ids, flat_rows, one_id
from asyncckpt.tables.initializer import Initializer, check_initializer
from asyncckpt.tables.row_device import RowDevice, sent, spread
from asyncckpt.tables.row_store import Level, RowStore
from asyncckpt.tables.row_values import RowValues, check_distinct
from asyncckpt.tables.slots import EMBEDDING_COLUMN, Layout
from asyncckpt.tables.table_arguments import check_eviction, check_name, check_shard, check_slot, checked_values
from asyncckpt.tables.table_lock import LockedTable


class StoredTable(LockedTable):
    """A table whose ids have rows in a RowStore."""

    def __init__(self, name: str, schema: TableSchema, *, shard: Shard, replicated: bool, store: RowStore) -> None:
        super().__init__(name, schema, shard=shard, replicated=replicated)
        self._store = store
        self._written_by_others: list[str] = []
        self._has_warned_of_others = False

    @property
    def capacity(self) -> int:
        """How many ids there is room for before the columns have to grow."""
        return self._store.capacity

    def __len__(self) -> int:
        """How many ids have a row. Does not wait for the lock, so it can be logged while a load runs elsewhere."""
        return len(self._store)

    def ids_held(self) -> IdsHeld:
        """Return how many ids there are, and of a replica the sum of their fingerprints. Does not wait for the lock."""
        return self._store.ids_held

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
            written = [name for level in self._levels_in_use() for name in level.written_by_others()]
            if written:
                self._store.marks.lose_all(by_others=True)
                self._written_by_others = written
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
        return HashTableCut(self._name, store=self._store, lock=self._lock, on_lost=self._warn_of_others)

    def _levels_in_use(self) -> tuple[Level, ...]:
        return (self._store,)

    def _prepare_load(self, *, clear: bool) -> None:
        """Make the store ready for a load."""

    def _warn_of_others(self) -> None:
        """Warn, once, that a save had to copy all rows. Without the lock: a program may turn warnings into errors."""
        if self._has_warned_of_others:
            return
        self._has_warned_of_others = True
        what = f"columns {self._written_by_others} of table {self._name!r} were written in place by other code than the"
        advice = "table.update(rows, function) and `with table.rows(ids) as rows` write rows that saves can follow"
        warn(f"{what} table's, so saves copy all of its rows: {advice}", RuntimeWarning)


# Called with the columns that training sees, rows of them, int64 [n], -1 for an id without a row, and the marks to set
# for the others (uint8 by row, and the value); None if they are marked already. It must not use the table.
WriteMemory: TypeAlias = Callable[[Mapping[str, torch.Tensor], I64, tuple[U8, int] | None], None]

RecordRows: TypeAlias = Callable[[RowValues], object]
UseRows: TypeAlias = Callable[[I64], None]


class TrainedTable(StoredTable):
    """A table with an embedding, whose rows training reads and updates in place, in `_level`."""

    _level: Level

    def __init__(
        self,
        name: str,
        layout: Layout,
        *,
        shard: Shard,
        replicated: bool,
        capacity: int,
        initializer: Initializer,
        place: RowDevice | None,
    ) -> None:
        check_name(name)
        check_int(f"capacity of table {name!r}", capacity, at_least=1)
        check_initializer(initializer, table=name)
        check_shard(name, shard, replicated=replicated)
        store = RowStore(layout, capacity=capacity, initializer=initializer, place=place, fingerprints_ids=replicated)
        super().__init__(name, layout.schema, shard=shard, replicated=replicated, store=store)

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
    def is_on_host(self) -> bool:
        """Whether the rows that training sees are plain memory of the host."""
        return self._level.place.is_host

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

        Absent ids get a new row, or -1 if insert is False. With insert, all of the rows are marked as written. To write
        them, use `update` or `rows`: other writes, which torch counts, make the next save copy or compare all rows.
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

    def train_rows(self, ids: I64, record: RecordRows | None = None) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Look up ids, int64 [n], distinct, with insert; return copies of their embedding rows, `[n, dim]`, and which
        ids have a row: the others read as zeros. `record` changes other columns of the rows in the same hold of the
        lock, in which no thread moves them."""
        check_owned(ids, shard=self._shard, table=self._name)
        copies: list[tuple[I64, torch.Tensor]] = []

        def use(rows: I64) -> None:
            if record is not None:
                with self._values_of(rows, (ids.size,), of=ids, what="ids") as values:
                    record(values)
            positions = np.flatnonzero(rows >= 0)
            copies.append((positions, self._level.read(rows[positions], only=EMBEDDING_COLUMN)[EMBEDDING_COLUMN]))

        rows = self._lookup(ids, insert=True, use=use)
        return spread(copies[0][1], copies[0][0], count=ids.size), rows >= 0

    def read(self, ids: IdsLike, *, only: str | None = None, absent_as_zeros: bool = False) -> dict[str, torch.Tensor]:
        """Return the newest values of ids (int64, any shape) in every column but `id`, or in one only.

        For evaluation and serving, beside training too: nothing moves, and no cache, policy, statistics or mark sees
        it. Each is a new tensor `[*ids.shape, *row_shape]` on the CPU. Raises UsageError for an id without a row,
        unless absent_as_zeros.
        """
        flat = flat_ids(ids, table=self._name)
        names = [column.name for column in self._schema.columns if column.name in self._level.columns()]
        if only is not None and only not in names:
            raise UsageError(f"table {self._name!r} has no such column", found=only, expected=names)
        check_type("absent_as_zeros", absent_as_zeros, bool)
        with self._lock.hold("reading"):
            self._begin()
            newest, positions = self._newest(flat, only=only)
            values = self._level.place.begin_to_host(newest).wait()
        if positions.size < flat.size and not absent_as_zeros:
            first = int(flat[np.setdiff1d(np.arange(flat.size), positions)[0]])
            what = f"id to read from table {self._name!r} has no row"
            raise UsageError(what, found=first, hint="absent_as_zeros=True reads zeros for such ids")
        shape = tuple(ids.shape)
        return {
            name: spread(value, positions, count=flat.size).view((*shape, *value.shape[1:]))
            for name, value in values.items()
        }

    def read_embedding(self, ids: I64) -> torch.Tensor:
        """Like `read`, return the embedding rows of ids, `[n, dim]`, on the table's device; zeros for absent ones."""
        with self._lock.hold("reading"):
            self._begin()
            newest, positions = self._newest(ids, only=EMBEDDING_COLUMN)
        return spread(newest[EMBEDDING_COLUMN], positions, count=ids.size)

    def touch(self, rows: RowsLike) -> None:
        """Mark rows (int64, any shape, as the latest `lookup` returned them) as written, before or after they are.

        For writes that torch does not count: through NumPy, `.data`, kernels of others. What it counts is seen without,
        and is faster by `update` or `rows`. Skips -1 and rows whose id is gone. Raises UsageError for rows out of range
        or of another dtype.
        """
        flat = flat_rows(rows, end=self._level.capacity, table=self._name)
        with self._lock.hold("touch"):
            self._touch(flat)

    def update(self, rows: RowsLike, function: Callable[[RowValues], object]) -> None:
        """Change rows (int64, any shape, distinct, as the latest `lookup` returned them) by a function.

        It gets a RowValues, copies of the rows, and changes them; they are written back, and marked, when it returns,
        and not if it raises. The lock is held meanwhile, so it must not use the table. Skips -1 and rows whose id is
        gone. Between lookup and update, no other thread may remove ids or look up in a MultiLevelTable: that gives rows
        to other ids. `rows` goes by ids. Raises UsageError.
        """
        flat = flat_rows(rows, end=self._level.capacity, table=self._name)
        with self._lock.hold("update"):
            self._begin()
            with self._values_of(flat, tuple(rows.shape), of=flat, what="rows") as values:
                function(values)

    @contextmanager
    def rows(self, ids: IdsLike) -> Iterator[RowValues]:
        """Hold the rows of ids (int64, any shape, distinct) for a block of code that changes them: a RowValues.

        Like `update`, for code that has no row numbers, or had them before other uses of the table. Absent ids get no
        row. A MultiLevelTable brings the rows into the cache. Raises UsageError.
        """
        flat = flat_ids(ids, table=self._name)
        with self._lock.hold("update"):
            self._begin()
            with self._values_of(self._find(flat), tuple(ids.shape), of=flat, what="ids") as values:
                yield values
        self._warn_of_growth()

    def update_in_memory(self, ids: I64, write: WriteMemory) -> None:
        """Let `write` change the rows of ids, int64 [n], distinct, and mark them, under the lock; no id gets a row.

        It writes to the memory of the columns of a table on the host, in a way that torch does not count: a copy or an
        operation of torch would be taken for a write of other code.
        """
        assert self.is_on_host
        with self._lock.hold("update"):
            self._begin()
            rows = self._find(ids)
            write(self._level.columns(), rows, self._to_mark(rows))

    def insert(self, ids: IdsLike, rows: torch.Tensor, /, **slots: torch.Tensor) -> None:
        """Set the embedding rows of ids, and the slots given by keyword; the last of equal ids in a batch wins.

        rows is `[*ids.shape, dim]` in the table's dtype, a slot `[*ids.shape, *row_shape]` in its own. Slots that are
        not given start from their fill for new ids and stay as they are for known ones. A MultiLevelTable sets each id
        where its newest row is; absent ids get a row, admitted or not. Raises UsageError before any change.
        """
        flat = flat_ids(ids, table=self._name)
        check_owned(flat, shard=self._shard, table=self._name)
        self._insert(flat, checked_values(self._schema, rows, slots, ids_shape=tuple(ids.shape), table=self._name))

    @contextmanager
    def _values_of(self, rows: I64, shape: tuple[int, ...], *, of: I64, what: str) -> Iterator[RowValues]:
        check_distinct(of[rows >= 0] if of is rows else of, what=f"{what} of table {self._name!r} to update")
        values = RowValues(self._name, self._schema, self._level, rows, used=self._are_used(rows), shape=shape)
        try:
            yield values
        except BaseException:
            values.end()
            raise
        used, written = values.end()
        if written:
            self._write(used, written)

    def _newest(self, ids: I64, *, only: str | None) -> tuple[dict[str, torch.Tensor], I64]:
        """Return the newest rows of those ids that have one, and which positions in ids they are for. Nothing moves.
        The lock is held."""
        raise NotImplementedError

    def _find(self, ids: I64) -> I64:
        """Return the rows of ids in `_level`, -1 for absent ones. The lock is held."""
        raise NotImplementedError

    def _are_used(self, rows: I64) -> NDArray[np.bool_]:
        """Return which rows of `_level` have an id; -1 has none. The lock is held."""
        raise NotImplementedError

    def _write(self, rows: I64, values: dict[str, torch.Tensor]) -> None:
        """Set and mark used rows (distinct) of `_level`. The lock is held."""
        raise NotImplementedError

    def _to_mark(self, rows: I64) -> tuple[U8, int] | None:
        """Begin a write of rows of `_level`: mark them, or return the marks to set; -1 is skipped. The lock is held."""
        raise NotImplementedError

    def _warn_of_growth(self) -> None:
        """Warn if the rows of a lookup did not fit. Without the lock."""

    # These acquire the lock themselves. ------------------------------------------------------------------------------

    def _lookup(self, ids: I64, *, insert: bool, use: UseRows | None = None) -> I64:
        """Find rows, and have them used before the lock is released."""
        raise NotImplementedError

    def _insert(self, ids: I64, values: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def _touch(self, rows: I64) -> None:
        """Mark rows of `_level`. The lock is held."""
        raise NotImplementedError
