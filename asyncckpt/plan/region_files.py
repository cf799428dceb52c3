"""The shard files of tables that lie in regions of an arena: planned behind the fence, when their rows are known."""

from __future__ import annotations

from collections.abc import Sequence

from asyncckpt.model.block import REMOVED_COLUMN, BlockSpec
from asyncckpt.model.table import Role
from asyncckpt.plan.image import ImagePlan, plan_apart, rows_on_pages, split_rows
from asyncckpt.plan.save_plan import column_specs, slice_info
from asyncckpt.plan.table_rows import CapturedTable


class RegionFilesCache:
    """Plans region files, and keeps the last ones as long as no table has got or lost rows."""

    def __init__(self) -> None:
        self._key: object = None
        self._kept: ImagePlan | None = None

    def plan(self, tables: Sequence[CapturedTable], *, parallel: int, rank: int, first_file: int) -> ImagePlan:
        """The files of these tables."""
        key = ([(table.region, table.schema, table.facts) for table in tables], parallel, rank, first_file)
        if self._kept is None or key != self._key:
            self._kept = _plan(tables, parallel=parallel, rank=rank, first_file=first_file)
            self._key = key
        return self._kept


def captured_specs(table: CapturedTable) -> list[BlockSpec]:
    """The columns of a captured table, whole, and its removed ids if there are any."""
    facts = table.facts
    specs = column_specs(facts.name, table.schema, facts.shard, rows_count=facts.rows_count)
    if facts.removed_count:
        specs.append(_removed_spec(facts.name, facts.shard, count=facts.removed_count))
    return specs


def _removed_spec(table: str, shard: tuple[int, int], *, count: int) -> BlockSpec:
    """The block of ids that a delta removes from a table."""
    return BlockSpec(
        name=f"{table}@{REMOVED_COLUMN}",
        role=Role.REMOVED,
        dtype="int64",
        stored_dtype="I64",
        stored_itemsize=8,
        shape=(count,),
        stored_shape=(count,),
        table=table,
        column=REMOVED_COLUMN,
        slice_info=slice_info(shard),
    )


def _plan(tables: Sequence[CapturedTable], *, parallel: int, rank: int, first_file: int) -> ImagePlan:
    """Give every column its place in a file; numbers of files count on from first_file."""
    specs: list[BlockSpec] = []
    places: list[int] = []
    for table in tables:
        for whole in captured_specs(table):
            region = table.region.column(str(whole.column))
            for spec in split_rows(whole, unit=rows_on_pages(region.row_bytes)):
                specs.append(spec)
                places.append(region.offset + spec.row_begin * region.row_bytes)
    return plan_apart(specs, places, parallel=parallel, rank=rank, first_file=first_file)
