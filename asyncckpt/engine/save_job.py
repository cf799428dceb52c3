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
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from asyncckpt.commit.publish import abandon_attempt, begin_attempt, publish
from asyncckpt.commit.retention import keep_latest, sweep
from asyncckpt.engine.background import workers
from asyncckpt.engine.filtering import filter_blocks
from asyncckpt.engine.future import FutureState
from asyncckpt.engine.handover import short_handovers
from asyncckpt.engine.job import SaveJob
from asyncckpt.engine.lock import save_lock
from asyncckpt.engine.messages import log_exception, log_warning
from asyncckpt.engine.running_compactions import running_compactions
from asyncckpt.engine.saver_chain import ChainLink, TableLink
from asyncckpt.engine.write_files import Written, write_files
from asyncckpt.errors import CheckpointError, ConflictError, IndeterminateError, IOFailedError, SaveCancelledError
from asyncckpt.format.manifest import FileFacts, ManifestHead, ParentFacts, encode_manifest, written_digest
from asyncckpt.format.names import Attempt, compacted_manifest_name, manifest_name
from asyncckpt.model.result import SaveResult
from asyncckpt.pipeline.filters import identity
from asyncckpt.staging.pool import pool
from asyncckpt.storage.directory import io_failed

try:
    WRITER = f"asyncckpt {version('asyncckpt')}"
except PackageNotFoundError:  # Run from a source tree that was never installed.
    WRITER = "asyncckpt"


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
    staged = job.staged
    if staged is None or not job.target.tables:
        return
    try:
        limit_bytes = job.target.options.host_memory_limit
        pool.touch_ahead(staged.arena, staged.base + job.plan.arena_bytes, limit_bytes=limit_bytes)
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
    if job.staged is not None:
        pool.release(job.staged.arena)
        job.staged = None
    if job.choice.base is not None:
        job.target.parent_steps.remove(job.choice.base.parent.step)
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
    attempt = Attempt.new(job.step)
    root, options = job.target.root, job.target.options
    _sweep(job, attempt)
    loop = asyncio.get_running_loop()
    if job.target.filter_func is not identity:
        _go_on(job, FutureState.FILTERING)
    filtered = await loop.run_in_executor(workers, filter_blocks, job)
    job.target.check_not_in_doubt()  # A save that was queued behind the one in doubt.
    _go_on(job, FutureState.WRITING)
    folder = begin_attempt(root, attempt)
    try:
        written = await loop.run_in_executor(workers, write_files, job, filtered, folder, attempt)
        _go_on(job, FutureState.COMMITTING)
        head = _head(job, attempt, written.files)
        raw = encode_manifest(head, written.body, written.digests)
        durable = options.durability == "fsync"
        _check_parents(job)
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
    bytes_written = sum(file.bytes for file in written.files) + len(raw)
    parent = ParentFacts(step=job.step, attempt=attempt.id, digest=written_digest(raw))
    job.target.chain.newest = _link(job, parent, written, bytes_written)
    job.target.heads.add(head)
    _retain(job)
    return SaveResult(
        step=job.step,
        kind=job.choice.kind,
        path=root.path,
        fallback=job.fallback,
        stall_seconds=job.stall_seconds if job.staged is not None else seconds,
        seconds=seconds,
        bytes_logical=_logical_bytes(job),
        bytes_written=bytes_written,
        rows_count=sum(facts.rows_count for facts in written.tables),
        rows_copied=_rows_copied(job),
        missed_ids=written.missed,
    )


def _link(job: SaveJob, parent: ParentFacts, written: Written, bytes_written: int) -> ChainLink:
    """What the next delta builds upon, now that this save has committed."""
    names = {facts.name for facts in written.tables}
    tables = {
        item.name: TableLink(
            schema=item.schema,
            shard=item.table.shard,
            version=job.versions.get(item.name),
            prints=written.prints.get(item.name),
        )
        for item in job.cut.tables
        if item.name in names
    }
    base = job.choice.base
    if base is None:
        return ChainLink(parent, (), tables, full_bytes=bytes_written, full_time=time.monotonic())
    return replace(
        base,
        parent=parent,
        parents=base.chain,
        tables=tables,
        deltas_count=base.deltas_count + 1,
        deltas_bytes=base.deltas_bytes + bytes_written,
    )


def _logical_bytes(job: SaveJob) -> int:
    """Bytes of the tensors and rows that were captured."""
    tables = job.staged.tables if job.staged is not None else ()
    return job.plan.logical_bytes + sum(table.payload_bytes for table in tables)


def _rows_copied(job: SaveJob) -> int:
    tables = job.staged.tables if job.staged is not None else ()
    return sum(facts.rows_count for facts in job.plan.tables) + sum(table.copied_count for table in tables)


def _check_parents(job: SaveJob) -> None:
    """Before a delta is published: what it builds upon is still there, down to a full checkpoint."""
    base, root = job.choice.base, job.target.root
    for parent in base.chain if base is not None else ():
        if root.manifests.exists(compacted_manifest_name(parent.step)):
            return
        if not root.manifests.exists(manifest_name(parent.step)):
            raise ConflictError(
                f"step {parent.step}, which the delta of step {job.step} builds upon, is not there any more",
                hint="save a full checkpoint: kind='full'",
            )


def _go_on(job: SaveJob, state: FutureState) -> None:
    if not job.future.enter(state):
        raise SaveCancelledError(f"save of step {job.step} was cancelled")


def _sweep(job: SaveJob, attempt: Attempt) -> None:
    """What cannot be swept is in nobody's way."""
    try:
        sweep(job.target.root, job.target.heads, keep_attempts=running_compactions.beside(attempt))
    except CheckpointError as error:
        log_warning("leftovers in %s were kept: %s", job.target.root.path, error)


def _retain(job: SaveJob) -> None:
    count = job.target.options.keep_latest
    if count is None:
        return
    protected = {*job.target.protected(), *job.target.parent_steps, job.step}
    try:
        keep_latest(job.target.root, job.target.heads, count=count, protected=protected)
    except Exception as error:  # Whatever it is, the new checkpoint is committed.
        log_warning("old checkpoints in %s were kept: %s", job.target.root.path, error)


def _head(job: SaveJob, attempt: Attempt, files: tuple[FileFacts, ...]) -> ManifestHead:
    return ManifestHead(
        step=job.step,
        kind=job.choice.kind,
        parents=() if job.choice.base is None else job.choice.base.chain,
        attempt=attempt.id,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        writer=WRITER,
        ranks_count=1,
        files=files,
        values=job.values,
        metadata=job.metadata,
    )
