"""Write the shard files of a save, from wherever its state is.

    the state            is written
    in deferred tables   window by window, before all else
    in an arena          by draining the arena: no second copy
    live                 block by block through chunk buffers, while the caller waits

Where a feature chooses what is written, features/chosen_blocks.py does it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from asyncckpt.engine.process.background import senders, writers
from asyncckpt.engine.process.future import FutureState
from asyncckpt.engine.save.save_job import SaveJob, Written
from asyncckpt.format.head import FileFacts
from asyncckpt.format.names import Attempt
from asyncckpt.format.write_manifest import BodyTemplate, extend_body
from asyncckpt.model.block import TableFacts
from asyncckpt.model.source import ByteSource
from asyncckpt.native import DIGEST_BYTES, U8, row_begins
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.plan.image import ImagePlan
from asyncckpt.shard import stream as chunks
from asyncckpt.shard.files import ShardTarget, drain_images
from asyncckpt.snapshot.block_data import live_data
from asyncckpt.staging.chunks import chunk_buffers
from asyncckpt.storage.directory import Directory

if TYPE_CHECKING:
    from asyncckpt.model.table import DeferredCut
    from asyncckpt.storage.store_folder import StoreFolder

Exported = tuple[tuple[FileFacts, ...], U8]
NOTHING_EXPORTED: Exported = (), np.empty((0, DIGEST_BYTES), dtype=np.uint8)


def write_files(job: SaveJob, folder: Directory | StoreFolder, attempt: Attempt) -> Written:
    """Write all shard files. On a worker thread."""
    writing = time.perf_counter()
    try:
        options, progress = job.target.options, job.future.native_progress
        return job.write(job, ShardTarget(folder, attempt, options, progress, job.recorder, sender=senders))
    finally:
        job.note("write", writing)


def write_planned(job: SaveJob, target: ShardTarget) -> Written:
    """Write what was planned, all of it, as it is."""
    job.enter(FutureState.WRITING)
    if job.staged is not None:
        return _drain(job, target)
    plan = job.plan
    sources = [data.source() for data in live_data(plan, job.cut.flat, job.cut.tables)]
    return stream(job, plan.image, plan.body, plan.tables, sources, target)


def _drain(job: SaveJob, target: ShardTarget) -> Written:
    assert job.staged is not None
    plan, options, captured = job.plan, job.target.options, job.captured
    images, tables, body = [(plan.image, job.staged.base)], plan.tables, plan.body
    if captured:
        first_file = len(plan.deferred.tables) + len(plan.image.files)
        regions = job.target.memory.region_files.plan(
            captured, parallel=options.parallel, rank=job.target.rank, first_file=first_file
        )
        images.append((regions, 0))
        tables = in_order(job, (*plan.tables, *(table.facts for table in captured)))
        body = extend_body(plan.body, tables=tables, blocks=regions.blocks)
    expected = sum(file.bytes for image, _ in images for file in image.files)
    exported, late_digests = _export(job, target, expected)
    files, digests = drain_images(images, job.staged.arena.view(), target)
    if len(late_digests):  # They come after those of the plan.
        count = int(row_begins(plan.image.lengths)[-1])
        digests = np.concatenate([digests[:count], late_digests, digests[count:]])
    return Written(files=exported + files, body=body, digests=digests, tables=tables, dense_structure=plan.structure)


def in_order(job: SaveJob, facts: Sequence[TableFacts]) -> tuple[TableFacts, ...]:
    """Return tables in the order of the cuts; those that a filter has renamed after them."""
    places = {item.name: number for number, item in enumerate(job.cut.tables)}
    return tuple(sorted(facts, key=lambda item: places.get(item.name, len(places))))


def stream(
    job: SaveJob,
    image: ImagePlan,
    body: BodyTemplate,
    tables: tuple[TableFacts, ...],
    sources: Sequence[ByteSource],
    target: ShardTarget,
) -> Written:
    """Write blocks through chunk buffers, each from its source."""
    exported, late_digests = _export(job, target, sum(file.bytes for file in image.files))
    with chunk_buffers.borrow(max((file.bytes for file in image.files), default=0)) as buffers:
        files, digests = chunks.stream_sources(image, sources, target, buffers=buffers, writer=writers)
    return Written(files=exported + files, body=body, digests=np.concatenate([digests, late_digests]), tables=tables)


def _export(job: SaveJob, target: ShardTarget, other_bytes: int) -> Exported:
    """Write the deferred tables; first, because until then the old values of rows that change take memory."""
    deferred = job.plan.deferred
    job.future.bytes_total = other_bytes + deferred.files_bytes
    if not deferred.tables:
        return NOTHING_EXPORTED
    cuts = [cast("DeferredCut", job.cut.tables[item.table].cut) for item in deferred.tables]
    with chunk_buffers.borrow(CHUNK_BYTES, least=CHUNK_BYTES) as buffers:
        return chunks.export_tables(deferred, cuts, target, buffers=buffers.addresses, writer=writers)
