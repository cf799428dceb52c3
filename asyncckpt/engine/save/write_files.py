"""Write the shard files of a save, from wherever its state is.

    the state                                             is written
    in deferred tables                                    window by window, before all else
    in an arena, and all of it is wanted as it is         by draining the arena: no second copy
    live, changed by a filter, with rows left out,        block by block through chunk buffers
    or with blocks that other ranks write

Rows are left out of a delta in the last way where the arena holds more than it needs: tables without marks, which are
compared row by row with what the last save wrote, and blocking saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from asyncckpt.engine.process.background import senders, writers
from asyncckpt.engine.process.future import FutureState
from asyncckpt.engine.save.filter_input import filter_blocks, own_blocks, planned_blocks, staged_tables, table_facts
from asyncckpt.engine.save.row_fingerprints import Selections, select_rows
from asyncckpt.engine.save.save_job import SaveJob, Written
from asyncckpt.errors import FilterError
from asyncckpt.format.head import FileFacts
from asyncckpt.format.names import Attempt
from asyncckpt.format.write_manifest import BodyTemplate, extend_body, render_body
from asyncckpt.model.block import TableFacts
from asyncckpt.model.source import ByteSource
from asyncckpt.model.table import DeferredCut, Role
from asyncckpt.native import DIGEST_BYTES, U8, row_begins
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.pipeline.filter_types import FilteredState, OutBlock, StagedBlock
from asyncckpt.pipeline.filters import identity
from asyncckpt.pipeline.row_filters import run_row_filters
from asyncckpt.plan.image import ImagePlan, plan_image
from asyncckpt.shard.files import ShardTarget, drain_images
from asyncckpt.shard.stream import export_tables, stream_sources
from asyncckpt.staging.chunks import chunk_buffers
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.store_folder import StoreFolder


def write_files(job: SaveJob, folder: Directory | StoreFolder, attempt: Attempt) -> Written:
    """Filter, and write all shard files. On a worker thread."""
    with job.recorder.span("write"):
        return _write_files(job, folder, attempt)


def _write_files(job: SaveJob, folder: Directory | StoreFolder, attempt: Attempt) -> Written:
    options = job.target.options
    planned = blocks = None
    if job.target.filter_func is not identity:
        job.enter(FutureState.FILTERING)
        with job.recorder.span("filter"):
            planned = planned_blocks(job)
            blocks = filter_blocks(job, planned)
    job.enter(FutureState.WRITING)
    target = ShardTarget(folder, attempt, options, job.future.native_progress, job.recorder, sender=senders)
    is_compared = job.captured and (options.debug.audit or options.deltas is not None)
    with job.recorder.span("rows"):
        selections = select_rows(job) if is_compared else Selections()
    has_rows_to_choose = bool(job.target.filters or selections.rows or _has_rows_to_leave_out(job))
    if has_rows_to_choose or blocks is not planned or job.by_peers:
        own = own_blocks(job, planned_blocks(job) if blocks is None else blocks)
        if has_rows_to_choose or job.captured:
            state = _choose_rows(job, own, selections, target.check_not_cancelled)
        else:  # In the order that the filter function has returned.
            out = tuple(OutBlock(block.spec, block.data.source(), block.replaced) for block in own)
            state = FilteredState(tables=tuple(table_facts(job, own).values()), blocks=out)
        written = _stream_changed(job, state, target)
    elif job.staged is not None:
        written = _drain(job, target)
    else:
        plan, sources = job.plan, [block.data.source() for block in planned or planned_blocks(job)]
        written = _stream(job, plan.image, plan.body, plan.tables, sources, target)
    left_out = _leaves(planned or ()) - _leaves(blocks or ())
    return replace(
        written, fingerprints=selections.fingerprints, missed=selections.missed, holds_all=left_out <= {None}
    )


def _leaves(blocks: Iterable[StagedBlock]) -> set[int | None]:
    """Return the numbers of tensors; None: of those with other names, and of columns of tables."""
    return {block.spec.leaf for block in blocks}


def _has_rows_to_leave_out(job: SaveJob) -> bool:
    """Return whether there are rows to leave out of tables that are not in regions."""
    in_regions = {table.region.table for table in job.captured}
    return any(not chosen.is_whole and chosen.table not in in_regions for chosen in job.choice.tables)


# -- deferred tables --------------------------------------------------------------------------------------------------


def _export(job: SaveJob, target: ShardTarget) -> tuple[tuple[FileFacts, ...], U8]:
    """Write the deferred tables; first, because until then the old values of rows that change take memory."""
    opened = job.plan.deferred
    if not opened.tables:
        return (), np.empty((0, DIGEST_BYTES), dtype=np.uint8)
    cuts = [cast(DeferredCut, job.cut.tables[item.table].cut) for item in opened.tables]
    with chunk_buffers.borrow(CHUNK_BYTES) as buffers:
        return export_tables(opened, cuts, target, buffers=buffers, writer=writers)


# -- from the arena ----------------------------------------------------------------------------------------------------


def _drain(job: SaveJob, target: ShardTarget) -> Written:
    assert job.staged is not None
    plan, staged, options = job.plan, job.staged, job.target.options
    images = [(plan.image, staged.base)]
    if staged.tables:
        first_file = len(plan.deferred.tables) + len(plan.image.files)
        regions = job.target.memory.region_files.plan(
            staged.tables, parallel=options.parallel, rank=job.target.rank, first_file=first_file
        )
        images.append((regions, 0))
    job.future.expect_bytes(sum(file.bytes for image, _ in images for file in image.files) + plan.deferred.files_bytes)
    exported, late_digests = _export(job, target)
    files, digests = drain_images(images, staged.arena.view(), target)
    tables, body = plan.tables, plan.body
    if staged.tables:
        tables = _in_order(job, (*plan.tables, *(table.facts for table in staged.tables)))
        body = extend_body(plan.body, tables=tables, blocks=regions.blocks)
    count = int(row_begins(plan.image.lengths)[-1])
    return Written(
        files=exported + files,
        body=body,
        digests=np.concatenate([digests[:count], late_digests, digests[count:]]),
        tables=tables,
        dense_structure=plan.structure,
    )


def _in_order(job: SaveJob, facts: Sequence[TableFacts]) -> tuple[TableFacts, ...]:
    """Return tables in the order of the cuts; those that a filter has renamed behind them."""
    places = {item.name: number for number, item in enumerate(job.cut.tables)}
    return tuple(sorted(facts, key=lambda item: places.get(item.name, len(places))))


# -- through chunk buffers ---------------------------------------------------------------------------------------------


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
    tables = _in_order(job, (*state.tables, *_open_facts(job)))
    replaced = {number for number, block in enumerate(state.blocks) if block.replaced}
    blocks = [*image.blocks, *opened.blocks]
    plan = job.plan
    body = render_body(tables, plan.tree, blocks, filtered=replaced, sharing=plan.sharing, classes=plan.classes)
    return _stream(job, image, body, tables, [block.source for block in state.blocks], target)


def _stream(
    job: SaveJob,
    image: ImagePlan,
    body: BodyTemplate,
    tables: tuple[TableFacts, ...],
    sources: Sequence[ByteSource],
    target: ShardTarget,
) -> Written:
    job.future.expect_bytes(job.plan.deferred.files_bytes + sum(file.bytes for file in image.files))
    exported, late_digests = _export(job, target)
    with chunk_buffers.borrow(max((file.bytes for file in image.files), default=0)) as buffers:
        files, digests = stream_sources(image, sources, target, buffers=buffers, writer=writers)
    return Written(files=exported + files, body=body, digests=np.concatenate([digests, late_digests]), tables=tables)


def _open_facts(job: SaveJob) -> list[TableFacts]:
    names = {placed.spec.table for placed in job.plan.deferred.blocks}
    return [facts for facts in job.plan.tables if facts.name in names]


def _choose_rows(
    job: SaveJob, blocks: Sequence[StagedBlock], selections: Selections, check_not_cancelled: Callable[[], None]
) -> FilteredState:
    """Leave rows out, and store columns as the row filters want them."""
    state = run_row_filters(
        job.target.filters,
        staged_tables(job, blocks, selections),
        [block for block in blocks if block.spec.role is Role.DENSE],
        enter_state=check_not_cancelled,
    )
    base = job.choice.base
    for facts in state.tables:
        if not facts.whole and (base is None or facts.name not in base.tables):
            raise FilterError(
                f"filter gave a table another name ({facts.name!r}) in a delta than in what it builds upon",
                hint="save a full checkpoint when names change: kind='full'",
            )
    return state
