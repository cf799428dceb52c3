"""What tables count, for logs: `table.statistics()`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStatistics:
    """What the cache level of a table has done so far, in mentions of ids or in rows.

    paused_seconds: how long training waited for cuts that were deferred past their fence.
    """

    hits_count: int
    misses_count: int
    evictions_count: int
    written_back_count: int
    prefetched_count: int
    cached_count: int
    paused_seconds: float


@dataclass(frozen=True)
class TableStatistics:
    """What a table holds, and what it has done since it was made in this process.

    rows_count = inserted_count - removed_count - evicted_count.

    rows_count      ids that have a row now
    capacity        rows that there is room for (in the host level, if there are two)
    bytes           memory of ids, their index, columns and marks of all levels, used or not, on the host and on devices
    hits_count      ids in lookups that had a row, repeated ones too
    misses_count    ids in lookups that had none: those that got one count once, others as often as they are repeated
    inserted_count  ids that got a row, in lookups, inserts and loads
    removed_count   ids that `remove`, `clear` or a load took away
    evicted_count   ids that `evict` took away
    growths_count   how often the columns moved to larger memory
    cache           of the cache level, None for a table without one
    """

    rows_count: int
    capacity: int
    bytes: int
    hits_count: int
    misses_count: int
    inserted_count: int
    removed_count: int
    evicted_count: int
    growths_count: int
    cache: CacheStatistics | None = None

    @property
    def hit_rate(self) -> float:
        """The part of the ids in lookups that had a row, 0.0 to 1.0; 0.0 before the first lookup."""
        return self.hits_count / max(self.hits_count + self.misses_count, 1)


@dataclass
class RowCounts:
    """What has happened to the rows of a table so far. Changed under the table's lock."""

    hits_count: int = 0
    misses_count: int = 0
    inserted_count: int = 0
    removed_count: int = 0
    evicted_count: int = 0
    growths_count: int = 0
