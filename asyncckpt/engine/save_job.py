"""The background half of a save: filter, write, commit, retention.

1. Filter the staged blocks; without changes the arena is drained as it is, else a new image is streamed.
2. Write the shard files into a new attempt's folder.
3. Publish the manifest; the save is acknowledged.
4. Let old checkpoints go. A failure here is a warning: the new checkpoint stands.
5. Give back arena and lock, then resolve the future.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.commit.publish import abandon_attempt, begin_attempt, publish
from asyncckpt.commit.retention import keep_latest, sweep
from asyncckpt.engine.background import workers
from asyncckpt.engine.future import FutureState
from asyncckpt.engine.handover import short_handovers
from asyncckpt.engine.lock import save_lock
from asyncckpt.engine.messages import log_exception, log_warning
from asyncckpt.engine.save_request import SaveJob
from asyncckpt.errors import CheckpointError, IndeterminateError, IOFailedError, SaveCancelledError
from asyncckpt.format.manifest import BodyTemplate, FileFacts, ManifestHead, encode_manifest, render_body
from asyncckpt.format.names import Attempt
from asyncckpt.model.block import TableFacts
from asyncckpt.model.result import SaveResult
from asyncckpt.model.source import ByteSource
from asyncckpt.model.table import OpenCut, Role
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.native import DIGEST_BYTES
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.pipeline.filters import FilteredBlock, identity, run_filter
from asyncckpt.plan.image import ImagePlan, plan_image
from asyncckpt.shard.drain import drain_image
from asyncckpt.shard.export import export_tables
from asyncckpt.shard.stream import stream_sources
from asyncckpt.snapshot.capture import block_tensor, live_block, live_sources
from asyncckpt.snapshot.source import SpanSource, tensor_source
from asyncckpt.staging.chunks import chunk_buffers
from asyncckpt.staging.pool import pool
from asyncckpt.storage.directory import Directory, io_failed

try:
    WRITER = f"asyncckpt {version('asyncckpt')}"
except PackageNotFoundError:  # Run from a source tree that was never installed.
    WRITER = "asyncckpt"


@dataclass
class Written:
    """Shard files on disk, and what the manifest says of their blocks: digests are uint8 [blocks, 16]."""

    files: tuple[FileFacts, ...]
    body: BodyTemplate
    digests: NDArray[np.uint8]


async def run_save(job: SaveJob) -> None:
    """Take one save to its end and tell its future. Never raises."""
    try:
        with short_handovers():
            result = await _save(job)
    except BaseException as error:
        lose_save(job, error)
    else:
        try:
            _touch_ahead(job)
            end_save(job, ok=True)
        finally:
            job.future.resolve(result, FutureState.COMMITTED)


def _touch_ahead(job: SaveJob) -> None:
    """Tables grow: let the next save find its memory touched, rather than pay for that in its stall."""
    if job.arena is None or not job.plan.tables:
        return
    try:
        pool.touch_ahead(job.arena, job.plan.arena_bytes, limit_bytes=job.target.options.host_memory_limit)
    except (MemoryError, OSError) as error:
        log_warning("memory for growing tables was not made ready: %s", error)


def lose_save(job: SaveJob, error: BaseException) -> None:
    """End a save that has failed, and tell its future."""
    try:
        end_save(job, ok=False)
    finally:
        cancelled = isinstance(error, SaveCancelledError)
        job.future.fail(as_ours(error, job.step), FutureState.CANCELLED if cancelled else FutureState.FAILED)


def end_save(job: SaveJob, *, ok: bool) -> None:
    """Give back everything the save holds; afterwards the next save may begin."""
    try:
        job.cut.fence()
        job.cut.end(ok=ok)
    except Exception:
        log_exception("a table did not end its cut of step %d", job.step)
    if job.arena is not None:
        pool.release(job.arena)
        job.arena = None
    save_lock.release(job.ticket)


def as_ours(error: BaseException, step: int | None) -> BaseException:
    """An error of the system that passed no door, as one of this library; others as they are."""
    save = "the save" if step is None else f"the save of step {step}"
    if isinstance(error, MemoryError):
        wrapped = IOFailedError(f"{save} ran out of memory", hint="lower host_memory_limit, or use save()")
    elif isinstance(error, OSError) and not isinstance(error, CheckpointError):
        wrapped = io_failed(f"{save} failed", error)
    else:
        return error
    wrapped.__cause__ = error
    return wrapped


async def _save(job: SaveJob) -> SaveResult:
    root, options = job.target.root, job.target.options
    attempt = Attempt.new(job.step)
    _sweep(job, attempt)
    filtered = await _filter(job)
    job.target.check_not_in_doubt()  # A save that was queued behind the one in doubt.
    _go_on(job, FutureState.WRITING)
    folder = begin_attempt(root, attempt)
    try:
        loop = asyncio.get_running_loop()
        written = await loop.run_in_executor(workers, _write, job, filtered, folder, attempt)
        _go_on(job, FutureState.COMMITTING)
        head = _head(job, attempt, written.files)
        raw = encode_manifest(head, written.body, written.digests)
        durable = options.durability == "fsync"
        await publish(root, folder, attempt, raw, durable=durable, threads=workers)
    except IndeterminateError as error:
        job.target.in_doubt.append(error)
        raise  # The manifest may be there: its data must stay.
    except BaseException:
        abandon_attempt(root, attempt)
        raise
    finally:
        folder.close()
    seconds = time.perf_counter() - job.begun
    job.target.heads.add(head)
    _retain(job)
    return SaveResult(
        step=job.step,
        kind="full",
        path=root.path,
        fallback=job.fallback,
        stall_seconds=job.stall_seconds if job.arena is not None else seconds,
        seconds=seconds,
        bytes_logical=job.plan.logical_bytes,
        bytes_written=sum(file.bytes for file in written.files) + len(raw),
    )


def _go_on(job: SaveJob, state: FutureState) -> None:
    if not job.future.enter(state):
        raise SaveCancelledError(f"save of step {job.step} was cancelled")


def _sweep(job: SaveJob, attempt: Attempt) -> None:
    """What cannot be swept is in nobody's way."""
    try:
        sweep(job.target.root, job.target.heads, keep_attempts=(attempt.id,))
    except CheckpointError as error:
        log_warning("leftovers in %s were kept: %s", job.target.root.path, error)


def _retain(job: SaveJob) -> None:
    count = job.target.options.keep_latest
    if count is None:
        return
    try:
        keep_latest(job.target.root, job.target.heads, count=count, protected={*job.target.protected(), job.step})
    except Exception as error:  # Whatever it is, the new checkpoint is committed.
        log_warning("old checkpoints in %s were kept: %s", job.target.root.path, error)


def _head(job: SaveJob, attempt: Attempt, files: tuple[FileFacts, ...]) -> ManifestHead:
    return ManifestHead(
        step=job.step,
        kind="full",
        parents=(),
        attempt=attempt.id,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        writer=WRITER,
        ranks_count=1,
        files=files,
        values=job.values,
        metadata=job.metadata,
    )


# -- filter ------------------------------------------------------------------------------------------------------------


class _Fetch:
    """The data of one block for a filter. From live memory it is copied, and the copy is what gets written."""

    def __init__(self, job: SaveJob, number: int, live: ByteSource | None) -> None:
        self._job = job
        self._number = number
        self._live = live
        self.copied: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        job, number = self._job, self._number
        if job.arena is not None:
            return block_tensor(job.plan, number, job.arena.view())
        if self.copied is None:
            self.copied = live_block(job.plan, job.cut.flat, job.cut.tables, number)
        return self.copied


@dataclass
class _Filtered:
    """What the filter left of the plan (None: everything), and the copies it has looked at."""

    blocks: list[FilteredBlock] | None
    fetches: list[_Fetch]


async def _filter(job: SaveJob) -> _Filtered:
    function = job.target.filter_func
    if function is identity:
        return _Filtered(blocks=None, fetches=[])
    _go_on(job, FutureState.FILTERING)
    fetches = [_Fetch(job, number, None) for number in range(len(job.plan.image.blocks))]
    blocks = [WriteBlock(placed.spec, fetch) for placed, fetch in zip(job.plan.image.blocks, fetches, strict=True)]
    loop = asyncio.get_running_loop()
    return _Filtered(blocks=await loop.run_in_executor(workers, run_filter, function, blocks), fetches=fetches)


# -- write -------------------------------------------------------------------------------------------------------------


def _write(job: SaveJob, filtered: _Filtered, folder: Directory, attempt: Attempt) -> Written:
    """On a worker thread: write all shard files."""
    image = job.plan.image
    job.future.expect_bytes(job.plan.files_bytes)
    if job.arena is not None and filtered.blocks is None:
        # Open tables first: until their rows are out, the old values of rows that change take memory.
        exported, late_digests = _export(job, folder, attempt)
        files, digests = drain_image(
            image,
            address=job.arena.address,
            image=job.arena.view(),
            folder=folder,
            attempt=attempt,
            options=job.target.options,
            progress=job.future.native_progress,
        )
        return Written(files=files + exported, body=job.plan.body, digests=np.concatenate([digests, late_digests]))
    sources = _sources(job, filtered)
    if filtered.blocks is None:
        files, digests = _stream(job, image, sources, folder, attempt)
        return Written(files=files, body=job.plan.body, digests=digests)
    return _write_filtered(job, filtered.blocks, sources, folder, attempt)


def _export(job: SaveJob, folder: Directory, attempt: Attempt) -> tuple[tuple[FileFacts, ...], NDArray[np.uint8]]:
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


def _write_filtered(
    job: SaveJob, blocks: list[FilteredBlock], sources: list[ByteSource], folder: Directory, attempt: Attempt
) -> Written:
    specs = [item.spec for item in blocks]
    image = plan_image(specs, parallel=job.target.options.parallel, rank=0)
    chosen = [tensor_source(b.data) if b.data is not None else sources[b.number] for b in blocks]
    files, digests = _stream(job, image, chosen, folder, attempt)
    shards = {item.name: item.table.shard for item in job.cut.tables}
    tables = {}
    for item in blocks:
        if item.spec.role is Role.ID and item.spec.table is not None:
            rows_count = (item.spec.whole_shape or item.spec.shape)[0]
            original = job.plan.image.blocks[item.number].spec.table
            shard = shards[str(original)]
            tables[item.spec.table] = TableFacts(name=item.spec.table, rows_count=rows_count, shard=shard)
    replaced = {number for number, item in enumerate(blocks) if item.data is not None}
    body = render_body(tuple(tables.values()), job.tree, image.blocks, filtered=replaced)
    return Written(files=files, body=body, digests=digests)


def _stream(
    job: SaveJob, image: ImagePlan, sources: list[ByteSource], folder: Directory, attempt: Attempt
) -> tuple[tuple[FileFacts, ...], NDArray[np.uint8]]:
    with chunk_buffers.borrow(max(file.bytes for file in image.files)) as buffers:
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


def _sources(job: SaveJob, filtered: _Filtered) -> list[ByteSource]:
    """Where the bytes of every block are: in the arena, in live memory, or in the copy a filter has looked at."""
    if job.arena is not None:
        base = job.arena.address
        return [SpanSource(base + int(offset), job.arena) for offset in job.plan.image.offsets]
    sources = live_sources(job.plan, job.cut.flat, job.cut.tables)
    for number, fetch in enumerate(filtered.fetches):
        if fetch.copied is not None:
            sources[number] = tensor_source(fetch.copied)
    return sources
