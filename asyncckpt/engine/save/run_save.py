"""The background half of a save: write, commit, and let the caller know.

1. Wait for what is still copied into the arena, by devices or after the call.
2. Make the attempt's folder.
3. Write the shard files (write_files.py).
4. Publish the manifest; the save is acknowledged.
5. Give back arena, step and lock, then resolve the future.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from asyncckpt.commit.attempt import Draft
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.process.background import committer, run_on, workers
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.engine.process.log import log_exception, log_warning
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.engine.save.save_job import ChainLink, Committed, SaveJob, SkippedByPeer, TableLink
from asyncckpt.engine.save.write_files import write_files
from asyncckpt.errors import ConflictError
from asyncckpt.model.result import SaveResult

MISSED_IDS_MAX = 100


async def run_save(job: SaveJob) -> None:
    """Take one save to its end and resolve its future. Never raises."""
    job.begun_us = job.since_call_us()
    if job.recorder is not None:
        job.recorder.flow()
    try:
        if job.pending is not None:
            waiting = time.perf_counter()
            await run_on(workers, job.pending.settle)
            job.note("devices", waiting)
            job.staged_at = time.monotonic()
            job.future.mark_staged()
        for feature in job.features:
            await feature.before_files(job)
        committed = await job.commit(job)
        if isinstance(committed, Committed):
            _link(job, committed)
            for feature in job.features:
                feature.committed(job, committed)
            result = _result(job, committed)
    except BaseException as error:
        fail_save(job, error)
        return
    try:
        if job.target.tables:
            _touch_ahead(job)
        end_save(job, ok=isinstance(committed, Committed))
    finally:
        if isinstance(committed, SkippedByPeer):
            log_warning("save of step %d was skipped by rank %s: %s", job.step, committed.rank, committed.cause)
            job.future.skip(seconds=time.perf_counter() - job.begun, stall_seconds=job.stall_seconds)
        else:
            job.future.resolve(result)


def _touch_ahead(job: SaveJob) -> None:
    """Touch memory into which tables may grow, so that the next save does not pay for it in its stall."""
    staged = job.staged
    if staged is None:
        return
    try:
        limit_bytes = job.target.options.host_memory_limit
        staged.arenas.touch_ahead(staged.arena, staged.base + job.plan.arena_bytes, limit_bytes=limit_bytes)
    except (MemoryError, OSError) as error:
        log_warning("memory into which tables of %s may grow was not made ready: %s", job.target.root.path, error)


def fail_save(job: SaveJob, error: BaseException) -> None:
    """End a save that has failed, and its future."""
    try:
        end_save(job, ok=False)
    finally:
        job.future.fail(as_checkpoint_error(error, job.step, job.future.path))


def end_save(job: SaveJob, *, ok: bool) -> None:
    """Give back everything the save holds, whatever its tables raise; afterwards the next save may begin."""
    with ExitStack() as left:
        left.callback(save_lock.release, job.ticket)
        left.callback(job.claim.release)
        staged, job.staged = job.staged, None
        if staged is not None:
            left.callback(staged.give_back)
        try:
            job.cut.end(ok=ok)
        except Exception:
            log_exception("a table did not end its cut of step %d", job.step)


async def commit_alone(job: SaveJob) -> Committed:
    """Write and commit a save that no other rank takes part in."""
    transaction = await run_on(committer, Transaction.begin, job.target.commits, job.claim, job.recorder)
    parents = () if job.base is None else job.base.chain
    try:
        written = await run_on(workers, write_files, job, transaction.place, transaction.attempt)
        await job.begin_commit()
        head = transaction.head(
            files=written.files, values=job.values, metadata=job.call.metadata, parents=parents, times=job.times()
        )
        draft = Draft(head, written.body, written.digests, structures=(written.structure,))
        published = await transaction.commit(draft, job.recorder)
    except BaseException as error:
        newest = job.target.memory.newest
        if isinstance(error, ConflictError) and parents and newest is not None and newest.parent == parents[0]:
            job.target.memory.newest = None  # Others have removed what deltas build upon: the next save is a full one.
        await transaction.give_up()
        raise
    return Committed(written, transaction.attempt, published.parent, parents, published.manifest_bytes)


def _link(job: SaveJob, committed: Committed) -> None:
    """Note the base of the next delta, now that this save has committed; nothing: the next save is a full one."""
    memory, written, base = job.target.memory, committed.written, job.base
    if committed.parent is None:
        memory.newest = None
        return
    names = {facts.name for facts in written.tables}
    tables = {
        item.name: TableLink(
            schema=item.schema,
            shard=item.shard,
            version=job.cut.versions.get(item.name),
            fingerprints=written.fingerprints.get(item.name),
            written_as=written.written_as.get(item.name),
        )
        for item in job.cut.tables
        if item.name in names
    }
    parents, full_time = committed.parents, time.monotonic()
    bytes: tuple[int, ...] = (committed.bytes_written,)
    if base is not None:
        base = base.ending(len(parents))
        parents, bytes, full_time = base.chain, (*bytes, *base.bytes), base.full_time
    elif parents:  # This rank has written all of its tables into the delta of others.
        bytes = (*(0 for _ in parents), *bytes)
    memory.newest = ChainLink(committed.parent, parents, tables, bytes, full_time)


def _result(job: SaveJob, committed: Committed) -> SaveResult:
    seconds = time.perf_counter() - job.begun
    written = committed.written
    return SaveResult(
        step=job.step,
        kind="delta" if committed.parents else "full",
        path=job.target.root.path,
        fallback=job.fallback,
        stall_seconds=job.stall_seconds if job.staged is not None else seconds,
        step_wait_seconds=0.0 if job.pending is None else job.pending.steps.waited_seconds,
        seconds=seconds,
        bytes_logical=job.plan.logical_bytes + sum(table.payload_bytes for table in job.captured),
        bytes_written=committed.bytes_written,
        rows_count=sum(facts.rows_count for facts in written.tables),
        rows_copied=sum(facts.rows_count for facts in job.plan.tables)
        + sum(table.copied_count for table in job.captured),
        missed_ids={table: tuple(ids[:MISSED_IDS_MAX].tolist()) for table, ids in written.missed.items()},
        waits_for=committed.waits_for,
    )
