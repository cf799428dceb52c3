"""The cache level of a multi-level table: which ids are cached where, and their rows in every column but `id`.

Callers hold the table's lock and have called `follow` of its place. The invariants:
1. The rows of the id map are the cache rows. It assigns the row that was freed last, else the next one, and callers
   make room first. So a used row is always below `capacity`.
2. A cache row holds the host row `host_rows[row]`, or nothing if that is -1; no host row is in two cache rows.
3. Map and rows change in one call, so a reader that holds the lock sees both of the same step.

The eviction policy says how much rows are used, and which to evict when others need room:

    lru   evict the least recently used row
    lfu   evict the row with the fewest lookups since it was cached; among equals, the least recently used

Time is counted in lookups. Victims are found in advance: now and then the oldest eighth of the cache is put into a
queue, and evictions take rows from it, skipping those that were used since. So the cost of a batch depends on how many
rows it evicts, not on the size of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from asyncckpt.model.table import TableSchema
from asyncckpt.native import I64
from asyncckpt.tables.row_device import Landing, RowDevice
from asyncckpt.tables.row_store import Level

POLICIES = ("lru", "lfu")
# A refill queues this fraction of the cache, or as many rows as are needed if that is more.
QUEUE_SHARE = 8
# How many queued rows are checked at a time.
QUEUE_SLICE_ROWS = 1024
# For lfu, one number orders rows by lookups and then by time; 2**40 lookups take longer than any training.
TICK_BITS = 40
HITS_MAX = (1 << (63 - TICK_BITS)) - 1
# A row that a prefetch brought may go at this lookup after it, if none has used it: its batch was skipped. Modules and
# optimizers look a batch up a few times, so this is some fifty batches ahead.
AWAITED_LOOKUPS_MAX = 256


class CacheUse:
    """Use of `rows` cache rows. Callers hold the table's lock.

    `ticks` is the last lookup that used a row, `hits` how many lookups did since it was cached. A row that a
    prefetch cached or found is kept until the lookup `awaited_until`; 0 for one that no prefetch has asked for since.
    """

    def __init__(self, rows: int, *, policy: str) -> None:
        assert policy in POLICIES
        self.policy = policy
        self.tick = 0
        self.ticks: I64 = np.zeros(rows, dtype=np.int64)
        self.hits: I64 = np.zeros(rows, dtype=np.int64)
        self.awaited_until: I64 = np.zeros(rows, dtype=np.int64)
        self._empty_queue()

    def begin_lookup(self) -> None:
        """Begin a lookup: rows that it touches cannot be evicted until the next one begins."""
        self.tick += 1

    def touch(self, rows: I64) -> None:
        """Count rows as used by this lookup; a row that is mentioned several times counts once."""
        self.ticks[rows] = self.tick
        self.hits[rows] += 1
        self.awaited_until[rows] = 0

    def await_rows(self, rows: I64) -> None:
        """Keep rows for a coming lookup."""
        self.awaited_until[rows] = self.tick + AWAITED_LOOKUPS_MAX

    def begin_rows(self, rows: I64, *, awaited: bool) -> None:
        """Start the counts of rows that have just been cached."""
        self.ticks[rows] = self.tick
        self.hits[rows] = 0
        self.awaited_until[rows] = self.tick + AWAITED_LOOKUPS_MAX if awaited else 0

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows in all."""
        more = rows - len(self.ticks)
        self.ticks = np.concatenate([self.ticks, np.zeros(more, dtype=np.int64)])
        self.hits = np.concatenate([self.hits, np.zeros(more, dtype=np.int64)])
        self.awaited_until = np.concatenate([self.awaited_until, np.zeros(more, dtype=np.int64)])

    def clear(self) -> None:
        """Forget all use."""
        self.awaited_until[:] = 0
        self._empty_queue()

    def victims(self, count: int, *, used: I64, awaited_too: bool) -> I64:
        """Return up to `count` rows, which must be evicted before the next call; none if no row may be evicted.

        used: the host row of every cache row, -1 for a free one. Rows of the latest lookup are never returned, rows
        that a prefetch brought for a coming lookup only with awaited_too.
        """
        rows = self._from_queue(count, used=used, awaited_too=awaited_too)
        if not rows.size:
            self._refill(count, used=used, awaited_too=awaited_too)
            rows = self._from_queue(count, used=used, awaited_too=awaited_too)
        return rows

    def _from_queue(self, count: int, *, used: I64, awaited_too: bool) -> I64:
        found: list[I64] = []
        while count and self._queue_at < self._queue.size:
            part = slice(self._queue_at, self._queue_at + max(count, QUEUE_SLICE_ROWS))
            rows = self._queue[part]
            # A row that was looked up, or evicted and cached again, has another tick than when it was queued.
            good = (used[rows] >= 0) & (self.ticks[rows] == self._queue_ticks[part])
            if not awaited_too:
                good &= self.awaited_until[rows] <= self.tick
            taken = np.flatnonzero(good)[:count]
            # The slice may hold more for the next call after the last row that is taken.
            self._queue_at += int(taken[-1]) + 1 if taken.size == count else rows.size
            count -= taken.size
            found.append(rows[taken])
        return np.concatenate(found) if found else _no_rows()

    def _refill(self, count: int, *, used: I64, awaited_too: bool) -> None:
        free_to_go = (used >= 0) & (self.ticks != self.tick)
        if not awaited_too:
            free_to_go &= self.awaited_until <= self.tick
        rows = np.flatnonzero(free_to_go)
        keys = self._keys(rows)
        wanted = max(count, used.size // QUEUE_SHARE)
        if wanted < rows.size:
            oldest = np.argpartition(keys, wanted)[:wanted]
            rows, keys = rows[oldest], keys[oldest]
        self._queue = rows[np.argsort(keys)]
        self._queue_ticks = self.ticks[self._queue]
        self._queue_at = 0

    def _keys(self, rows: I64) -> I64:
        ticks = self.ticks[rows]
        if self.policy == "lru":
            return ticks
        return (np.minimum(self.hits[rows], HITS_MAX) << TICK_BITS) + ticks

    def _empty_queue(self) -> None:
        self._queue, self._queue_ticks, self._queue_at = _no_rows(), _no_rows(), 0


def _no_rows() -> I64:
    return np.empty(0, dtype=np.int64)


class CacheLevel(Level):
    """`rows` rows of every column but `id`; fully associative."""

    def __init__(self, schema: TableSchema, *, rows: int, place: RowDevice, policy: str) -> None:
        super().__init__(schema, rows=rows, place=place)
        self.host_rows: I64 = np.full(rows, -1, dtype=np.int64)
        self.use = CacheUse(rows, policy=policy)

    @property
    def free_count(self) -> int:
        """How many of the rows are free."""
        return self.capacity - len(self._ids)

    def used_rows(self) -> I64:
        """Return the used rows, ascending."""
        return np.flatnonzero(self.host_rows >= 0)

    def put(self, ids: I64, host_rows: I64, host: Mapping[str, torch.Tensor], *, awaited: bool) -> None:
        """Cache ids (distinct, not cached) with host_rows of the host's columns; there must be room."""
        if not ids.size:
            return
        assert ids.size <= self.free_count
        rows, new_rows = self._ids.insert(ids)
        assert new_rows.size == ids.size
        try:
            self.take_rows(rows, host, host_rows)
        except BaseException:  # For example, a device without memory.
            self._ids.remove(ids)
            raise
        self.host_rows[rows] = host_rows
        self.use.begin_rows(rows, awaited=awaited)

    def begin_to_host(self, rows: I64, *, only: str | None = None) -> Landing:
        """Begin to copy rows of every column, or of one only, to the host; the rows may change when this returns."""
        return self.place.begin_to_host(self.read(rows, only=only))

    def drop(self, rows: I64) -> None:
        """Free used rows (distinct)."""
        if rows.size:
            self._ids.remove(self._ids.ids_by_row()[rows])
            self.host_rows[rows] = -1
            self.use.awaited_until[rows] = 0

    def clear(self) -> None:
        """Free all rows."""
        self._ids.clear()
        self.host_rows[:] = -1
        self.use.clear()

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows in all; used rows keep their numbers, the tensors move."""
        old_count = self.capacity
        assert rows > old_count
        self._grow_columns(rows, used_count=old_count)
        self.host_rows = np.concatenate([self.host_rows, np.full(rows - old_count, -1, dtype=np.int64)])
        self.use.grow(rows)
