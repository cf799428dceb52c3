"""The eviction policy of a cache level: how much its rows are used, and which to evict when others need room.

    lru   evict the least recently used row
    lfu   evict the row with the fewest lookups since it was cached; among equals, the least recently used

Time is counted in lookups. Victims are found in advance: now and then the oldest eighth of the cache is put into a
queue, and evictions take rows from it, skipping those that were used since. So the cost of a batch depends on how many
rows it evicts, not on the size of the cache.
"""

from __future__ import annotations

import numpy as np

from asyncckpt.native import I64

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
