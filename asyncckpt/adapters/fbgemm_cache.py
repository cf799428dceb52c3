"""Tables of a TBE behind its device cache (MANAGED_CACHING): cached rows overlay the managed ones.

FBGEMM itself flushes the cache before it saves. That writes to the live table and, if the cache has another dtype than
the table, rounds with random numbers of the training's generator. Here nothing is written: the cut has the managed
rows, and the number and values of each cached row.

- The cache's slots hold linear row numbers over all tables. Each *feature* has the first number of its table, and
  features may share a table: use that of the table's first feature; the end is that plus the table's rows.
- A prefetch moves weights and slots together, in kernels on its own stream. A cut waits for those that are queued, and
  makes later ones wait for its fence, because they write to managed rows. So the cut belongs to the step of the
  weights, however far the prefetch is ahead.
- Optimizer states are not cached.
- Rows of a cache in another dtype than its table are rounded to the nearest value: such a save is deterministic, but a
  row that was in the cache loads as the table can hold it. Quantized tables with a cache are refused.

A load writes the managed rows. Before it begins, it writes back the cached rows of all tables of the TBE and empties
the cache: a stale cached row would win over a loaded one, and columns or rows that are not loaded must keep their
newest values. The cache is empty after the load.

Attributes used, per fbgemm_gpu 1.8.0: lxu_cache_weights `[slots, widest D]`, lxu_cache_state (int64, linear row or -1),
cache_hash_size_cumsum, feature_table_map, prefetch_stream, timesteps_prefetched, reset_cache_states().
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from asyncckpt.adapters.prefetch_stream import follow_prefetch, hold_prefetch_back
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.modules.fixed_table import FixedCut, FixedLoad, FixedTable, LiveColumns, TrackedFixedCut
from asyncckpt.tables.slots import EMBEDDING_COLUMN
from asyncckpt.tables.table_lock import TableLock


class TbeCache:
    """The device cache of one TBE, shared by its tables."""

    def __init__(self, tbe: Any, *, weights: Sequence[torch.Tensor], begins: dict[int, int]) -> None:
        self._tbe = tbe
        self._weights = weights
        self._begins = begins  # Table -> its first linear row number; only tables with a cache.

    @staticmethod
    def of(tbe: Any, *, weights: Sequence[torch.Tensor]) -> TbeCache:
        """Return the cache of a TBE; without one, it holds no table. Raises UnsupportedError for quantized tables."""
        slots = getattr(tbe, "lxu_cache_weights", None)
        if slots is None or not slots.numel():
            return TbeCache(tbe, weights=weights, begins={})
        by_feature = tbe.cache_hash_size_cumsum.tolist()
        features = list(tbe.feature_table_map)
        begins = {}
        for index, rows in enumerate(weights):
            begin = int(by_feature[features.index(index)])
            if begin < 0:
                continue  # Not behind the cache.
            if not rows.dtype.is_floating_point:
                raise UnsupportedError("a cached table of a TBE is quantized", found=rows.dtype)
            begins[index] = begin
        return TbeCache(tbe, weights=weights, begins=begins)

    def holds(self, index: int) -> bool:
        """Return whether a table is behind the cache."""
        return index in self._begins

    def cached_rows(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rows, values) of a table: int64 [k] on the CPU and `[k, D]` in its dtype on the cache's device.

        Copies the part of the cache that belongs to this table. The host waits for the current stream, because it needs
        the row numbers.
        """
        follow_prefetch(self._tbe)
        table, begin = self._weights[index], self._begins[index]
        linear = self._tbe.lxu_cache_state.reshape(-1)
        slots = torch.nonzero((linear >= begin) & (linear < begin + len(table))).reshape(-1)
        values = self._tbe.lxu_cache_weights.index_select(0, slots)[:, : table.shape[1]].to(table.dtype).contiguous()
        return (linear.index_select(0, slots) - begin).cpu(), values

    def check_idle(self) -> None:
        """Raise UsageError if a prefetched batch is still unused: its places in the cache would become wrong."""
        waiting = len(getattr(self._tbe, "timesteps_prefetched", ()))
        if waiting:
            what = "a load into a TBE while prefetched batches wait for their forward"
            raise UsageError(what, found=waiting, expected=0, hint="load before the first prefetch")

    def write_back(self) -> None:
        """Write the cached rows of every table to its managed rows, and empty the cache."""
        with torch.no_grad():
            for index in self._begins:
                rows, values = self.cached_rows(index)
                table = self._weights[index]
                table.index_copy_(0, rows.to(table.device), values.to(table.device))
        self.reset()

    def reset(self) -> None:
        """Empty the cache without writing anything."""
        self._tbe.reset_cache_states()

    def hold_prefetch_back(self) -> None:
        """Make further prefetches, which move rows, wait for the fence of a cut."""
        hold_prefetch_back(self._tbe)


class CachedCut(FixedCut):
    """An OverlaidCut of a CachedTable: the live columns, and a copy of the cached rows until the fence."""

    def __init__(self, table: CachedTable, columns: Mapping[str, torch.Tensor], lock: TableLock) -> None:
        super().__init__(table, columns, lock)
        self._cache = table.cache
        self._rows, self._values = table.cache.cached_rows(table.index)

    @property
    def cache_map(self) -> torch.Tensor:
        """Return the row of each cached row: int64 [k] on the CPU, distinct, without -1."""
        return self._rows

    def cached_column(self, name: str) -> torch.Tensor | None:
        """Return the cached values of `embedding`, `[k, D]` on the cache's device; other columns have no cache."""
        self._check_held(f"cached column {name!r}")
        return self._values if name == EMBEDDING_COLUMN else None

    def fence(self) -> None:
        """Release the table and drop the copy of the cached rows. Idempotent."""
        self._release(self._drop_copy)

    def _drop_copy(self) -> None:
        del self._values
        self._cache.hold_prefetch_back()


class TrackedCachedCut(CachedCut, TrackedFixedCut):
    """A CachedCut that is a TracksRows too; a move between cache and managed rows is not a write."""


class CachedLoad(FixedLoad):
    """A TableLoad of a CachedTable."""

    def __init__(self, table: CachedTable, columns: Mapping[str, torch.Tensor], lock: TableLock) -> None:
        super().__init__(table, columns, lock)
        self._cache = table.cache
        table.cache.write_back()

    def end(self, ok: bool) -> None:
        """Release the table with an empty cache, so that no stale row is read. Idempotent."""
        self._release(self._cache.reset)


class CachedTable(FixedTable):
    """A table of a TBE behind its cache."""

    _cut = CachedCut
    _tracked_cut = TrackedCachedCut
    _load = CachedLoad

    def __init__(self, name: str, live: LiveColumns, *, cache: TbeCache, index: int, **of_fixed: Any) -> None:
        super().__init__(name, live, **of_fixed)
        self.cache = cache
        self.index = index

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str] = ()) -> FixedLoad:
        """Take the table for a load, with an empty cache. Raises UsageError while prefetched batches wait."""
        self.cache.check_idle()
        return super().begin_load(clear=clear, rows_count=rows_count, filled=filled)
