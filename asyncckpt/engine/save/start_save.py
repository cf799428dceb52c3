"""The caller's half of a save: lock, claim, cut, plan, capture, fence. The background half is run_save.py."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from asyncckpt.commit.attempt import Claim
from asyncckpt.engine.process.background import Job, background, check_may_wait
from asyncckpt.engine.process.event_loop import check_may_block_here, check_may_wait_for
from asyncckpt.engine.process.future import SaveFuture, as_checkpoint_error
from asyncckpt.engine.process.log import log_at_times
from asyncckpt.engine.process.save_lock import Ticket, save_lock
from asyncckpt.engine.save.run_save import commit_alone, end_save, fail_save, run_save
from asyncckpt.engine.save.save_job import SaveCall, SaveJob, SaveTarget
from asyncckpt.engine.save.stage import StageChoice, choose_stage, fill_arena, unstaged
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.engine.save.write_files import write_planned
from asyncckpt.errors import DeadlineError, UsageError, warn
from asyncckpt.format import limits
from asyncckpt.format.strict_json import Json, dumps
from asyncckpt.format.values import encode_value
from asyncckpt.model.torch_use import check_not_traced, uses_devices
from asyncckpt.options import SAVE_DEADLINE_S
from asyncckpt.plan.regions import TableRows
from asyncckpt.signals import wait_until_done
from asyncckpt.snapshot.capture import NotAsPlanned

SKIPS_TOLD = 3  # So many in a row, and more: a disk that is too slow, or `every` too often.


def start_save(target: SaveTarget, call: SaveCall) -> SaveFuture:
    """Begin a save; with several ranks, all have to learn of it when it fails here."""
    begun = time.perf_counter()
    target.commits.check_not_in_doubt()
    target.check_whole()
    check_not_traced("a save")
    if uses_devices():
        from asyncckpt.devices.current_runtime import check_not_capturing  # Many processes use none.

        check_not_capturing("a save")
    if not call.staged:
        check_may_wait("a blocking save")
    if target.ranks_count == 1 and not (target.tables or target.state or call.metadata):
        raise UsageError("nothing was given to save", hint="pass hashtables or tensors to the Saver")
    path, step = target.root.path, call.step
    ticket = Ticket(kind="save", path=path, step=step, thread=threading.get_ident())
    waiting = time.perf_counter()
    before_wait = check_may_wait_for if call.staged else lambda other: None
    if not save_lock.acquire(ticket, on_busy=call.busy.action, deadline_s=call.busy.deadline, before_wait=before_wait):
        for feature in target.features:
            feature.skipped(call.number)
        target.memory.skipped += 1
        if target.memory.skipped >= SKIPS_TOLD:
            others = ", ".join(map(str, save_lock.in_flight())) or "what has ended since"
            what = "%d saves of %s in a row were skipped, the last because of the %s"
            log_at_times("skip", path, what, target.memory.skipped, path, others)
        future = SaveFuture(step=step, path=path, what="skipped save")
        seconds = time.perf_counter() - begun
        future.skip(seconds=seconds, stall_seconds=seconds)
        return future
    locked, target.memory.skipped = time.perf_counter(), 0
    claim: Claim | None = None
    job: SaveJob | None = None
    work: Job | None = None
    pid = os.getpid()
    try:
        claim = target.claim(target.root, step)
        ticket.step = step = claim.step
        future = SaveFuture(step=step, path=path, what=f"save of step {step}")
        job = saving = SaveJob(
            target, call, ticket, claim, begun, future, write=write_planned, commit=commit_alone,
            features=target.features if call.features is None else call.features,
        )  # fmt: skip
        if call.progress is not None:
            future.native_progress = call.progress
        for feature in job.features:
            feature.begin(job)
        job.note("lock", waiting, locked)
        _capture(job)
        work = Job(run=lambda: run_save(saving), fail=lambda error: fail_save(saving, error))
        job.stall_seconds = time.perf_counter() - begun
        if pid != os.getpid():
            raise UsageError("the state forked a child, which would continue its parent's save", hint="end it there")
        is_captured = job.staged is not None
        job.note("call", begun)
        background.submit(work)
        save_lock.hand_over(ticket, is_captured=is_captured)
        # The background reads what the caller owns; a commit does not.
        if not is_captured and not wait_until_done(future._inner, SAVE_DEADLINE_S) and future.cancel():
            raise DeadlineError(f"the save of step {step}, which blocks, did not end within {SAVE_DEADLINE_S} s")
        return future
    except BaseException as error:
        if job is None:
            if claim is not None:
                claim.release()
            save_lock.release(ticket)
        else:
            _call_back(job, work)
        ours = as_checkpoint_error(error, step, path)
        if ours is not error:
            raise ours from error
        raise


def _call_back(job: SaveJob, work: Job | None) -> None:
    """End a save whose call has failed or was interrupted, unless the background has begun it.

    One that reads live state is ended in any case, because then the caller may change that; a second interruption does
    not wait for it.
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


def _capture(job: SaveJob) -> None:
    """Cut the state, choose how it is staged, and capture it, or wait until the background may read it."""
    target, call, plans = job.target, job.call, job.target.memory.plans
    cutting = time.perf_counter()
    job.cut = Cut.begin(target.state, target.tables, job.features, call=call.number, like=plans.tree)
    job.rows = tuple(map(TableRows, range(len(job.cut.tables))))
    for feature in job.features:
        feature.chosen(job)
    # The rows that an audit compares are those in an arena. What other ranks write was agreed upon by the shapes of
    # tensors, so with them these are compared at once; else the capture does it, which looks at them in any case.
    is_staged, by_tree = call.staged or target.options.debug.audit, target.ranks_count == 1
    while True:
        stage = _choose_stage(job, is_staged=is_staged, by_tree=by_tree)
        capturing = time.perf_counter()
        if not is_staged or stage.fallback is not None:
            break
        try:
            fill_arena(job, stage)
            break
        except NotAsPlanned as found:
            if not by_tree or not plans.is_kept or found.has_waited:  # The state has changed while the call waited.
                raise found.error from None
            by_tree = False  # The plan is that of an earlier save.
    job.note("cut", cutting, capturing)
    if job.staged is not None:
        for feature in job.features:
            feature.captured(job)
        job.cut.fence()
        if job.pending is not None:
            job.future.expect_copies(job.pending)
        job.note("capture", capturing)
    elif uses_devices():  # The background reads what this thread has queued for its devices.
        from asyncckpt.devices.fetch import wait_for

        wait_for(job.cut.tensors(), streams=target.options.device.streams)


def _choose_stage(job: SaveJob, *, is_staged: bool, by_tree: bool) -> StageChoice:
    """Choose how a save is staged; a warning where it has to block, UsageError where it may not."""
    target, is_delta = job.target, job.base is not None
    stage = (
        choose_stage(target, job.cut, job.rows, is_delta=is_delta, by_tree=by_tree)
        if is_staged
        else unstaged(target, job.cut)
    )
    for feature in job.features:
        feature.planned(job, stage)
    job.plan, job.fallback = stage.plan, stage.fallback
    job.values = job.cut.flat.encoded_values()
    if stage.fallback is not None:
        check_may_wait("a save that does not fit the memory limit")
        check_may_block_here(stage.fallback)
        warn(f"asyncckpt: {stage.fallback}; this save blocks until it is written", RuntimeWarning)
        what = "step %d of %s blocks until it is written: %s"
        log_at_times("fallback", target.root.path, what, job.step, target.root.path, stage.fallback)
    return stage


def encode_metadata(metadata: Mapping[str, Any] | None) -> Json:
    """Return the metadata of a save as they are stored. UsageError, UnsupportedError."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise UsageError("metadata is not a mapping with string keys", found=type(metadata))
    items = metadata.items()
    found = {encode_value(k, owner="key of metadata"): encode_value(v, owner=f"metadata[{k!r}]") for k, v in items}
    limits.check_manifest_bytes(len(dumps(found)), last="the metadata")
    return found
