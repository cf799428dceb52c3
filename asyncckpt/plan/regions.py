"""Where the columns of tables lie in an arena: a region of whole pages for each, with room to grow.

In an arena that keeps its regions from save to save, a row stays at its place, so that a later snapshot copies only
what was written since. The room behind the rows of a column goes to those tables that have grown most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.model.block import REMOVED_COLUMN
from asyncckpt.model.table import TableSchema
from asyncckpt.native import paged
from asyncckpt.options import HEADROOM_BYTES_MAX

ID_BYTES = 8
# What a table gets of the headroom: its bytes, and as much again for every 1/64 of them that it grew lately.
GROWTH_WEIGHT = 64
# One Saver has one set of tables, or two, when some are deferred only where memory is short.
LAYOUTS_MAX = 4
SCHEMAS_MAX = 10_000


@dataclass(frozen=True)
class ColumnRegion:
    """One column: its first row is at `offset` of the arena, a page."""

    offset: int
    row_bytes: int


@dataclass(frozen=True)
class TableRegion:
    """One table, number `table` of the cuts: at most rows_max rows fit. `removed`: room for the ids a delta removes."""

    table: int
    name: str
    rows_max: int
    columns: Mapping[str, ColumnRegion]
    removed: ColumnRegion | None = None

    def column(self, name: str) -> ColumnRegion:
        if name == REMOVED_COLUMN:
            assert self.removed is not None
            return self.removed
        return self.columns[name]


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of a save, from the beginning of the arena."""

    tables: tuple[TableRegion, ...]
    bytes: int


@dataclass(frozen=True)
class RegionWish:
    """What a table needs: room for rows_count rows, and for removed_count ids."""

    table: int
    name: str
    schema: TableSchema
    rows_count: int
    removed_count: int = 0


@lru_cache(maxsize=SCHEMAS_MAX)
def column_row_bytes(schema: TableSchema) -> Mapping[str, int]:
    """Bytes of one row of every column."""
    found = {}
    for column in schema.columns:
        stored = stored_dtype(column.dtype, owner=column.name)
        found[column.name] = math.prod(stored.stored_shape((1, *column.row_shape))) * stored.stored_itemsize
    return found


def row_bytes_of(schema: TableSchema) -> int:
    """Bytes of one row of all columns."""
    return sum(column_row_bytes(schema).values())


class RegionCache:
    """Plans the regions of full saves, and keeps them as long as all rows fit; for each set of tables that is saved."""

    def __init__(self) -> None:
        self._kept: dict[object, tuple[Regions, tuple[int, ...]]] = {}  # And how many rows there were then.

    def regions(self, wishes: Sequence[RegionWish]) -> Regions:
        """Regions with room for all wishes, and some more."""
        facts = tuple((wish.table, wish.name, wish.schema) for wish in wishes)
        rows = tuple(wish.rows_count for wish in wishes)
        kept, rows_then = self._kept.get(facts, (None, rows))
        if kept is not None and all(count <= table.rows_max for count, table in zip(rows, kept.tables, strict=True)):
            return kept
        if kept is None and len(self._kept) >= LAYOUTS_MAX:
            self._kept.clear()
        grown = [max(0, count - then) for count, then in zip(rows, rows_then, strict=True)]
        regions = plan_regions(wishes, room=_headroom(wishes, grown))
        self._kept[facts] = regions, rows
        return regions

    def layouts(self) -> list[Regions]:
        """All that are kept."""
        return [regions for regions, _ in self._kept.values()]


def plan_regions(wishes: Sequence[RegionWish], *, room: Sequence[int] | None = None) -> Regions:
    """Put the tables one behind the other; `room` is how many rows more than wished each gets."""
    at = 0
    tables = []
    for number, wish in enumerate(wishes):
        rows_max = wish.rows_count + (0 if room is None else room[number])
        columns = {}
        for name, row_bytes in column_row_bytes(wish.schema).items():
            columns[name] = ColumnRegion(offset=at, row_bytes=row_bytes)
            at += paged(rows_max * row_bytes)
        removed = ColumnRegion(offset=at, row_bytes=ID_BYTES) if wish.removed_count else None
        at += paged(wish.removed_count * ID_BYTES)
        tables.append(
            TableRegion(table=wish.table, name=wish.name, rows_max=rows_max, columns=columns, removed=removed)
        )
    return Regions(tables=tuple(tables), bytes=at)


def _headroom(wishes: Sequence[RegionWish], grown: Sequence[int]) -> list[int]:
    """Rows of room for each table: an eighth of all bytes, at most HEADROOM_BYTES_MAX, by size and growth."""
    sizes = [row_bytes_of(wish.schema) for wish in wishes]
    total = sum(wish.rows_count * size for wish, size in zip(wishes, sizes, strict=True))
    weights = [
        size * (wish.rows_count + GROWTH_WEIGHT * more) for wish, size, more in zip(wishes, sizes, grown, strict=True)
    ]
    share = min(total // 8, HEADROOM_BYTES_MAX) / max(1, sum(weights))
    return [int(weight * share) // max(1, size) for size, weight in zip(sizes, weights, strict=True)]
