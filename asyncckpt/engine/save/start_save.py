"""The caller's half of a save: lock, plan, cut, capture, fence. The other half is run_save, in the background."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncckpt.commit.attempt import Claim, claims
from asyncckpt.devices.current_runtime import check_not_capturing
from asyncckpt.devices.fetch import wait_for
from asyncckpt.engine.process.background import Job, background, check_may_wait
from asyncckpt.engine.process.event_loop import check_may_block_here, check_may_wait_for, check_may_wait_here
from asyncckpt.engine.process.future import SaveFuture, as_checkpoint_error
from asyncckpt.engine.process.save_lock import Ticket, save_lock
from asyncckpt.engine.ranks.in_turn import claim_in_turn
from asyncckpt.engine.ranks.saver_ranks import announce_skipped
from asyncckpt.engine.save.delta_chain import ChainLink, Choice, choose_kind
from asyncckpt.engine.save.device_stage import host_copies, launch
from asyncckpt.engine.save.run_save import end_save, fail_save, run_save
from asyncckpt.engine.save.save_job import SaveJob, SaveTarget, Staged
from asyncckpt.engine.save.stage_choice import StageChoice, check_audited, choose_stage, unstaged
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.errors import ConflictError, UsageError, warn
from asyncckpt.format import limits
from asyncckpt.format.strict_json import Json, dumps
from asyncckpt.format.values import encode_value
from asyncckpt.model.event import Recorder
from asyncckpt.model.row_places import ArenaContents, TableContents
from asyncckpt.native import Progress
from asyncckpt.options import SAVE_DEADLINE_S, BusyPolicy, SaveKind
from asyncckpt.signals import wait_until_done
from asyncckpt.snapshot.capture import NotAsPlanned, capture
from asyncckpt.snapshot.table_capture import TableCapture
from asyncckpt.staging.pool import pool


def start_save(
    target: SaveTarget,
    *,
    step: int | None,
    kind: SaveKind,
    metadata: Mapping[str, Any] | None,
    busy: BusyPolicy,
    staged: bool,
    call: int | None = None,
    progress: Progress | None = None,
) -> SaveFuture:
    """Begin a save. With `staged` the call returns when the state is captured, else when the save has ended.

    call: its number, when several ranks save. They have to learn of it when it fails here. progress: counts what is
    written, for whoever cannot ask the future before it is returned.
    """
    begun = time.perf_counter()
    target.commits.check_not_in_doubt()
    target.check_whole()
    check_not_capturing("a save")
    if not staged:
        check_may_wait("a blocking save")
    encoded = encode_metadata(metadata)
    if target.options.keep is not None and target.rank == 0:  # Its metadata counts.
        target.options.keep.check_metadata(metadata)
    if target.ranks is None and not (target.tables or target.state or encoded):
        raise UsageError("there is nothing to save", hint="give the Saver hashtables or tensors")
    put_event = None if target.events is None else target.events.put
    recorder = Recorder(put_event, target.root.path, rank=target.rank)
    ticket = Ticket(kind="save", path=target.root.path, step=step, thread=threading.get_ident())
    before_wait = check_may_wait_for if staged else lambda other: None
    waiting = time.perf_counter()
    is_taken = save_lock.acquire(ticket, on_busy=busy.action, deadline_s=busy.deadline, before_wait=before_wait)
    recorder.note("lock", waiting)
    if not is_taken:
        if call is not None:
            assert target.ranks is not None
            announce_skipped(target.ranks, call)
        future = SaveFuture(step=step, path=target.root.path, what="skipped save")
        seconds = time.perf_counter() - begun
        future.skip(seconds=seconds, stall_seconds=seconds)
        return future
    claim: Claim | None = None
    job: SaveJob | None = None
    work: Job | None = None
    pid = os.getpid()
    try:
        ranks, root = target.ranks, target.root
        claim = claim_in_turn(ranks, root, step) if ranks is not None and ranks.in_turn else claims.save(root, step)
        ticket.step = recorder.step = step = claim.step
        job = saving = _begin(
            target, ticket, claim, kind, encoded, recorder,
            staged=staged, deadline_s=busy.deadline, begun=begun, call=call,
        )  # fmt: skip
        if progress is not None:
            job.future.native_progress = progress
        work = Job(run=lambda: run_save(saving), fail=lambda error: fail_save(saving, error))
        job.stall_seconds = time.perf_counter() - begun
        if pid != os.getpid():
            raise UsageError("the state forked a child, which goes on with its parent's save", hint="end it there")
        is_captured = job.staged is not None
        if job.staged is not None and not job.staged.pending.steps.is_copied:
            background.submit(target.step_fences.copy_job(job.staged.pending))
        recorder.note("call", begun)
        background.submit(work)
        save_lock.hand_over(ticket, is_captured=is_captured)
        if not is_captured:  # The background reads what the caller owns.
            wait_until_done(job.future._inner, SAVE_DEADLINE_S)
        return job.future
    except BaseException as error:
        if job is None:
            if claim is not None:
                claim.release()
            save_lock.release(ticket)
        else:
            _call_back(job, work)
        ours = as_checkpoint_error(error, step)
        if ours is not error:
            raise ours from error
        raise


def _call_back(job: SaveJob, work: Job | None) -> None:
    """End a save whose call has failed or was interrupted, unless the background has begun it.

    One that reads live state is ended in any case, for then the caller may change that; a second interruption does not
    wait for it.
    """
    save_lock.hand_over(job.ticket, is_captured=job.staged is not None)
    if work is None or background.withdraw(work):
        end_save(job, ok=False)
    elif job.staged is None and job.future._pid == os.getpid():  # Else a signal handler forked, and ends the child.
        job.future.cancel()
        try:
            wait_until_done(job.future._inner, SAVE_DEADLINE_S)
        finally:
            job.cut.hand_over()


def _begin(
    target: SaveTarget,
    ticket: Ticket,
    claim: Claim,
    kind: SaveKind,
    metadata: Json,
    recorder: Recorder,
    *,
    staged: bool,
    deadline_s: float,
    begun: float,
    call: int | None,
) -> SaveJob:
    options = target.options
    memory = target.memory
    cutting = time.perf_counter()
    cut = Cut.begin(target.state, target.tables, target.ranks, call, audit=options.debug.audit, like=memory.plans.tree)
    snapshot: Staged | None = None
    try:
        base = _hold_newest(target, claim)
        policy, audit = options.deltas, options.debug.audit
        if base is not None and (kind == "delta" or (kind == "auto" and policy is not None)):
            base = _look(target, base, kind)
        choice = Choice(base=None, newest=base, tables=cut.all_rows())
        if kind == "delta" or policy is not None or audit:
            # What is in flight beside this one may be the save that a delta builds upon.
            may_settle = target.ranks is not None and len(save_lock.in_flight()) > 1
            choice = choose_kind(
                choice, cut, step=claim.step, kind=kind, policy=policy, audit=audit, may_settle=may_settle
            )
        if choice.base is None:
            claim.parents.clear()
        staged = staged or audit  # The rows that are compared are those in an arena.
        plans_count = memory.plans.plans_made_count
        # What other ranks write was agreed upon by the shapes of tensors, so with them these are compared at once.
        stage = _choose(target, cut, choice, staged=staged, by_tree=cut.share is None)
        is_kept = cut.share is None and memory.plans.plans_made_count == plans_count
        values = cut.flat.encoded_values()
        recorder.note("cut", cutting)
        if staged:
            capturing = time.perf_counter()
            stage, snapshot = _capture_staged(target, stage, choice, cut, is_kept=is_kept, deadline_s=deadline_s)
        if snapshot is not None:
            cut.fence()
            recorder.note("capture", capturing)
        else:  # The background reads what this thread has queued for its devices.
            wait_for(cut.tensors(), streams=options.device.streams)
        future = SaveFuture(step=claim.step, path=target.root.path, what=f"save of step {claim.step}")
        if snapshot is not None:
            future.expect_copies(snapshot.pending)
        return SaveJob(
            target=target,
            ticket=ticket,
            claim=claim,
            future=future,
            begun=begun,
            plan=stage.plan,
            choice=choice,
            values=values,
            metadata=metadata,
            cut=cut,
            staged=snapshot,
            fallback=stage.fallback,
            recorder=recorder,
        )
    except BaseException:
        try:
            if snapshot is not None:
                snapshot.give_back()
        finally:
            cut.give_up()
        raise


def _hold_newest(target: SaveTarget, claim: Claim) -> ChainLink | None:
    """Return the newest link of the chain. Retention keeps its checkpoint from now on, whatever commits meanwhile."""
    while True:
        newest = target.memory.newest
        claim.parents[:] = [] if newest is None else [newest.parent.step]
        if target.memory.newest is newest:
            return newest


def _look(target: SaveTarget, base: ChainLink, kind: SaveKind) -> ChainLink | None:
    """Return what a delta can build upon now: the chain down to what was compacted since, or None, with a warning,
    where others have removed some of it. ConflictError for a delta that was asked for.

    Of several ranks, rank 0 looks again when all have called (rank_save.py), and what it sees counts.
    """
    try:
        heads = target.commits.chain.look(base.chain)
    except ConflictError as error:
        if kind == "delta":
            raise
        if target.rank == 0:
            warn(f"asyncckpt: {error.what}; this save is a full one", RuntimeWarning)
        return None
    end = heads[-1]
    full_bytes = None if end is None else sum(file.bytes for file in end.files if file.rank == target.rank)
    return base.ending(len(heads), full_bytes=full_bytes)


def _choose(target: SaveTarget, cut: Cut, choice: Choice, *, staged: bool, by_tree: bool) -> StageChoice:
    """Choose how a save is staged; a warning where it has to block. UsageError where it may not."""
    stage = choose_stage(target, cut, choice, by_tree=by_tree) if staged else unstaged(target, cut)
    if target.options.debug.audit:
        check_audited(cut, stage)
    if stage.fallback is not None:
        check_may_wait("a save that does not fit the memory limit")
        check_may_block_here(stage.fallback)
        warn(f"asyncckpt: {stage.fallback}; this save blocks until it is written", RuntimeWarning)
    return stage


def _capture_staged(
    target: SaveTarget, stage: StageChoice, choice: Choice, cut: Cut, *, is_kept: bool, deadline_s: float
) -> tuple[StageChoice, Staged | None]:
    """Capture what is staged; None: it cannot be. is_kept: by a plan of an earlier save, whose facts are not compared
    before the capture, which has to look in any case. Where it does not fit, that is done once more with a new one.
    """
    if stage.fallback is not None:
        return stage, None
    try:
        return stage, _capture(target, stage, choice, cut, deadline_s=deadline_s)
    except NotAsPlanned as found:
        if not is_kept:  # The state has changed while the call waited.
            raise found.error from None
    stage = _choose(target, cut, choice, staged=True, by_tree=False)
    return _capture_staged(target, stage, choice, cut, is_kept=False, deadline_s=deadline_s)


def _capture(target: SaveTarget, stage: StageChoice, choice: Choice, cut: Cut, *, deadline_s: float) -> Staged:
    options = target.options
    layout = stage.layout
    copies = host_copies(options, target.step_fences)
    arena = pool.acquire(
        stage.arena_bytes,
        deadline_s=deadline_s,
        limit_bytes=options.host_memory_limit,
        layout=layout,
        before_wait=lambda: check_may_wait_here("a staging arena", holding=pool.guard),
    )
    try:
        held = {} if arena.contents is None else arena.contents.tables
        arena.contents = None  # Until all of it is there.
        image = arena.view()
        tables = [
            TableCapture(
                cut.tables[region.table],
                region,
                choice.tables[region.table],
                held=held.get(region.name),
                image=image,
                compare=options.device.fingerprints and layout is not None,
            )
            for region in stage.regions.tables
        ]
        base = stage.regions.bytes
        capture(stage.plan, cut.flat, cut.tables, image=image[base:], copies=copies, tables=tables)
        pending = launch(copies, arena, options)
        target.step_fences.expect(pending)
        if layout is not None:
            arena.contents = ArenaContents(layout=layout, tables=_contents(tables))
        arena.seal()
        return Staged(arena=arena, base=base, tables=tuple(table.captured for table in tables), pending=pending)
    except BaseException:  # An interrupt may come when devices write to the arena already.
        Staged(arena=arena, base=0, tables=(), pending=copies.pending).give_back()
        raise


def _contents(tables: Sequence[TableCapture]) -> dict[str, TableContents]:
    """Return what a later save can bring up to date."""
    return {
        table.name: TableContents(version=table.version, places=table.places, fingerprints=table.fingerprints)
        for table in tables
        if table.places is not None and (table.version is not None or table.fingerprints)
    }


def encode_metadata(metadata: Mapping[str, Any] | None) -> Json:
    """Return the metadata of a save as they are stored. UsageError, UnsupportedError."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise UsageError("metadata is not a mapping with string keys", found=type(metadata).__name__)
    items = metadata.items()
    found = {encode_value(k, owner="key of metadata"): encode_value(v, owner=f"metadata[{k!r}]") for k, v in items}
    limits.check_manifest_bytes(len(dumps(found)), last="the metadata")
    return found
