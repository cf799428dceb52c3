"""The background half of a save: filter, write, commit, retention.

1. Wait for what is still copied into the arena, by devices or behind the call, and for retention if that is far behind.
2. Make the attempt's folder.
3. Filter the staged blocks, and write the shard files: without changes the arena is drained as it is, else a new image
   is streamed.
4. Publish the manifest; the save is acknowledged.
5. Begin to let old checkpoints go, on another thread. A failure there is a warning: the new checkpoint stands.
6. Give back arena, step and lock, then resolve the future.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from asyncckpt.commit.attempt import Draft
from asyncckpt.commit.chain import newest_verified
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.coordination.messages import Outcome
from asyncckpt.engine.process.background import committer, run_on, workers
from asyncckpt.engine.process.future import FutureState, as_checkpoint_error
from asyncckpt.engine.process.held_directory import start_retention
from asyncckpt.engine.process.log import log_exception, log_warning
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.engine.ranks.in_turn import save_in_turn
from asyncckpt.engine.ranks.rank_save import save_with_ranks
from asyncckpt.engine.save.delta_chain import ChainLink, TableLink
from asyncckpt.engine.save.save_job import Committed, SaveJob
from asyncckpt.engine.save.write_files import write_files
from asyncckpt.errors import ConflictError
from asyncckpt.model.result import SaveResult
from asyncckpt.native import I64
from asyncckpt.staging.pool import pool

RETENTIONS_BEHIND_MAX = 8
RETENTION_WAIT_S_MAX = 10.0
MISSED_IDS_MAX = 100


async def run_save(job: SaveJob) -> None:
    """Take one save to its end and resolve its future. Never raises."""
    job.begun_us = job.since_call_us()
    job.recorder.flow()
    try:
        result = await _save(job)
    except BaseException as error:
        fail_save(job, error)
    else:
        try:
            _touch_ahead(job)
            end_save(job, ok=not isinstance(result, Outcome))
        finally:
            if isinstance(result, Outcome):  # All ranks skip a save that one of them skips.
                log_warning("save of step %d was skipped, as rank %s did: %s", job.step, result.rank, result.cause)
                job.future.skip(seconds=time.perf_counter() - job.begun, stall_seconds=job.stall_seconds)
            else:
                job.future.resolve(result)


def _touch_ahead(job: SaveJob) -> None:
    """Touch memory into which tables may grow, so that the next save does not pay for it in its stall."""
    staged = job.staged
    if staged is None or not job.target.tables:
        return
    try:
        limit_bytes = job.target.options.host_memory_limit
        pool.touch_ahead(staged.arena, staged.base + job.plan.arena_bytes, limit_bytes=limit_bytes)
    except (MemoryError, OSError) as error:
        log_warning("memory for growing tables was not made ready: %s", error)


def fail_save(job: SaveJob, error: BaseException) -> None:
    """End a save that has failed, and its future."""
    try:
        end_save(job, ok=False)
    finally:
        job.future.fail(as_checkpoint_error(error, job.step))


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


async def _save(job: SaveJob) -> SaveResult | Outcome:
    if job.staged is not None:
        await run_on(workers, job.recorder.timed("devices", job.staged.pending.settle))
        job.staged_at = time.monotonic()
        job.future.mark_staged()
    share = job.cut.share
    await _let_retention_catch_up(job)
    committed: Committed | Outcome
    if share is None:
        committed = await _save_alone(job)
    else:
        committed = await (save_in_turn(job, share) if share.ranks.in_turn else save_with_ranks(job, share))
    if isinstance(committed, Outcome):
        return committed
    seconds = time.perf_counter() - job.begun
    written = committed.written
    if job.target.uploads.are_expected:
        job.future.expect_upload(partial(job.target.uploads.wait_for, committed.attempt))
    elif not isinstance(job.target.root, CheckpointRoot):
        job.future.expect_upload(lambda timeout: None)
    job.target.memory.newest = _link(job, committed)
    if committed.manifest_bytes and job.target.options.keep is not None:
        _start_retention(job)
    return SaveResult(
        step=job.step,
        kind="delta" if committed.parents else "full",
        path=job.target.root.path,
        fallback=job.fallback,
        stall_seconds=job.stall_seconds if job.staged is not None else seconds,
        step_wait_seconds=0.0 if job.staged is None else job.staged.pending.steps.waited_seconds,
        seconds=seconds,
        bytes_logical=job.plan.logical_bytes + sum(table.payload_bytes for table in job.captured),
        bytes_written=committed.bytes_written,
        rows_count=sum(facts.rows_count for facts in written.tables),
        rows_copied=sum(facts.rows_count for facts in job.plan.tables)
        + sum(table.copied_count for table in job.captured),
        missed_ids=_tell_missed(written.missed),
        waits_for=committed.waits_for,
    )


def _tell_missed(missed: Mapping[str, I64]) -> Mapping[str, tuple[int, ...]]:
    """Log by table the ids whose mark was missing, and return the first of each.

    When the save has committed: one that is refused may have copied what was written, and marked, after its call.
    """
    for table, ids in missed.items():
        log_warning(
            "%d rows of table %r were changed without a mark, the first one of id %d, in a way that torch does not "
            "count: write them by update(rows, function), or call touch(rows)",
            len(ids),
            table,
            int(ids[0]),
        )
    return {table: tuple(ids[:MISSED_IDS_MAX].tolist()) for table, ids in missed.items()}


async def _save_alone(job: SaveJob) -> Committed:
    transaction = await run_on(committer, Transaction.begin, job.target.commits, job.claim, job.recorder)
    parents = () if job.choice.base is None else job.choice.base.chain
    try:
        written = await run_on(workers, write_files, job, transaction.place, transaction.attempt)
        await job.let_writes_end()
        job.enter(FutureState.COMMITTING)
        facts = {"values": job.values, "metadata": job.metadata, "parents": parents, "times": job.times()}
        head = transaction.head(files=written.files, **facts)
        draft = Draft(head, written.body, written.digests, structures=(written.structure,))
        published = await transaction.commit(draft, job.recorder)
    except BaseException as error:
        newest = job.target.memory.newest
        if isinstance(error, ConflictError) and parents and newest is not None and newest.parent == parents[0]:
            job.target.memory.newest = None  # Others have removed what deltas build upon: the next save is a full one.
        await transaction.give_up()
        raise
    return Committed(written, transaction.attempt, published.parent, parents, published.manifest_bytes)


def _link(job: SaveJob, committed: Committed) -> ChainLink | None:
    """Return what the next delta builds upon, now that this save has committed; None: the next save is a full one."""
    if committed.parent is None:
        return None
    written = committed.written
    names = {facts.name for facts in written.tables}
    tables = {
        item.name: TableLink(
            schema=item.schema,
            shard=item.shard,
            version=job.cut.versions.get(item.name),
            fingerprints=written.fingerprints.get(item.name),
        )
        for item in job.cut.tables
        if item.name in names
    }
    base = job.choice.base
    if base is None:
        # With parents: this rank has written all of its tables into the delta of others.
        return ChainLink(
            committed.parent,
            committed.parents,
            tables,
            bytes=(*(0 for _ in committed.parents), committed.bytes_written),
            full_time=time.monotonic(),
        )
    base = base.ending(len(committed.parents))
    return replace(
        base,
        parent=committed.parent,
        parents=base.chain,
        tables=tables,
        bytes=(committed.bytes_written, *base.bytes),
    )


def _start_retention(job: SaveJob) -> None:
    target, step = job.target, job.step

    def protected() -> set[int]:
        newest = target.memory.newest  # The next delta may build upon it.
        return {
            step,
            *newest_verified(target.root, target.commits.heads),
            *(() if newest is None else (newest.parent.step,)),
        }

    timed = job.recorder.span("retention")
    started = start_retention(target.commits, target.options.keep, protected=protected, held=timed)
    if started is not None:
        target.memory.retention = started
        target.memory.behind.append(started)


async def _let_retention_catch_up(job: SaveJob) -> None:
    """Wait for the oldest of too many retentions: on a disk that saves faster than it removes they would never end.

    Other ranks wait meanwhile, so not until they call this one silent.
    """
    behind, share = job.target.memory.behind, job.cut.share
    while behind and behind[0].done():
        behind.popleft()
    if len(behind) < RETENTIONS_BEHIND_MAX:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # The loop has ended before.
            loop.call_soon_threadsafe(ended.set)

    behind[0].add_done_callback(wake)
    silence_s = RETENTION_WAIT_S_MAX if share is None else share.ranks.limits.silence_s / 2
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(ended.wait(), min(silence_s, RETENTION_WAIT_S_MAX))
