"""The blocks of a save as filters see them, wherever their values are; the user's filter function on them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from asyncckpt.engine.features.row_fingerprints import Selections
from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.engine.save.state_cut import NOTHING_BY_PEERS
from asyncckpt.errors import UsageError
from asyncckpt.model.block import REMOVED_COLUMN, BlockSpec, TableFacts
from asyncckpt.model.row_runs import positions
from asyncckpt.model.table import Role
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.native import U8
from asyncckpt.pipeline.filter_types import StagedBlock, StagedColumn, StagedTable
from asyncckpt.pipeline.filters import run_filter
from asyncckpt.plan.image import split_rows
from asyncckpt.plan.regions import NO_IDS, CapturedTable, captured_specs
from asyncckpt.snapshot.block_data import ArenaData, LiveData, TensorData, live_data
from asyncckpt.snapshot.capture import block_bytes


def planned_blocks(job: SaveJob) -> list[StagedBlock]:
    """Return the blocks of the plan, each with its values."""
    specs = [placed.spec for placed in job.plan.image.blocks]
    data: Sequence[ArenaData | LiveData]
    if job.staged is None:
        live = live_data(job.plan, job.cut.flat, job.cut.tables)
        data = [LiveData(own, spec) for own, spec in zip(live, specs, strict=True)]
    else:
        image = job.staged.arena.view()[job.staged.base :]
        data = [ArenaData(block_bytes(job.plan, number, image), spec) for number, spec in enumerate(specs)]
    return [StagedBlock(spec, own, number) for number, (spec, own) in enumerate(zip(specs, data, strict=True))]


def filter_blocks(job: SaveJob, blocks: list[StagedBlock]) -> list[StagedBlock]:
    """Run the user's function; return the same list if it changed nothing."""
    pid = os.getpid()
    assert job.target.filter_func is not None
    left = run_filter(job.target.filter_func, [WriteBlock(block.spec, block.data.whole) for block in blocks])
    if pid != os.getpid():
        raise UsageError("filter_func forked a child, which would continue its parent's save", hint="end it there")
    if left is None:
        return blocks
    return [
        replace(blocks[item.number], spec=item.spec)
        if item.data is None
        else StagedBlock(item.spec, TensorData(item.data, item.spec.name), item.number, replaced=True)
        for item in left
    ]


def own_blocks(job: SaveJob, blocks: list[StagedBlock]) -> list[StagedBlock]:
    """Return the blocks that no other rank writes."""
    by_peers = job.by_peers
    if by_peers is NOTHING_BY_PEERS:
        return blocks
    planned = [_planned_spec(job, block) for block in blocks]
    return [
        block
        for block, spec in zip(blocks, planned, strict=True)
        if spec.leaf not in by_peers.leaves and spec.table not in by_peers.tables
    ]


def _planned_spec(job: SaveJob, block: StagedBlock) -> BlockSpec:
    assert block.number is not None
    return job.plan.image.blocks[block.number].spec


# -- tables ------------------------------------------------------------------------------------------------------------


def written_as(job: SaveJob, blocks: Iterable[StagedBlock]) -> dict[str, set[object]]:
    """Return by table which columns are written as what. Rows can be laid only over those that are written alike; over
    none with other ids than the table has, for these are chosen, and removed, by its own.
    """
    found: dict[str, set[object]] = {}
    for block in blocks:
        if block.spec.table is not None:
            of, spec = _planned_spec(job, block).name, block.spec
            has_other_ids = block.replaced and spec.role is Role.ID
            column = object() if has_other_ids else (of, spec.column, spec.dtype, spec.shape[1:])
            found.setdefault(block.spec.table, set()).add(column)
    return found


def table_facts(job: SaveJob, blocks: Sequence[StagedBlock]) -> dict[str, TableFacts]:
    """Return the tables whose ids are among the blocks, under the names that the filter function gave them."""
    shards = {item.name: item.shard for item in job.cut.tables}
    facts = {}
    for block in blocks:
        if block.spec.role is Role.ID and block.spec.table is not None:
            rows_count = (block.spec.whole_shape or block.spec.shape)[0]
            shard = shards[str(_planned_spec(job, block).table)]
            facts[block.spec.table] = TableFacts(name=block.spec.table, rows_count=rows_count, shard=shard)
    return facts


def staged_tables(job: SaveJob, blocks: Sequence[StagedBlock], selections: Selections) -> list[StagedTable]:
    """Return all tables of this rank: those in regions, then those of the blocks."""
    by_peers = job.by_peers.tables
    regions = [_from_region(job, table, selections) for table in job.captured if table.facts.name not in by_peers]
    columns: dict[str, dict[str, list[StagedBlock]]] = {}
    for block in blocks:
        if block.spec.table is not None:
            columns.setdefault(block.spec.table, {}).setdefault(str(block.spec.column), []).append(block)
    facts = table_facts(job, blocks)
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
    chosen, cut = job.rows[number], job.cut.tables[number].cut
    staged = tuple(sorted((_column(blocks) for blocks in columns), key=lambda column: column.spec.role is not Role.ID))
    if chosen.rows is None or not _is_written_alike(job, facts.name, columns):
        return StagedTable(facts=facts, columns=staged, kept=None, removed=NO_IDS)
    kept = positions(cut.runs, chosen.rows)
    return StagedTable(facts=replace(facts, whole=False), columns=staged, kept=kept, removed=chosen.removed)


def _is_written_alike(job: SaveJob, name: str, columns: Sequence[list[StagedBlock]]) -> bool:
    """Return whether the filter function leaves a table as that of this name in the base of a delta."""
    if job.target.filter_func is None:
        return True
    link = None if job.base is None else job.base.tables.get(name)
    return link is not None and link.written_as == written_as(job, chain.from_iterable(columns))[name]


def _column(blocks: Sequence[StagedBlock]) -> StagedColumn:
    blocks = sorted(blocks, key=lambda block: block.spec.row_begin)
    spec = blocks[0].spec
    if spec.whole_shape is not None:
        spec = replace(spec.with_rows(spec.whole_shape[0]), row_begin=0, whole_shape=None)
    return StagedColumn(spec=spec, blocks=tuple(blocks))
