"""Which rows of each table a save is about, what it captured of them in regions of an arena, and the shard files of
these: planned behind the fence, when their rows are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncckpt.model.block import REMOVED_COLUMN, BlockSpec, TableFacts
from asyncckpt.model.row_places import RowPlaces
from asyncckpt.model.table import CutVersion, Role, TableSchema
from asyncckpt.native import I64
from asyncckpt.plan.image import ImagePlan, plan_apart, rows_on_pages, split_rows
from asyncckpt.plan.regions import ID_BYTES, TableRegion
from asyncckpt.plan.save_plan import column_specs, slice_info

NO_IDS: I64 = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class TableRows:
    """The part of a table, number `table` of the cuts, that a save writes.

    rows:    storage rows, ascending; None: all, and the table is whole
    removed: ids that are taken out of what the parents hold
    marked:  in an audit, storage rows that have a mark since the last committed checkpoint; all rows are captured then
    """

    table: int
    rows: I64 | None = None
    removed: I64 = field(default_factory=lambda: NO_IDS)
    marked: I64 | None = None

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
    """The columns of a captured table, whole, and the ids that a delta removes if there are any."""
    facts = table.facts
    specs = column_specs(facts.name, table.schema, facts.shard, rows_count=facts.rows_count)
    if facts.removed_count:
        removed = BlockSpec(
            name=f"{facts.name}@{REMOVED_COLUMN}",
            role=Role.REMOVED,
            dtype="int64",
            stored_dtype="I64",
            stored_itemsize=8,
            shape=(facts.removed_count,),
            stored_shape=(facts.removed_count,),
            table=facts.name,
            column=REMOVED_COLUMN,
            slice_info=slice_info(facts.shard),
        )
        specs.append(removed)
    return specs
