"""MultiLevelTable: a small cache level on any device over a host level that holds every id.

Training sees the cache: `lookup` brings the rows of a batch into it and returns cache rows, which index `embedding`
and `slot(name)`. Evicted rows are written back to the host level, all columns. What a lookup returned is valid until
the next lookup, insert, remove, evict, clear or load on the table; a prefetch never moves the rows of the latest
lookup. So modules and optimizers find their ids again whenever they need rows, in the hold of the lock in which they
use them. `read` and evaluation move nothing.

Threads: see stored_table.py. The cache map and the cache rows change together under the lock, so a cut reads the map of
the same step as its weights, even if prefetches for later steps have moved rows. No history of maps is needed (compare
RecSDK, whose map runs ahead of the weights). Callers keep in-place updates of rows apart from a cut: the training
thread makes the cut, or waits while another thread does; `update` and `rows` wait by themselves. While a cut is
deferred past its fence, growth of the host level, `clear` and loads wait until its rows are exported.

With the cache on a CUDA device, calls queue their work on the current stream, after the work of the previous call on
whatever stream that used: a prefetch may have a stream of its own. Rows go through pinned memory, and evicted rows
reach the host level at the beginning of the next call. So a call or cut waits for ids that are on a device, and, if the
previous call evicted rows, until the device has reached that call.

Sources of the interface: HashTable; RecSDK's embedding cache (prefetch, admission), HierarchicalKV (policies).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.arguments import check_choice, check_int, check_type
from asyncckpt.errors import warn
from asyncckpt.model.table_shard import Shard
from asyncckpt.native import I64
from asyncckpt.tables.cache_level import POLICIES, CacheLevel
from asyncckpt.tables.candidates import CANDIDATES_MAX
from asyncckpt.tables.initializer import Initializer
from asyncckpt.tables.levels import Levels
from asyncckpt.tables.multi_level_cut import MultiLevelCut
from asyncckpt.tables.pinned_host import pinned_levels
from asyncckpt.tables.row_device import row_device, selected
from asyncckpt.tables.row_store import Level
from asyncckpt.tables.slots import SlotSpec, table_layout
from asyncckpt.tables.table_arguments import IdsLike, checked_device, flat_ids, last_mentions
from asyncckpt.tables.table_statistics import CacheStatistics, TableStatistics
from asyncckpt.tables.trained_table import TrainedTable


class MultiLevelTable(TrainedTable):
    """A table that need not fit its device, and that a Saver can save while training goes on. Implements `Table`.

    cache_rows      rows of the cache level, on `device`. A batch with more distinct ids makes it grow, with one warning
    policy          which rows leave the cache: "lru" (longest unused) or "lfu" (least often used since they came)
    capacity        rows of the host level to begin with; it grows
    undo_bytes_max  bound of the memory that one deferred cut takes for old values of rows; training waits beyond it
    pin_host_memory put the host level into pinned memory, from which a CUDA device gathers rows itself; else the host
                    gathers them. All of `capacity` is then backed by memory at once, and growing waits for the device:
                    set `capacity` high enough from the beginning

    The other arguments are those of HashTable. Raises UsageError for wrong arguments, UnsupportedError for a dtype that
    tables cannot hold or if there is no CUDA for what needs it, DeviceError for memory that the system does not pin.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        cache_rows: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        optimizer_slots: Mapping[str, SlotSpec] | None = None,
        metadata: Mapping[str, SlotSpec] | None = None,
        shard: Shard = (0, 1),
        replicated: bool = False,
        capacity: int = 1024,
        initializer: Initializer = None,
        policy: Literal["lru", "lfu"] = "lru",
        admit_after: int = 1,
        candidates_max: int = CANDIDATES_MAX,
        undo_bytes_max: int = 256 << 20,
        pin_host_memory: bool = False,
    ) -> None:
        layout = table_layout(dim, dtype=dtype, optimizer_slots=optimizer_slots, metadata=metadata)
        counts = {"cache_rows": cache_rows, "undo_bytes_max": undo_bytes_max}
        for what, count in counts.items():
            check_int(f"{what} of table {name!r}", count, at_least=1)
        check_choice(f"policy of table {name!r}", policy, POLICIES)
        check_type("pin_host_memory", pin_host_memory, bool)
        self._undo_bytes_max = undo_bytes_max
        self._pins_host_memory = pin_host_memory
        cache_device = checked_device(name, device)
        place, host = pinned_levels(name, cache_device) if pin_host_memory else (row_device(cache_device), None)
        super().__init__(
            name,
            layout,
            shard=shard,
            replicated=replicated,
            capacity=capacity,
            initializer=initializer,
            place=host,
            admit_after=admit_after,
            candidates_max=candidates_max,
        )
        self._cache = self._level = CacheLevel(layout.schema, rows=cache_rows, place=place, policy=policy)
        self._levels = Levels(self._store, self._cache)
        self._cache_rows_wished = cache_rows
        self._growth_warned = False
        self._paused_seconds = 0.0

    @property
    def cache_rows(self) -> int:
        """How many rows the cache level has room for now; the rows that a lookup returns are below it."""
        return self._cache.capacity

    def __repr__(self) -> str:
        where = f"cache_rows={self.cache_rows}, device={str(self.device)!r}"
        return f"MultiLevelTable({self._name!r}, dim={self.dim}, rows={len(self)}, {where}, shard={self._shard})"

    def prefetch(self, ids: IdsLike) -> int:
        """Bring rows of known ids (int64, any shape) into the cache for a coming batch; return how many came.

        A hint: it changes no value, gives no id a row and counts nothing. Rows that an earlier prefetch brought stay
        until a lookup has used them, at most for 256 lookups, so it may run several batches ahead; it stops when no
        other row can be evicted. It may run on another thread while training uses looked-up rows. Raises UsageError.
        """
        flat = flat_ids(ids, table=self._name)
        with self._lock.hold("prefetch"):
            self._begin()
            return self._levels.prefetch(flat)

    def reserve(self, rows: int) -> None:
        """Make room in the host level for `rows` rows in all, so that it need not grow. Raises UsageError."""
        check_int(f"rows of a reservation of table {self._name!r}", rows, at_least=0)
        with self._lock.hold("reservation"):
            self._begin()
            self._store.reserve(rows)

    def _arguments(self) -> dict[str, Any]:
        return {
            **super()._arguments(),
            "cache_rows": self.cache_rows,
            "policy": self._cache.use.policy,
            "undo_bytes_max": self._undo_bytes_max,
            "pin_host_memory": self._pins_host_memory,
        }

    def _make_again(self, arguments: Mapping[str, Any]) -> None:
        MultiLevelTable.__init__(self, **arguments)

    def _read_all(self, *, only: str | None = None) -> tuple[I64, dict[str, torch.Tensor]]:
        return self._levels.read_all(only=only)

    def _statistics(self) -> TableStatistics:
        cached_count = self._cache.capacity - self._cache.free_count
        counts = asdict(self._levels.counts)
        cache = CacheStatistics(**counts, cached_count=cached_count, paused_seconds=self._paused_seconds)
        return replace(super()._statistics(), cache=cache)

    def _begin(self) -> None:
        self._levels.begin()

    def _found(self, ids: I64, *, insert: bool, admitted: I64 | None) -> I64:
        return self._levels.lookup(ids, insert=insert, admitted=admitted)

    def _known(self, ids: I64) -> NDArray[np.bool_]:
        return self._levels.known(ids)

    def _set(self, ids: I64, values: dict[str, torch.Tensor]) -> None:
        order = last_mentions(ids)
        self._levels.insert(ids[order], selected(values, order))

    def _newest(self, ids: I64, *, only: str | None) -> tuple[dict[str, torch.Tensor], I64]:
        return self._levels.read(ids, only=only)

    def _touch(self, rows: I64) -> None:
        self._levels.touch(rows)

    def _find(self, ids: I64) -> I64:
        return self._levels.lookup(ids, insert=False, admitted=None)

    def _begin_write(self, rows: I64) -> NDArray[np.bool_]:
        self._levels.touch(rows)
        used: NDArray[np.bool_] = (rows >= 0) & (self._cache.host_rows[rows] >= 0)
        return used

    def _to_mark(self, rows: I64) -> None:
        self._levels.touch(rows)  # Marks belong to host rows.

    def _write(self, rows: I64, values: dict[str, torch.Tensor]) -> None:
        self._cache.write(rows, values)

    def _levels_in_use(self) -> tuple[Level, ...]:
        return (self._store, self._cache)

    def _remove(self, ids: I64) -> int:
        return self._levels.remove(ids)

    def _new_cut(self) -> MultiLevelCut:
        return MultiLevelCut(
            self._name,
            store=self._store,
            cache=self._cache,
            lock=self._lock,
            undo_bytes_max=self._undo_bytes_max,
            on_pause=self._add_pause,
            on_lost=self._warn_of_others,
        )

    def _empty_cache(self, *, write_back: bool = True) -> None:
        self._levels.empty_cache(write_back=write_back)

    def _prepare_load(self, *, clear: bool) -> None:
        self._empty_cache(write_back=not clear)

    def _warn_of_growth(self) -> None:
        # Outside the lock, after the work is done: a program may turn warnings into errors.
        if self._growth_warned or self._cache.capacity == self._cache_rows_wished:
            return
        self._growth_warned = True
        what = f"cache of table {self._name!r} grew from {self._cache_rows_wished} to {self._cache.capacity} rows"
        warn(f"{what}: a batch has more distinct ids (raise cache_rows)", RuntimeWarning)

    def _add_pause(self, seconds: float) -> None:
        self._paused_seconds += seconds
