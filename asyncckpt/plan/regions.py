"""Tables in an arena: a region of whole pages for each column, with room to grow; what a save captures in them, and
the shard files of that.

In an arena that keeps its regions from save to save, a row stays at its place, so that a later snapshot copies only
what was written since. The room after the rows of a column goes to those tables that have grown most. The files are
planned after the fence, when the rows are known (RegionFilesCache).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from asyncckpt.errors import UsageError
from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.format.tree import check_name
from asyncckpt.model.block import REMOVED_COLUMN, BlockSpec, TableFacts
from asyncckpt.model.row_places import RowPlaces
from asyncckpt.model.table import CutVersion, Role, TableSchema
from asyncckpt.model.table_shard import Shard, slice_info
from asyncckpt.native import I64, paged
from asyncckpt.options import HEADROOM_BYTES_MAX
from asyncckpt.plan.image import ImagePlan, array_spec, plan_apart, rows_on_pages, split_rows

ID_BYTES = 8
# What a table gets of the headroom: its bytes, and as much again for every 1/64 of them that it grew lately.
GROWTH_WEIGHT = 64
# One Saver has one set of tables, or two, when some are deferred only where memory is short.
LAYOUTS_MAX = 4
SCHEMAS_MAX = 10_000
NO_IDS: I64 = np.empty(0, dtype=np.int64)


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
    """Return the bytes of one row of every column."""
    found = {}
    for column in schema.columns:
        stored = stored_dtype(column.dtype, owner=column.name)
        found[column.name] = math.prod(stored.stored_shape((1, *column.row_shape))) * stored.stored_itemsize
    return found


def row_bytes_of(schema: TableSchema) -> int:
    """Return the bytes of one row of all columns."""
    return sum(column_row_bytes(schema).values())


class RegionCache:
    """Plans the regions of full saves, and keeps them as long as all rows fit; for each set of tables that is saved."""

    def __init__(self) -> None:
        self._kept: dict[object, tuple[Regions, tuple[int, ...]]] = {}  # And how many rows there were then.

    def regions(self, wishes: Sequence[RegionWish]) -> Regions:
        """Return regions with room for all wishes, and some more."""
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
        """Return all that are kept."""
        return [regions for regions, _ in self._kept.values()]


def plan_regions(wishes: Sequence[RegionWish], *, room: Sequence[int] | None = None) -> Regions:
    """Put the tables one after the other; `room` is how many rows more than wished each gets."""
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
    """Return rows of room for each table: an eighth of all bytes, at most HEADROOM_BYTES_MAX, by size and growth."""
    sizes = [row_bytes_of(wish.schema) for wish in wishes]
    total = sum(wish.rows_count * size for wish, size in zip(wishes, sizes, strict=True))
    weights = [
        size * (wish.rows_count + GROWTH_WEIGHT * more) for wish, size, more in zip(wishes, sizes, grown, strict=True)
    ]
    share = min(total // 8, HEADROOM_BYTES_MAX) / max(1, sum(weights))
    return [int(weight * share) // max(1, size) for size, weight in zip(sizes, weights, strict=True)]


@dataclass(frozen=True)
class TableRows:
    """The part of a table, number `table` of the cuts, that a save writes.

    rows:    storage rows, ascending; None: all, and the table is whole
    removed: ids that are taken out of what the parents hold
    marked:  in an audit, storage rows that have a mark since the last committed checkpoint; all rows are captured then
    is_lost: the table has marks, but not since the last committed checkpoint: all rows are captured and compared
    """

    table: int
    rows: I64 | None = None
    removed: I64 = field(default_factory=lambda: NO_IDS)
    marked: I64 | None = None
    is_lost: bool = False

    @property
    def is_whole(self) -> bool:
        return self.rows is None

    def count(self, rows_count: int) -> int:
        return rows_count if self.rows is None else len(self.rows)


@dataclass(frozen=True)
class CapturedTable:
    """A table in an arena: the rows of its region are what `facts` says. `version` is that of its cut, if it has one.

    places: where each storage row is, of a whole table. copied_count: rows that had to be copied; the other ones were
    there from an earlier snapshot.
    """

    region: TableRegion
    schema: TableSchema
    facts: TableFacts
    version: CutVersion | None
    places: RowPlaces | None
    copied_count: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of its rows and removed ids."""
        row_bytes = sum(column.row_bytes for column in self.region.columns.values())
        return self.facts.rows_count * row_bytes + self.facts.removed_count * ID_BYTES


class RegionFilesCache:
    """Plans the files of captured tables, and keeps the last plan as long as no table has got or lost rows."""

    def __init__(self) -> None:
        self._key: object = None
        self._kept: ImagePlan | None = None

    def plan(self, tables: Sequence[CapturedTable], *, parallel: int, rank: int, first_file: int) -> ImagePlan:
        """Give every column its place in a file; numbers of files count on from first_file."""
        key = ([(table.region, table.schema, table.facts) for table in tables], parallel, rank, first_file)
        if self._kept is None or key != self._key:
            specs: list[BlockSpec] = []
            places: list[int] = []
            for table in tables:
                for whole in captured_specs(table):
                    region = table.region.column(str(whole.column))
                    for spec in split_rows(whole, unit=rows_on_pages(region.row_bytes)):
                        specs.append(spec)
                        places.append(region.offset + spec.row_begin * region.row_bytes)
            self._kept = plan_apart(specs, places, parallel=parallel, rank=rank, first_file=first_file)
            self._key = key
        return self._kept


def captured_specs(table: CapturedTable) -> list[BlockSpec]:
    """Return the columns of a captured table, whole, and the ids that a delta removes if there are any."""
    facts = table.facts
    specs = column_specs(facts.name, table.schema, facts.shard, rows_count=facts.rows_count)
    return [*specs, removed_spec(specs[0], facts.removed_count)] if facts.removed_count else specs


def removed_spec(ids: BlockSpec, count: int) -> BlockSpec:
    """Return the block of the ids that a delta removes from a table with this block of ids."""
    name = f"{ids.table}@{REMOVED_COLUMN}"
    return replace(ids.with_rows(count), name=name, column=REMOVED_COLUMN, role=Role.REMOVED)


def column_specs(name: str, schema: TableSchema, shard: Shard, *, rows_count: int) -> list[BlockSpec]:
    """Return one block per column of a table, whole. UsageError for names that cannot be stored."""
    check_name(name)
    if "@" in name:
        raise UsageError("table name holds '@', which separates table and column", found=name)
    specs: list[BlockSpec] = []
    for column in schema.columns:
        if column.name.startswith("#"):
            raise UsageError(f"column name of table {name!r} begins with '#', which is reserved", found=column.name)
        spec = array_spec(f"{name}@{column.name}", column.dtype, (rows_count, *column.row_shape), column.role)
        specs.append(replace(spec, table=name, column=column.name, slice_info=slice_info(shard)))
    return specs
