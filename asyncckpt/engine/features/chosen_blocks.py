"""Write other blocks than those of the plan: filtered ones, or without rows and tensors that the checkpoint leaves out.

    the state                                             is written
    with all blocks as planned                            as that of a plain save (write_files.py)
    changed by a filter, with rows left out, or with      block by block through chunk buffers
    blocks that other ranks write

Rows are left out of a delta in the last way where the arena holds more than it needs: tables without marks, which are
compared row by row with what the last save wrote, and blocking saves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from asyncckpt.engine.features.block_choice import (
    filter_blocks,
    own_blocks,
    planned_blocks,
    staged_tables,
    table_facts,
    written_as,
)
from asyncckpt.engine.features.row_fingerprints import Selections, select_rows
from asyncckpt.engine.process.future import FutureState
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.save_job import SaveJob, Written
from asyncckpt.engine.save.state_cut import NOTHING_BY_PEERS
from asyncckpt.engine.save.write_files import in_order, stream, write_planned
from asyncckpt.format.write_manifest import render_body
from asyncckpt.model.block import TableFacts
from asyncckpt.model.table import Role
from asyncckpt.pipeline.filter_types import FilteredState, OutBlock, StagedBlock
from asyncckpt.pipeline.row_filters import run_row_filters
from asyncckpt.plan.image import plan_image
from asyncckpt.shard.files import ShardTarget


class Filters(SaveFeature):
    """Row filters, and the user's own filter function."""

    def begin(self, job: SaveJob) -> None:
        job.write = write_chosen


def write_chosen(job: SaveJob, target: ShardTarget) -> Written:
    """Filter, and write what is left. On a worker thread."""
    options, filter_func = job.target.options, job.target.filter_func
    planned = blocks = None
    if filter_func is not None:
        job.enter(FutureState.FILTERING)
        filtering = time.perf_counter()
        try:
            planned = planned_blocks(job)
            blocks = filter_blocks(job, planned)
        finally:
            job.note("filter", filtering)
    job.enter(FutureState.WRITING)
    selecting = time.perf_counter()
    is_compared = job.captured and (options.debug.audit or options.deltas is not None)
    selections = select_rows(job) if is_compared else Selections()
    job.note("rows", selecting)
    has_rows_to_choose = bool(job.target.filters or selections.rows or _has_rows_to_leave_out(job))
    if has_rows_to_choose or blocks is not planned or job.by_peers is not NOTHING_BY_PEERS:
        own = own_blocks(job, planned_blocks(job) if blocks is None else blocks)
        if has_rows_to_choose or job.captured:
            state = _choose_rows(job, own, selections, target.check_not_cancelled)
        else:  # In the order that the filter function has returned.
            out = tuple(OutBlock(block.spec, block.data.source(), block.replaced) for block in own)
            state = FilteredState(tables=tuple(table_facts(job, own).values()), blocks=out)
        written = _stream_changed(job, state, target)
    elif planned is not None and job.staged is None:  # What the function has looked at is a copy, which is written.
        plan, sources = job.plan, [block.data.source() for block in planned]
        written = stream(job, plan.image, plan.body, plan.tables, sources, target)
    else:
        written = write_planned(job, target)
    left_out = _leaves(planned or ()) - _leaves(blocks or ())
    return replace(
        written,
        fingerprints=selections.fingerprints,
        missed=selections.missed,
        holds_all=left_out <= {None},
        written_as={} if blocks is None else written_as(job, blocks),
    )


def _leaves(blocks: Iterable[StagedBlock]) -> set[int | None]:
    """Return the numbers of tensors; None stands for those with other names, and for columns of tables."""
    return {block.spec.leaf for block in blocks}


def _has_rows_to_leave_out(job: SaveJob) -> bool:
    """Return whether there are rows to leave out of tables that are not in regions."""
    in_regions = {table.region.table for table in job.captured}
    return any(not chosen.is_whole and chosen.table not in in_regions for chosen in job.rows)


def _stream_changed(job: SaveJob, state: FilteredState, target: ShardTarget) -> Written:
    """Write other blocks than those of the plan."""
    opened = job.plan.deferred
    image = plan_image(
        [block.spec for block in state.blocks],
        parallel=job.target.options.parallel,
        rank=job.target.rank,
        first_file=len(opened.tables),
        needs_file=not opened.tables,
    )
    tables = in_order(job, (*state.tables, *_open_facts(job)))
    replaced = {number for number, block in enumerate(state.blocks) if block.replaced}
    blocks = [*image.blocks, *opened.blocks]
    plan = job.plan
    body = render_body(tables, plan.tree, blocks, filtered=replaced, sharing=plan.sharing, classes=plan.classes)
    return stream(job, image, body, tables, [block.source for block in state.blocks], target)


def _open_facts(job: SaveJob) -> list[TableFacts]:
    names = {placed.spec.table for placed in job.plan.deferred.blocks}
    return [facts for facts in job.plan.tables if facts.name in names]


def _choose_rows(
    job: SaveJob, blocks: Sequence[StagedBlock], selections: Selections, check_not_cancelled: Callable[[], None]
) -> FilteredState:
    """Leave rows out, and store columns as the row filters want them."""
    return run_row_filters(
        job.target.filters,
        staged_tables(job, blocks, selections),
        [block for block in blocks if block.spec.role is Role.DENSE],
        enter_state=check_not_cancelled,
    )
