"""Write the shard files of a save, from wherever its state is.

    the state                                       is written
    in an arena, to be written as it is             by draining the arena: no second copy
    in tables left open                             window by window, before that
    changed by the user's filter function, or live  block by block through chunk buffers
    with rows left out or columns stored otherwise  by row filters, then through chunk buffers

Rows are left out of a delta in the last way where the arena holds more than it needs: tables without marks, which are
compared row by row with what the last save wrote, and blocking saves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from asyncckpt.engine.background import workers
from asyncckpt.engine.filtering import Filtered, filtered_tables, is_elsewhere
from asyncckpt.engine.job import SaveJob
from asyncckpt.engine.printing import Selections, select_rows
from asyncckpt.engine.staged_state import staged_dense, staged_tables
from asyncckpt.errors import FilterError, SaveCancelledError
from asyncckpt.format.manifest import BodyTemplate, FileFacts, extend_body, render_body
from asyncckpt.format.names import Attempt
from asyncckpt.model.block import BlockSpec, TableFacts
from asyncckpt.model.source import ByteSource
from asyncckpt.model.table import OpenCut
from asyncckpt.native import DIGEST_BYTES
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.pipeline.filters import FilteredBlock
from asyncckpt.pipeline.row_filters import run_row_filters
from asyncckpt.pipeline.row_prints import RowPrints
from asyncckpt.plan.image import ImagePlan, plan_image
from asyncckpt.shard.drain import ArenaImage, drain_image
from asyncckpt.shard.export import export_tables
from asyncckpt.shard.stream import stream_sources
from asyncckpt.snapshot.capture import live_sources
from asyncckpt.snapshot.source import SpanSource, tensor_source
from asyncckpt.staging.chunks import chunk_buffers
from asyncckpt.storage.directory import Directory

Digests = NDArray[np.uint8]
NO_IMAGE = plan_image([], parallel=1, rank=0, needs_file=False)


@dataclass(frozen=True)
class Written:
    """Shard files on disk, and what the manifest says of their blocks: digests are uint8 [blocks, 16].

    tables: as they are in the checkpoint. structure: of the tensors that were written a digest, where it is known
    without looking at each. prints, missed: by table, see printing.py.
    """

    files: tuple[FileFacts, ...]
    body: BodyTemplate
    digests: Digests
    tables: tuple[TableFacts, ...]
    structure: str | None = None
    prints: Mapping[str, RowPrints] = field(default_factory=dict)
    missed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def write_files(job: SaveJob, filtered: Filtered, folder: Directory, attempt: Attempt) -> Written:
    """On a worker thread: write all shard files."""
    selections = select_rows(job) if filtered.blocks is None else Selections()
    if job.target.filters or selections.rows or _is_partial_elsewhere(job):
        return _write_chosen_rows(job, filtered, selections, folder, attempt)
    if filtered.blocks is not None:
        left = [block for block in filtered.blocks if not is_elsewhere(job, block.number)]
        return _write_filtered(job, left, _sources(job, filtered), folder, attempt)
    if job.staged is not None:
        return _drain(job, selections, folder, attempt)
    if job.elsewhere:
        return _write_filtered(job, _own_blocks(job), _sources(job, filtered), folder, attempt)
    image = job.plan.image
    job.future.expect_bytes(job.plan.files_bytes)
    files, digests = _stream(job, image, _sources(job, filtered), folder, attempt)
    return Written(files=files, body=job.plan.body, digests=digests, tables=job.plan.tables)


def _own_blocks(job: SaveJob) -> list[FilteredBlock]:
    """The planned blocks without those that other ranks write."""
    blocks = enumerate(job.plan.image.blocks)
    return [
        FilteredBlock(number=number, spec=placed.spec, data=None)
        for number, placed in blocks
        if not is_elsewhere(job, number)
    ]


def _is_partial_elsewhere(job: SaveJob) -> bool:
    """Whether there are rows to leave out of tables that are not in regions."""
    in_regions = {table.region.table for table in job.staged.tables} if job.staged is not None else set()
    return any(not chosen.is_whole and chosen.table not in in_regions for chosen in job.choice.tables)


# -- from the arena ----------------------------------------------------------------------------------------------------


def _drain(job: SaveJob, selections: Selections, folder: Directory, attempt: Attempt) -> Written:
    assert job.staged is not None
    plan, staged = job.plan, job.staged
    files_count = len(plan.image.files) + len(plan.open.tables)
    parallel, rank = job.target.options.parallel, job.target.rank
    tables = [table for table in staged.tables if table.facts.name not in job.elsewhere.tables]
    regions = job.target.region_files.plan(tables, parallel=parallel, rank=rank, first_file=files_count)
    job.future.expect_bytes(plan.files_bytes + sum(file.bytes for file in regions.files))
    # Open tables first: until their rows are out, the old values of rows that change take memory.
    exported, late_digests = _export(job, folder, attempt)
    is_first = not (regions.files or exported)
    streamed = _stream_own(job, folder, attempt, needs_file=is_first) if job.elsewhere else None
    arena = staged.arena
    image = plan.image if streamed is None else NO_IMAGE
    files, digests = drain_image(
        ArenaImage(plan=image, base=staged.base, regions=regions, address=arena.address, raw=arena.view()),
        folder=folder,
        attempt=attempt,
        options=job.target.options,
        progress=job.future.native_progress,
    )
    planned = streamed or Written(
        files=files[: len(image.files)],
        body=plan.body,
        digests=digests[: len(image.blocks)],
        tables=plan.tables,
        structure=plan.structure,
    )
    body = planned.body
    if regions.blocks:
        body = extend_body(body, tables=_facts(job), blocks=regions.blocks)
    return Written(
        files=planned.files + exported + files[len(image.files) :],
        body=body,
        digests=np.concatenate([planned.digests, late_digests, digests[len(image.blocks) :]]),
        tables=_facts(job),
        structure=planned.structure,
        prints=selections.prints,
        missed=selections.missed,
    )


def _stream_own(job: SaveJob, folder: Directory, attempt: Attempt, *, needs_file: bool) -> Written:
    """The planned part of the arena without what other ranks write; in as many files as were planned.

    Only until the ranks have agreed who writes what: then such blocks are not captured any more.
    """
    blocks = _own_blocks(job)
    specs = [block.spec for block in blocks]
    planned = job.plan.image
    image = plan_image(
        specs,
        parallel=job.target.options.parallel,
        rank=job.target.rank,
        needs_file=needs_file,
        files_count=len(planned.files),
    )
    sources = _sources(job, Filtered())
    files, digests = _stream(job, image, [sources[block.number] for block in blocks], folder, attempt)
    body = render_body(_facts(job), job.tree, [*image.blocks, *job.plan.open.blocks])
    return Written(files=files, body=body, digests=digests, tables=job.plan.tables)


def _facts(job: SaveJob) -> tuple[TableFacts, ...]:
    """Of all tables, in the order of the cuts."""
    captured = {table.facts.name: table.facts for table in (job.staged.tables if job.staged is not None else ())}
    planned = {facts.name: facts for facts in job.plan.tables}
    own = [item.name for item in job.cut.tables if item.name not in job.elsewhere.tables]
    return tuple((captured | planned)[name] for name in own)


def _export(job: SaveJob, folder: Directory, attempt: Attempt) -> tuple[tuple[FileFacts, ...], Digests]:
    """Write the tables that were left open."""
    opened = job.plan.open
    if not opened.tables:
        return (), np.empty((0, DIGEST_BYTES), dtype=np.uint8)
    cuts = [cast(OpenCut, job.cut.tables[item.table].cut) for item in opened.tables]
    with chunk_buffers.borrow(CHUNK_BYTES) as buffers:
        return export_tables(
            opened,
            cuts,
            buffers=buffers,
            writer=workers,
            folder=folder,
            attempt=attempt,
            options=job.target.options,
            progress=job.future.native_progress,
        )


# -- through chunk buffers ---------------------------------------------------------------------------------------------


def _write_filtered(
    job: SaveJob, blocks: list[FilteredBlock], sources: list[ByteSource], folder: Directory, attempt: Attempt
) -> Written:
    """What the user's filter function left, as it left it."""
    chosen = [tensor_source(b.data) if b.data is not None else sources[b.number] for b in blocks]
    replaced = {number for number, item in enumerate(blocks) if item.data is not None}
    tables = filtered_tables(job, blocks)
    return _write_blocks(job, [b.spec for b in blocks], chosen, tables, folder, attempt, replaced=replaced)


def _write_chosen_rows(
    job: SaveJob, filtered: Filtered, selections: Selections, folder: Directory, attempt: Attempt
) -> Written:
    """Rows left out, columns stored otherwise."""
    tables = staged_tables(job, filtered, selections)
    state = run_row_filters(
        job.target.filters, tables, staged_dense(job, filtered), go_on=lambda: _raise_if_cancelled(job)
    )
    _check_parents(job, state.tables)
    specs = [block.spec for block in state.blocks]
    sources = [block.source for block in state.blocks]
    written = _write_blocks(job, specs, sources, state.tables, folder, attempt)
    return replace(written, prints=selections.prints, missed=selections.missed)


def _raise_if_cancelled(job: SaveJob) -> None:
    if job.future.native_progress.cancelled:
        raise SaveCancelledError(f"save of step {job.step} was cancelled")


def _check_parents(job: SaveJob, tables: Sequence[TableFacts]) -> None:
    """What is laid over a table of the parents has the name that it has there."""
    base = job.choice.base
    for facts in tables:
        if not facts.whole and (base is None or facts.name not in base.tables):
            raise FilterError(
                f"filter gave a table another name ({facts.name!r}) in a delta than in what it builds upon",
                hint="save a full checkpoint when names change: kind='full'",
            )


def _write_blocks(
    job: SaveJob,
    specs: Sequence[BlockSpec],
    sources: Sequence[ByteSource],
    tables: Sequence[TableFacts],
    folder: Directory,
    attempt: Attempt,
    *,
    replaced: Collection[int] = (),
) -> Written:
    image = plan_image(specs, parallel=job.target.options.parallel, rank=job.target.rank)
    job.future.expect_bytes(sum(file.bytes for file in image.files))
    files, digests = _stream(job, image, sources, folder, attempt)
    body = render_body(tables, job.tree, image.blocks, filtered=replaced)
    return Written(files=files, body=body, digests=digests, tables=tuple(tables))


def _stream(
    job: SaveJob, image: ImagePlan, sources: Sequence[ByteSource], folder: Directory, attempt: Attempt
) -> tuple[tuple[FileFacts, ...], Digests]:
    with chunk_buffers.borrow(max((file.bytes for file in image.files), default=0)) as buffers:
        return stream_sources(
            image,
            sources,
            buffers=buffers,
            writer=workers,
            folder=folder,
            attempt=attempt,
            options=job.target.options,
            progress=job.future.native_progress,
        )


def _sources(job: SaveJob, filtered: Filtered) -> list[ByteSource]:
    """Where the bytes of every planned block are: in the arena, in live memory, or in the copy a filter looked at."""
    if job.staged is not None:
        base = job.staged.arena.address + job.staged.base
        return [SpanSource(base + int(offset), job.staged.arena) for offset in job.plan.image.offsets]
    sources = live_sources(job.plan, job.cut.flat, job.cut.tables)
    for number, fetch in enumerate(filtered.fetches):
        if fetch.copied is not None:
            sources[number] = tensor_source(fetch.copied)
    return sources
