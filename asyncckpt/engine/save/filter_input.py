"""The blocks of a save as filters see them, wherever their values are; the user's filter function on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncckpt.engine.save.row_fingerprints import Selections
from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.model.block import REMOVED_COLUMN, BlockSpec, TableFacts
from asyncckpt.model.row_runs import positions
from asyncckpt.model.source import ByteSource
from asyncckpt.model.table import Role
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.native import U8
from asyncckpt.pipeline.filter_types import StagedBlock, StagedColumn, StagedTable
from asyncckpt.pipeline.filters import run_filter
from asyncckpt.plan.image import split_rows
from asyncckpt.plan.regions import NO_IDS, CapturedTable, captured_specs
from asyncckpt.snapshot.block_data import ArenaData, LiveData, TensorData, live_data
from asyncckpt.snapshot.capture import block_bytes


@dataclass(frozen=True)
class Filtered:
    """The blocks of the plan. None: nobody has asked for them. is_changed: the filter function left others."""

    blocks: list[StagedBlock] | None = None
    is_changed: bool = False


def filter_blocks(job: SaveJob) -> Filtered:
    """On a worker thread: run the user's function."""
    function = job.target.filter_func
    data = _planned_data(job)
    specs = [placed.spec for placed in job.plan.image.blocks]
    blocks = [StagedBlock(spec, own, number) for number, (spec, own) in enumerate(zip(specs, data, strict=True))]
    left = run_filter(function, [WriteBlock(spec, own.whole) for spec, own in zip(specs, data, strict=True)])
    if left is None:
        return Filtered(blocks=blocks)
    return Filtered(
        blocks=[
            replace(blocks[item.number], spec=item.spec)
            if item.data is None
            else StagedBlock(item.spec, TensorData(item.data), item.number, replaced=True)
            for item in left
        ],
        is_changed=True,
    )


def own_blocks(job: SaveJob, filtered: Filtered) -> list[StagedBlock]:
    """The blocks of the plan that are left, without those that other ranks write."""
    blocks = filtered.blocks
    if blocks is None:
        placed = job.plan.image.blocks
        blocks = [StagedBlock(placed[number].spec, data, number) for number, data in enumerate(_planned_data(job))]
    by_peers = job.by_peers
    if by_peers is None:
        return blocks
    specs = [_planned_spec(job, block) for block in blocks]
    return [
        block
        for block, spec in zip(blocks, specs, strict=True)
        if spec.leaf not in by_peers.leaves and spec.table not in by_peers.tables
    ]


def planned_sources(job: SaveJob, filtered: Filtered) -> list[ByteSource]:
    """The bytes of every block of the plan, of a save without an arena whose filter function changed nothing."""
    if filtered.blocks is not None:
        return [block.data.source() for block in filtered.blocks]
    return [data.source() for data in live_data(job.plan, job.cut.flat, job.cut.tables)]


def _planned_data(job: SaveJob) -> Sequence[ArenaData | LiveData]:
    """The values of every block of the plan."""
    specs = [placed.spec for placed in job.plan.image.blocks]
    if job.staged is None:
        live = live_data(job.plan, job.cut.flat, job.cut.tables)
        return [LiveData(data, spec) for data, spec in zip(live, specs, strict=True)]
    image = job.staged.arena.view()[job.staged.base :]
    return [ArenaData(block_bytes(job.plan, number, image), spec) for number, spec in enumerate(specs)]


def _planned_spec(job: SaveJob, block: StagedBlock) -> BlockSpec:
    assert block.number is not None
    return job.plan.image.blocks[block.number].spec


# -- tables ------------------------------------------------------------------------------------------------------------


def table_facts(job: SaveJob, blocks: Sequence[StagedBlock]) -> tuple[TableFacts, ...]:
    """The tables whose ids are among the blocks, under the names that the filter function gave them."""
    shards = {item.name: item.shard for item in job.cut.tables}
    facts = {}
    for block in blocks:
        if block.spec.role is Role.ID and block.spec.table is not None:
            rows_count = (block.spec.whole_shape or block.spec.shape)[0]
            shard = shards[str(_planned_spec(job, block).table)]
            facts[block.spec.table] = TableFacts(name=block.spec.table, rows_count=rows_count, shard=shard)
    return tuple(facts.values())


def staged_tables(job: SaveJob, blocks: Sequence[StagedBlock], selections: Selections) -> list[StagedTable]:
    """All tables of this rank: those in regions, then those of the blocks."""
    left_out = () if job.by_peers is None else job.by_peers.tables
    regions = [_from_region(job, table, selections) for table in job.captured if table.facts.name not in left_out]
    columns: dict[str, dict[str, list[StagedBlock]]] = {}
    for block in blocks:
        if block.spec.table is not None:
            columns.setdefault(block.spec.table, {}).setdefault(str(block.spec.column), []).append(block)
    facts = {item.name: item for item in table_facts(job, blocks)}
    return regions + [_from_plan(job, facts[name], list(own.values())) for name, own in columns.items()]


def _from_region(job: SaveJob, captured: CapturedTable, selections: Selections) -> StagedTable:
    assert job.staged is not None
    image = job.staged.arena.view()
    columns = tuple(
        _region_column(image, captured, spec) for spec in captured_specs(captured) if spec.column != REMOVED_COLUMN
    )
    chosen = selections.rows.get(captured.region.table)
    if chosen is not None:
        facts = replace(captured.facts, whole=False)
        return StagedTable(facts=facts, columns=columns, kept=chosen.positions, removed=chosen.removed)
    removed = NO_IDS
    if captured.region.removed is not None:
        begin = captured.region.removed.offset
        removed = image[begin : begin + 8 * captured.facts.removed_count].view(np.int64)
    return StagedTable(facts=captured.facts, columns=columns, kept=None, removed=removed)


def _region_column(image: U8, captured: CapturedTable, spec: BlockSpec) -> StagedColumn:
    region = captured.region.column(str(spec.column))
    blocks = []
    for part in split_rows(spec):
        begin = region.offset + part.row_begin * region.row_bytes
        blocks.append(StagedBlock(part, ArenaData(image[begin : begin + part.bytes], part)))
    return StagedColumn(spec=spec, blocks=tuple(blocks))


def _from_plan(job: SaveJob, facts: TableFacts, columns: Sequence[list[StagedBlock]]) -> StagedTable:
    first = columns[0][0].number
    assert first is not None
    number, _ = job.plan.columns[first]
    chosen, cut = job.choice.tables[number], job.cut.tables[number].cut
    staged = tuple(sorted((_column(blocks) for blocks in columns), key=lambda column: column.spec.role is not Role.ID))
    if chosen.rows is None:
        return StagedTable(facts=facts, columns=staged, kept=None, removed=NO_IDS)
    kept = positions(cut.runs, chosen.rows)
    return StagedTable(facts=replace(facts, whole=False), columns=staged, kept=kept, removed=chosen.removed)


def _column(blocks: Sequence[StagedBlock]) -> StagedColumn:
    """Join the parts of a column."""
    blocks = sorted(blocks, key=lambda block: block.spec.row_begin)
    spec = blocks[0].spec
    if spec.whole_shape is not None:
        spec = replace(spec.with_rows(spec.whole_shape[0]), row_begin=0, whole_shape=None)
    return StagedColumn(spec=spec, blocks=tuple(blocks))
