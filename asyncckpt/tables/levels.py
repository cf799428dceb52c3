"""Both levels of a multi-level table, and the moves of rows between them. Callers hold the table's lock.

    host    RowStore on the CPU: every id has a row here
    cache   CacheLevel on any device: the newest values of the ids that are in it; their host rows are stale

Training may write cache rows in place, unseen by the table, so every evicted row is written back, all columns. A
write-back from a device takes until the device has executed it. So rows that one call evicts reach the host rows at the
beginning of the next call, and no call waits for the rows that it evicts itself. Between calls the lock is free while
they may be on their way, so a cut and a load begin with `begin` like every other call.

Marks belong to host rows: a row is marked when it is looked up for writing or is written, in either level, and not when
it moves between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.native import I64
from asyncckpt.tables.cache_level import CacheLevel
from asyncckpt.tables.row_device import Landing, selected
from asyncckpt.tables.row_store import RowStore

Mask = NDArray[np.bool_]

# A cache that is too small for a batch grows by this fraction more than the batch needs: the next may be larger.
GROWTH_SHARE = 8


@dataclass
class LevelCounts:
    """What has happened so far, in ids or rows."""

    hits_count: int = 0
    misses_count: int = 0
    evictions_count: int = 0
    written_back_count: int = 0
    prefetched_count: int = 0


class Levels:
    """A host level and the cache over it."""

    def __init__(self, store: RowStore, cache: CacheLevel) -> None:
        self.store = store
        self.cache = cache
        self.counts = LevelCounts()
        self._landings: list[tuple[I64, Landing]] = []  # Host rows, and their evicted values on the way.

    def begin(self) -> None:
        """Begin a call: order it after the work of earlier ones, and write back the rows that those evicted.

        Waits for the device if an earlier call has evicted rows, until it has executed that call.
        """
        self.cache.place.follow()
        self._land()

    def lookup(self, ids: I64, *, insert: bool, admitted: I64 | None) -> I64:
        """Bring ids into the cache and return their cache rows, -1 for absent ids that get no row.

        insert: absent ids get a row; if `admitted` (distinct ids) is given, only these. Marks all returned rows.
        """
        cache = self.cache
        cache.use.begin_lookup()
        rows = cache.find(ids)
        missed = rows < 0
        hits = rows[~missed] if missed.any() else rows
        self.counts.hits_count += hits.size
        self.counts.misses_count += ids.size - hits.size
        cache.use.touch(hits)
        if hits.size < ids.size:
            self._bring_missed(np.unique(ids[missed]), hits, insert=insert, admitted=admitted)
            rows[missed] = cache.find(ids[missed])
            brought = rows[missed]
            cache.use.touch(brought[brought >= 0])
        if insert:
            self.touch(rows)
        return rows

    def touch(self, rows: I64) -> None:
        """Mark cache rows, int64 [n], as written; skip -1 and free rows."""
        host_rows = self.cache.host_rows[rows]
        # NumPy reads row -1 as the last one.
        host_rows[rows < 0] = -1
        self.store.marks.mark(host_rows)

    def prefetch(self, ids: I64) -> int:
        """Bring known ids into the cache while there is room, and return how many came."""
        rows = self.cache.find(ids)
        cached = rows >= 0
        self.cache.use.await_rows(rows[cached])
        missing = np.unique(ids[~cached])
        host_rows = self.store.find(missing)
        missing, host_rows = missing[host_rows >= 0], host_rows[host_rows >= 0]
        room = self._make_room(missing.size, awaited_too=False)
        self.cache.put(missing[:room], host_rows[:room], self.store.columns(), awaited=True)
        brought_count = min(room, missing.size)
        self.counts.prefetched_count += brought_count
        return brought_count

    def insert(self, ids: I64, values: Mapping[str, torch.Tensor]) -> None:
        """Set columns of ids (distinct) in the level where each of them is; absent ids get a host row."""
        rows = self.cache.find(ids)
        outside, inside = np.flatnonzero(rows < 0), np.flatnonzero(rows >= 0)
        if outside.size:
            self.store.write(self.store.insert(ids[outside]), selected(values, outside))
        if inside.size:
            self.write_cached(rows[inside], selected(values, inside))

    def write_cached(self, rows: I64, values: Mapping[str, torch.Tensor]) -> None:
        """Set and mark used cache rows (distinct)."""
        self.touch(rows)
        self.cache.write(rows, values)

    def remove(self, ids: I64) -> int:
        """Remove ids and return how many of them were there."""
        rows = self.cache.find(ids)
        removed_count = self.store.remove(ids)
        self.cache.drop(np.unique(rows[rows >= 0]))
        return removed_count

    def read(self, ids: I64, *, only: str | None) -> tuple[dict[str, torch.Tensor], I64]:
        """Return the newest rows of those ids that have one, and for which positions in ids; nothing moves.

        At the place of the cache. First those of cached rows.
        """
        rows = self.cache.find(ids)
        inside, outside = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
        host_rows = self.store.find(ids[outside])
        outside, host_rows = outside[host_rows >= 0], host_rows[host_rows >= 0]
        values = self.cache.read(rows[inside], only=only)
        if outside.size:
            stored = self.store.read(host_rows, only=only)
            values = {
                name: torch.cat([value, self.cache.place.to_device(stored[name])]) for name, value in values.items()
            }
        return values, np.concatenate([inside, outside])

    def known(self, ids: I64) -> Mask:
        """Return which of ids have a row."""
        known: Mask = self.cache.find(ids) >= 0
        outside = ~known
        known[outside] = self.store.find(ids[outside]) >= 0
        return known

    def read_all(self, *, only: str | None = None) -> tuple[I64, dict[str, torch.Tensor]]:
        """Return all ids, and their newest rows on the host, in every column but `id` or in one only; nothing moves."""
        ids, values = self.store.read_all(only=only)
        cached = self.cache.used_rows()
        if cached.size:
            # Every cached id has a host row, so it is found among them.
            places = torch.from_numpy(np.searchsorted(self.store.rows(), self.cache.host_rows[cached]))
            for name, newest in self.cache.begin_to_host(cached, only=only).wait().items():
                values[name].index_copy_(0, places, newest)
        return ids, values

    def empty_cache(self, *, write_back: bool) -> None:
        """Free all cache rows, with or without writing them back to their host rows."""
        if write_back:
            self._write_back(self.cache.used_rows())
            self._land()
        self.cache.clear()

    def _bring_missed(self, missing: I64, hits: I64, *, insert: bool, admitted: I64 | None) -> None:
        host_rows = self.store.find(missing)
        if insert:
            absent = host_rows < 0
            if admitted is not None:
                absent &= np.isin(missing, admitted)
            if absent.any():
                host_rows[absent] = self.store.insert(missing[absent])
        missing, host_rows = missing[host_rows >= 0], host_rows[host_rows >= 0]
        # A hit may be mentioned several times; count distinct ones only if it matters.
        if missing.size + hits.size > self.cache.capacity:
            needed = missing.size + np.unique(hits).size
            if needed > self.cache.capacity:
                self.cache.grow(needed + needed // GROWTH_SHARE)
        room = self._make_room(missing.size, awaited_too=True)
        assert room >= missing.size
        self.cache.put(missing, host_rows, self.store.columns(), awaited=False)

    def _make_room(self, count: int, *, awaited_too: bool) -> int:
        """Evict until `count` rows are free or no other row may be evicted; return how many are free."""
        while self.cache.free_count < count:
            short = count - self.cache.free_count
            victims = self.cache.use.victims(short, used=self.cache.host_rows, awaited_too=False)
            if awaited_too and not victims.size:
                victims = self.cache.use.victims(short, used=self.cache.host_rows, awaited_too=True)
            if not victims.size:
                break
            self._write_back(victims)
            self.cache.drop(victims)
            self.counts.evictions_count += victims.size
        return self.cache.free_count

    def _write_back(self, rows: I64) -> None:
        """Write rows back to their host rows: now, or at the next `begin` if the cache is on a device."""
        host_rows = self.cache.host_rows[rows]
        if self.cache.place.is_host:
            self.store.take_rows(host_rows, self.cache.columns(), rows)
        elif rows.size:
            self._landings.append((host_rows, self.cache.begin_to_host(rows)))
        self.counts.written_back_count += rows.size

    def _land(self) -> None:
        while self._landings:
            host_rows, landing = self._landings[0]
            self.store.take_rows(host_rows, landing.wait(), np.arange(host_rows.size, dtype=np.int64))
            # Only now: if the write-back fails, the rows must not be lost.
            del self._landings[0]
