"""Tables with an embedding that training reads and updates, whatever levels their rows are in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.arguments import check_int, check_type
from asyncckpt.errors import UsageError, nearest
from asyncckpt.model.table import Role, Table
from asyncckpt.model.table_shard import Shard
from asyncckpt.native import I64, U8
from asyncckpt.signals import uninterrupted
from asyncckpt.tables.candidates import CANDIDATES, CandidateTable
from asyncckpt.tables.initializer import Initializer, check_initializer
from asyncckpt.tables.row_device import RowDevice, sent, spread
from asyncckpt.tables.row_store import Level, RowStore
from asyncckpt.tables.row_values import RecordRows, RowValues, UseRows, WriteMemory, check_distinct
from asyncckpt.tables.slots import EMBEDDING_COLUMN, Layout
from asyncckpt.tables.stored_table import StoredTable, TableValue
from asyncckpt.tables.table_arguments import (
    IdsLike,
    RowsLike,
    check_name,
    check_owned,
    check_shard,
    check_slot,
    checked_values,
    flat_ids,
    flat_rows,
)
from asyncckpt.tables.table_lock import HashTableLoad


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
        admit_after: int,
        candidates_max: int,
    ) -> None:
        check_name(name)
        for what, count in (("capacity", capacity), ("admit_after", admit_after), ("candidates_max", candidates_max)):
            check_int(f"{what} of table {name!r}", count, at_least=1)
        check_initializer(initializer, table=name)
        check_shard(name, shard, replicated=replicated)
        store = RowStore(layout, capacity=capacity, initializer=initializer, place=place, fingerprints_ids=replicated)
        super().__init__(name, layout.schema, shard=shard, replicated=replicated, store=store)
        self._layout, self._initializer = layout, initializer
        self._admit_after, self._candidates_max = admit_after, candidates_max
        self._candidates: CandidateTable | None = None
        if admit_after > 1:
            companion = f"{name}.{CANDIDATES}"
            self._candidates = CandidateTable(companion, rows_max=candidates_max, shard=shard, replicated=replicated)

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

    def companions(self) -> Mapping[str, Table]:
        """Return the tables that belong to this one and are saved beside it, by suffix.

        `candidates`, where admit_after is above 1: counts of ids that have no row yet.
        """
        return {} if self._candidates is None else {CANDIDATES: self._candidates}

    def lookup(self, ids: IdsLike, insert: bool = True) -> torch.Tensor:
        """Return the rows of ids (int64, any shape) in the shape of ids, on the table's device.

        Absent ids get a new row, or -1 if insert is False. With insert, all of the rows are marked as written. To write
        them, use `update` or `rows`: other writes, which torch counts, make the next save copy or compare all rows.
        Raises UsageError, before any insert, if ids are not int64 or one to insert belongs to another shard.

        An absent id gets its row at the admit_after-th lookup with insert, and -1 before that; one call counts an id
        once. A MultiLevelTable brings the rows into the cache and returns cache rows. Warns once per table if the cache
        had to grow.
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
            raise UsageError(f"table {self._name!r} has no column {only!r}", expected=names, hint=nearest(only, names))
        check_type("absent_as_zeros", absent_as_zeros, bool)
        with self._lock.hold("reading"):
            self._begin()
            newest, positions = self._newest(flat, only=only)
            values = self._level.place.begin_to_host(newest).wait()
        if positions.size < flat.size and not absent_as_zeros:
            first = int(flat[np.setdiff1d(np.arange(flat.size), positions)[0]])
            what = f"id to read from table {self._name!r} has no row"
            raise UsageError(what, found=first, hint="absent_as_zeros=True reads zeros for such ids")
        return {
            name: spread(value, positions, count=flat.size).view((*ids.shape, *value.shape[1:]))
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

        It gets a RowValues, copies of the rows, and changes them; they are marked before, and written back when it
        returns, and not if it raises. The lock is held meanwhile, so it must not use the table. Skips -1 and rows whose
        id is gone. Between lookup and update, no other thread may remove ids or look up in a MultiLevelTable: that
        gives rows to other ids. `rows` goes by ids. Raises UsageError.
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
        values = checked_values(self._schema, rows, slots, ids_shape=tuple(ids.shape), table=self._name)
        with uninterrupted:
            with self._lock.hold("insert"):
                self._begin()
                self._set(flat, values)
            if self._candidates is not None:
                self._candidates.remove(flat)

    @uninterrupted
    def remove(self, ids: IdsLike) -> int:
        """Remove ids (int64, any shape), also from the candidates for admission, and return how many had a row.

        Other ids may get their rows.
        """
        removed_count = super().remove(ids)
        if self._candidates is not None:
            self._candidates.remove(ids)
        return removed_count

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str] = ()) -> HashTableLoad:
        load = super().begin_load(clear=clear, rows_count=rows_count, filled=filled)
        load.then = self._forget_admitted
        return load

    @uninterrupted
    def clear(self) -> None:
        """Remove all ids, candidates for admission too; the capacity stays, and the size of a cache."""
        with self._lock.hold("clear"):
            self._begin()
            self._store.clear()
            self._empty_cache(write_back=False)
        if self._candidates is not None:
            self._candidates.clear()

    def shrink(self) -> int:
        """Like that of every table; also shrink the candidates for admission."""
        candidates_bytes = 0 if self._candidates is None else self._candidates.shrink()
        return super().shrink() + candidates_bytes

    def __getstate__(self) -> TableValue:
        # Before the rows: an id that is admitted meanwhile is in both, and not in neither.
        candidates = None if self._candidates is None else deepcopy(self._candidates)
        return replace(super().__getstate__(), candidates=candidates)

    def __setstate__(self, value: TableValue) -> None:
        super().__setstate__(value)
        assert value.candidates is None or isinstance(value.candidates, CandidateTable)
        self._candidates = value.candidates

    def _arguments(self) -> dict[str, Any]:
        slots = {"optimizer_slots": Role.OPTIMIZER, "metadata": Role.METADATA}
        return {
            **super()._arguments(),
            "dim": self.dim,
            "dtype": self.dtype,
            "device": self.device,
            "capacity": self.capacity,
            "initializer": self._initializer,
            "admit_after": self._admit_after,
            "candidates_max": self._candidates_max,
            **{argument: self._layout.slots(role) for argument, role in slots.items()},
        }

    @contextmanager
    def _values_of(self, rows: I64, shape: tuple[int, ...], *, of: I64, what: str) -> Iterator[RowValues]:
        check_distinct(of[rows >= 0] if of is rows else of, what=f"{what} of table {self._name!r} to update")
        values = RowValues(self._name, self._schema, self._level, rows, used=self._begin_write(rows), shape=shape)
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

    def _count_lookup(self, rows: I64, *, rows_before: int) -> None:
        """Count a lookup that has found rows, where there were rows_before. The lock is held."""
        misses_count = len(self._store) - rows_before + int(np.count_nonzero(rows < 0))
        self._store.counts.misses_count += misses_count
        self._store.counts.hits_count += rows.size - misses_count

    def _find(self, ids: I64) -> I64:
        """Return the rows of ids in `_level`, -1 for absent ones. The lock is held."""
        raise NotImplementedError

    def _begin_write(self, rows: I64) -> NDArray[np.bool_]:
        """Return which rows of `_level` have an id, and mark these; -1 has none. The lock is held."""
        raise NotImplementedError

    def _write(self, rows: I64, values: dict[str, torch.Tensor]) -> None:
        """Set marked rows (distinct) of `_level`. The lock is held."""
        raise NotImplementedError

    def _to_mark(self, rows: I64) -> tuple[U8, int] | None:
        """Begin a write of rows of `_level`: mark them, or return the marks to set; -1 is skipped. The lock is held."""
        raise NotImplementedError

    def _found(self, ids: I64, *, insert: bool, admitted: I64 | None) -> I64:
        """Return the rows of ids in `_level`, marked and used with insert. Absent ids get one then, or of them only
        those in `admitted`, distinct; else -1. The lock is held."""
        raise NotImplementedError

    def _known(self, ids: I64) -> NDArray[np.bool_]:
        """Return which of ids have a row. The lock is held."""
        raise NotImplementedError

    def _set(self, ids: I64, values: dict[str, torch.Tensor]) -> None:
        """Set and mark columns of ids, each where its newest row is; the last of equal ids wins. The lock is held."""
        raise NotImplementedError

    def _touch(self, rows: I64) -> None:
        """Mark rows of `_level`. The lock is held."""
        raise NotImplementedError

    def _warn_of_growth(self) -> None:
        """Warn if the rows of a lookup did not fit. Without the lock."""

    def _lookup(self, ids: I64, *, insert: bool, use: UseRows | None = None) -> I64:
        """Find rows, and have them used before the lock is released. Without the lock."""
        if self._candidates is None or not insert:
            rows = self._look_up(ids, insert=insert, admitted=None, use=use)
        else:
            with uninterrupted:
                admitted = self._admitted(ids, self._candidates)
                rows = self._look_up(ids, insert=True, admitted=admitted, use=use)
                if admitted.size:
                    self._candidates.remove(admitted)  # Now that they have rows: a wait for the lock may fail.
        self._warn_of_growth()
        return rows

    def _look_up(self, ids: I64, *, insert: bool, admitted: I64 | None, use: UseRows | None) -> I64:
        with self._lock.hold("lookup"):
            self._begin()
            rows_before = len(self._store)
            rows = self._found(ids, insert=insert, admitted=admitted)
            self._count_lookup(rows, rows_before=rows_before)
            if use is not None:
                use(rows)
        return rows

    def _forget_admitted(self) -> None:
        """Take ids that a load has given a row out of the candidates. Their own load, if any, has ended before."""
        if self._candidates is not None:
            waiting = self._candidates.ids().numpy()
            with self._lock.hold("lookup"):
                known = self._known(waiting)
            self._candidates.remove(waiting[known])

    def _admitted(self, ids: I64, candidates: CandidateTable) -> I64:
        """Count a lookup of the absent ids among ids and return those that get a row now, distinct.

        Holds no lock between the steps: a cut holds the locks of both tables, and took them in any order.
        """
        with self._lock.hold("lookup"):
            absent = np.unique(ids[~self._known(ids)])
        return candidates.add(absent, admit_at=self._admit_after) if absent.size else absent
