"""What the tables of this package share: rows for ids in a RowStore, and one lock.

Any method may be called from any thread. A call holds the lock while it runs, a cut until its fence, a load until its
end (table_lock.py).

Age, by which rows are evicted, is counted from the newest number of the metadata column itself. So a step that somebody
forgot to set, and a clock that stands still or goes back, make no other row old; but one stamp far ahead makes all
others old. A row that holds the initial value of the column was never stamped, and has no age.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.swa_utils import AveragedModel

from asyncckpt.arguments import check_int
from asyncckpt.errors import UnsupportedError, UsageError, Words, warn
from asyncckpt.model.owned_ids import owned_mask
from asyncckpt.model.table import IdsHeld, TableSchema
from asyncckpt.model.table_shard import Shard
from asyncckpt.native import I64
from asyncckpt.tables.row_store import Level, RowStore
from asyncckpt.tables.table_arguments import IdsLike, check_eviction, flat_ids, one_id
from asyncckpt.tables.table_lock import HashTableCut, HashTableLoad, LockedTable
from asyncckpt.tables.table_statistics import TableStatistics


def is_below(values: torch.Tensor, below: float) -> NDArray[np.bool_]:
    """Return which of values, `[n]` of any dtype and on any device, are below a number: bool [n] on the CPU.

    Exact, also for large integers, which torch would compare as float32 when the bound is a float.
    """
    values = values.detach().cpu()
    if values.is_floating_point():
        found: NDArray[np.bool_] = (values.double() < _as_float(below)).numpy()
        return found
    if values.dtype is torch.bool:
        values = values.to(torch.int8)
    limits = torch.iinfo(values.dtype)
    if below > limits.max:
        return np.ones(len(values), dtype=np.bool_)
    if below <= limits.min:
        return np.zeros(len(values), dtype=np.bool_)
    # An integer is below 2.5 if it is below 3.
    found = (values < math.ceil(below)).numpy()
    return found


def is_unset(values: torch.Tensor, fill: float) -> NDArray[np.bool_]:
    """Return which of values, `[n]`, are the initial value of their column: bool [n] on the CPU."""
    values = values.detach().cpu()
    found: NDArray[np.bool_] = (values == torch.full((), fill, dtype=values.dtype, device="cpu")).numpy()
    return found


def is_older(values: torch.Tensor, age: float, *, fill: float) -> NDArray[np.bool_]:
    """Return which of values, `[n]`, are set, and lower than the newest one by more than an age: bool [n]."""
    values = values.detach().cpu()
    is_set: NDArray[np.bool_] = ~is_unset(values, fill) & torch.isfinite(values).numpy()
    if not is_set.any():
        return is_set
    newest = values[torch.from_numpy(is_set)].max().item()
    # Integers are subtracted as integers: a float has no room for stamps above 2**53.
    is_exact = isinstance(newest, int) and age != math.inf
    older: NDArray[np.bool_] = is_set & is_below(values, newest - (math.floor(age) if is_exact else _as_float(age)))
    return older


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # An int beyond all floats.
        return math.inf if number > 0 else -math.inf


@dataclass(frozen=True)
class TableValue:
    """A table by value: arguments of its constructor, its ids, and copies of their rows in every column but `id`."""

    arguments: Mapping[str, Any]
    ids: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    candidates: StoredTable | None = None


class StoredTable(LockedTable):
    """A table whose ids have rows in a RowStore.

    copy.deepcopy, pickle and torch.save take it by value: all rows are copied, twice for pickle, while the lock is
    held; a checkpoint is the cheap way. The copy has the ids, rows, arguments and device, and not the row numbers,
    marks, or attributes of a subclass. torch.load needs weights_only=False for it.
    """

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

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTable:
        _check_not_averaged(self._name)
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        value = self.__getstate__()
        made.__setstate__(replace(value, arguments=deepcopy(value.arguments, memo)))
        return made

    def __getstate__(self) -> TableValue:
        with self._lock.hold("reading"):
            self._begin()
            ids, columns = self._read_all()
            return TableValue(self._arguments(), torch.from_numpy(ids), columns)

    def __setstate__(self, value: TableValue) -> None:
        self._make_again(value.arguments)
        ids = value.ids.numpy()
        self._store.reserve(ids.size)
        self._store.write(self._store.insert(ids, filled=value.columns), value.columns)

    def shrink(self) -> int:
        """Give back the memory of rows that are free, after many ids were removed; return how many bytes of columns.

        Ids get other rows, the capacity is the number of ids, and the next save copies all of them. Call it where the
        table trains, between two steps: rows of lookups before are not valid after it. A cut that is deferred is waited
        for. The cache of a MultiLevelTable keeps its size, and is empty.
        """
        with self._lock.hold("shrinking"):
            self._begin()
            bytes = self._bytes()
            self._empty_cache()
            self._store.shrink()
            return bytes - self._bytes()

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

    def evict(self, column: str, *, below: float | None = None, older_than: float | None = None) -> int:
        """Remove the ids whose newest number in a metadata column (row shape ()) is too low; return how many.

        below       lower than this: `evict("count", below=3)`
        older_than  lower than the newest number of the column by more than this: `evict("last_seen", older_than=1000)`,
                    in steps, seconds or whatever is stamped. Ids that were never stamped, which have the column's
                    initial value, stay

        HashEmbedding keeps `last_seen` and `count`. Raises UsageError; also for a bound that is above all ids of a
        column that nobody has written: use `clear` to remove all.
        """
        check_eviction(self._schema, column, below, older_than, table=self._name)
        with self._lock.hold("eviction"):
            self._begin()
            ids, values = self._read_all(only=column)
            numbers = values[column]
            fill = self._store.fills[column]
            if older_than is not None:
                expired = is_older(numbers, older_than, fill=fill)
            else:
                assert below is not None
                expired = is_below(numbers, below)
                if ids.size and expired.all() and is_unset(numbers, fill).all():
                    what = f"eviction from table {self._name!r} would remove all ids, by a column nobody has written"
                    hint = "set the step of the modules that stamp it, or remove all ids by clear()"
                    raise UsageError(what, found=Words(f"{column!r} is {fill} everywhere"), hint=hint)
            evicted_count = self._remove(ids[expired])
            self._store.counts.removed_count -= evicted_count
            self._store.counts.evicted_count += evicted_count
            return evicted_count

    def clear(self) -> None:
        """Remove all ids; the capacity stays."""
        with self._lock.hold("clear"):
            self._store.clear()

    def statistics(self) -> TableStatistics:
        """Return what the table holds, and what it has done so far."""
        with self._lock.hold("listing"):
            return self._statistics()

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
            self._store.watchers.storage_moves()  # The load writes rows without asking them.
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

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of the constructor for a table like this one."""
        return {"name": self._name, "shard": self._shard, "replicated": self._replicated}

    def _make_again(self, arguments: Mapping[str, Any]) -> None:
        """Call the constructor of the class of this package on a table that is not yet made."""
        raise NotImplementedError

    def _read_all(self, *, only: str | None = None) -> tuple[I64, dict[str, torch.Tensor]]:
        """Return copies of all ids, and of their newest rows in every column but `id`, or in one only."""
        return self._store.read_all(only=only)

    def _statistics(self) -> TableStatistics:
        counts = asdict(self._store.counts)
        return TableStatistics(rows_count=len(self), capacity=self.capacity, bytes=self._bytes(), **counts)

    def _bytes(self) -> int:
        return sum(level.bytes() for level in self._levels_in_use())

    def _remove(self, ids: I64) -> int:
        return self._store.remove(ids)

    def _new_cut(self) -> HashTableCut:
        return HashTableCut(self._name, store=self._store, lock=self._lock, on_lost=self._warn_of_others)

    def _levels_in_use(self) -> tuple[Level, ...]:
        return (self._store,)

    def _empty_cache(self, *, write_back: bool = True) -> None:
        """Free all rows of a cache, with or without writing them back to the store."""

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


def _check_not_averaged(table: str) -> None:
    """Refuse to be copied into torch's AveragedModel: it averages parameters, and its copy would stay as it is now."""
    frame = sys._getframe()
    while (back := frame.f_back) is not None:
        frame = back
        if frame.f_code is AveragedModel.__init__.__code__:
            raise UnsupportedError(
                f"table {table!r} cannot be averaged: AveragedModel averages parameters, which rows of tables are not",
                hint="average the modules without tables: AveragedModel(model.dense)",
            )
