"""The Saver: RecIS' shape (shard_index, shard_num, parallel, path, hashtables, tensors, filter_func), and ours."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from asyncckpt.adapters import tables_of
from asyncckpt.adapters.left_out import check_all_taken
from asyncckpt.arguments import check_choice, check_timeout, check_type
from asyncckpt.devices.current_runtime import device_of
from asyncckpt.engine.compact.run_compaction import start_compaction
from asyncckpt.engine.process.background import background
from asyncckpt.engine.process.event_line import EVENTS_WAIT_S, EventLine
from asyncckpt.engine.process.event_loop import Closing
from asyncckpt.engine.process.future import SaveFuture
from asyncckpt.engine.process.held_directory import commits_of
from asyncckpt.engine.process.save_lock import OpenFutures, RunningCalls, SaveCounts
from asyncckpt.engine.ranks.holdings import check_said
from asyncckpt.engine.ranks.open_directory import Opened, announce_refused, open_directory, which_shard
from asyncckpt.engine.ranks.saver_ranks import announce_failed
from asyncckpt.engine.save.device_stage import StepFences
from asyncckpt.engine.save.prepare import PrepareFuture, prepare_arena
from asyncckpt.engine.save.save_job import SaverMemory, SaveTarget
from asyncckpt.engine.save.start_save import start_save
from asyncckpt.engine.upload.uploads import Uploads
from asyncckpt.errors import DeadlineError, UsageError
from asyncckpt.format.limits import check_step
from asyncckpt.model.result import SaveResult, SaverStatistics
from asyncckpt.model.table import Table
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.options import (
    SAVE_DEADLINE_S,
    SAVE_KINDS,
    BusyPolicy,
    DebugOptions,
    DeltaPolicy,
    DeviceOptions,
    Durability,
    KeepPolicy,
    OnBusy,
    RankOptions,
    SaveKind,
    SaveOptions,
    UploadOptions,
)
from asyncckpt.pipeline.filters import identity
from asyncckpt.pipeline.row_filters import RowFilter, check_filters
from asyncckpt.plan.named_tables import named_tables
from asyncckpt.plan.save_plan import PlanCache, check_all_here
from asyncckpt.plan.state import TensorsArgument, flatten, named_state
from asyncckpt.signals import uninterrupted, wait_until_done
from asyncckpt.staging.pool import pool
from asyncckpt.storage.folder import check_place

__all__ = ["Saver", "SaverStatistics"]

LEFT_OUT_HINT = (
    "name them in hashtables, or give the module as asyncckpt.adapters.dense_state_of(module), "
    "an optimizer in a TrainerState"
)
# `path` comes behind parameters that have defaults, so Python wants one for it too.
_REQUIRED: Any = ...


class Saver(Closing):
    """Save hash tables and tensors to one checkpoint directory, in the background or blocking.

    shard_index, shard_num  this rank and how many there are; all of them save into the same directory, and commit
                            together or not at all (docs/ranks.md)
    parallel                most shard files of one rank for tables, and for tensors
    path                    the directory, required; made with its parents when missing. One process at a time writes to
                            it, or the ranks of one job
    hashtables              mapping name -> Table (of several ranks: with shard or replicated), or a module, whose
                            tables are found by asyncckpt.adapters.tables_of
    tensors                 mapping (or pairs) of name -> Tensor, ndarray, plain value, nested mapping or list, or
                            anything with state_dict() (module, optimizer); or tensors alone, known by their `name` or
                            position. Read anew at every save. Tables that they hold must be in hashtables
    filter_func             list[WriteBlock] -> list[WriteBlock], run in the background on the staged copy
    on_busy                 what a call does while a save or load is in flight: "raise", "wait", "skip" or "queue"; with
                            a deadline of its own as BusyPolicy("wait", deadline=60). None: save waits, save_async
                            raises
    durability              "fsync": a result means that the checkpoint survives power loss; "none": only process death
    host_memory_limit       bytes that staging may take in this process; None: a share of what is available. A snapshot
                            that does not fit is saved the blocking way
    keep                    how many of the newest checkpoints stay, or a KeepPolicy; None keeps all
    upload                  the URL of a prefix in an object store, or UploadOptions: what is committed is copied there,
                            behind the saves, by rank 0 (docs/object-stores.md); retention keeps what is not yet there
    deltas                  when a save of kind "auto" is a delta, which holds only rows written since its parent; None:
                            never. Tables without marks are then compared row by row, in the background
    filters                 row filters and encodings of asyncckpt.filters, applied in the background
    device, ranks, debug    see DeviceOptions, RankOptions and DebugOptions

    One training thread uses a Saver; futures may be used from any. Every rank makes the same saves in the same order;
    a save does not wait for the other ranks, its future does. The constructor waits for rank 0, and without a process
    group for all ranks, unless they save in turn (RankOptions). Source of the interface: RecIS `Saver`.
    """

    # Files get mode 0640 and folders 0750 whatever the umask; else the umask takes from these.
    _exact_modes = False

    def __init__(
        self,
        shard_index: int = 0,
        shard_num: int = 1,
        parallel: int = 8,
        path: str | os.PathLike[str] = _REQUIRED,
        hashtables: Mapping[str, Table] | torch.nn.Module | None = None,
        tensors: TensorsArgument | None = None,
        filter_func: Callable[[list[WriteBlock]], Sequence[WriteBlock]] = identity,
        *,
        on_busy: OnBusy | BusyPolicy | None = None,
        durability: Durability = "fsync",
        host_memory_limit: int | None = None,
        keep: int | KeepPolicy | None = None,
        upload: str | UploadOptions | None = None,
        deltas: DeltaPolicy | None = None,
        filters: Sequence[RowFilter] = (),
        device: DeviceOptions = DeviceOptions(),
        ranks: RankOptions = RankOptions(),
        debug: DebugOptions = DebugOptions(),
    ) -> None:
        if isinstance(shard_index, (str, os.PathLike)):
            hint = "name the arguments: Saver(path=..., tensors=...)"
            raise UsageError("shard_index is a path", found=shard_index, expected="the index of this rank", hint=hint)
        if path is _REQUIRED:
            raise UsageError("path is missing", expected="the checkpoint directory")
        check_type("ranks", ranks, RankOptions)
        own = which_shard(shard_index, shard_num, path, ranks)
        try:
            if not callable(filter_func):
                raise UsageError("filter_func is not callable", found=type(filter_func).__name__)
            self._busy, self._save_waits = BusyPolicy.of("raise" if on_busy is None else on_busy), on_busy is None
            upload = UploadOptions.of(upload)
            options = SaveOptions(
                parallel=parallel,
                durability=durability,
                host_memory_limit=host_memory_limit,
                keep=KeepPolicy.of(keep),
                deltas=deltas,
                device=device,
                debug=debug,
            )
            tables = named_tables(tables_of(hashtables) if isinstance(hashtables, torch.nn.Module) else hashtables)
            check_said(tables, index=own.index, count=own.count, may_be_parts=ranks.alone)
            row_filters = check_filters(filters, {name: table.schema() for name, table in tables.items()})
            state = named_state(tensors)
            check_all_taken(state, tables.values(), hint=LEFT_OUT_HINT)
            if own.met is not None:
                check_all_here(flatten(state))  # The first save would find it, too.
            checked = check_place(path)
            uploads = Uploads.open(checked, upload, rank=own.index, in_turn=own.count > 1 and ranks.in_turn)
        except BaseException as error:
            announce_refused(error, own, ranks)
            raise
        self._errors, self._counts, self._calls = OpenFutures(), SaveCounts(), RunningCalls()
        self._closed, self._pid, opened = False, os.getpid(), None
        plans = PlanCache(parallel=parallel, rank=own.index, ranks_count=own.count, device_of=device_of)
        try:
            with uninterrupted:
                opened = open_directory(checked, own, options=ranks, exact_modes=self._exact_modes)
                self._lock = opened.lock
                self._target = SaveTarget(
                    commits=commits_of(opened.root, self._lock, durability, uploads.uploader),
                    uploads=uploads,
                    options=options,
                    tables=tables,
                    state=state,
                    filter_func=filter_func,
                    filters=row_filters,
                    ranks=opened.ranks,
                    step_fences=StepFences(device.optimizers),
                    memory=SaverMemory(plans),
                    events=None if debug.on_event is None else EventLine(debug.on_event),
                )
                # The directory is given back with the target, which a save in flight holds too: a Saver that is dropped
                # while it saves lets the save end first.
                target = self._target
                self._finalizer = weakref.finalize(target, _give_back, opened, target.memory, target.events)
                uploads.go_on(opened.root, warns=opened.lock is not None)
        except BaseException:
            with uninterrupted:
                if opened is not None:
                    opened.close()
            raise

    @property
    def path(self) -> str:
        """The checkpoint directory, absolute."""
        return str(self._target.root.path)

    @property
    def ranks_count(self) -> int:
        """How many ranks save together."""
        return 1 if self._target.ranks is None else self._target.ranks.ranks_count

    @uninterrupted
    def save_async(
        self,
        step: int | None = None,
        *,
        kind: SaveKind = "auto",
        metadata: Mapping[str, Any] | None = None,
        on_busy: OnBusy | BusyPolicy | None = None,
    ) -> SaveFuture:
        """Capture the state of this step and return; the files are written in the background.

        When it returns, the caller may change or free everything. step None means one more than the newest in the
        directory. kind: "full" holds everything; "delta" dense tensors and the rows written since the newest checkpoint
        that this Saver has committed; "auto" what the policy `deltas` says. Raises SaveInProgressError, ConflictError,
        UsageError, UnsupportedError, DeadlineError; or, once, the error of an earlier background save that nobody has
        asked for.
        """
        return self._start(step, kind, metadata, on_busy, staged=True)

    @uninterrupted
    def save(
        self,
        step: int | None = None,
        *,
        kind: SaveKind = "auto",
        metadata: Mapping[str, Any] | None = None,
        on_busy: OnBusy | BusyPolicy | None = None,
    ) -> SaveResult:
        """Save and return when the checkpoint is durable; needs two chunk buffers instead of an arena."""
        if on_busy is None and self._save_waits:
            on_busy = "wait"
        return self._start(step, kind, metadata, on_busy, staged=False).result(SAVE_DEADLINE_S)

    @uninterrupted
    def compact(self, step: int | None = None) -> SaveFuture:
        """Fold the chain of a delta (default: the newest step) into a full checkpoint of that step, in the background.

        Beside training and saves, without a stall. The future says `skipped` of a step that is full, or gone by then.
        See asyncckpt.compact for what it does and raises. Of several ranks, rank 0 does it, and the others skip it.
        """
        with self._calls.one_more(self._check_open):
            begun = time.perf_counter()
            self._errors.raise_first()
            future = start_compaction(self._target, step)
            self._errors.watch(future)
            self._target.tell_end(future, "compaction", begun)
            return future

    def _leave_out_call(self, error: BaseException) -> None:
        """Announce to the other ranks that this one does not make the save which they make now, because of an error.

        For code around a Saver that raises where other ranks save: ranks that do not count their saves alike would not
        find together again. Does nothing with one rank.
        """
        if self._target.ranks is not None:
            announce_failed(self._target.ranks, self._target.ranks.next_call(), error)

    @uninterrupted
    def prepare(self) -> PrepareFuture:
        """Plan, and allocate and touch the arena in the background, so that the first save is as fast as later ones.

        Returns a future; waiting for it is not needed. The state must not be resized until it is done. Raises
        SaveInProgressError on an event loop while a load is in flight.
        """
        with self._calls.one_more(self._check_open):
            return prepare_arena(self._target)

    @uninterrupted
    def wait_idle(self, timeout: float | None = None) -> None:
        """Wait for saves in flight, their retention and uploads; then raise the first error nobody has asked for.

        In a forked child there is nothing to wait for.
        """
        check_timeout(timeout)
        until = time.monotonic() + (timeout := SAVE_DEADLINE_S if timeout is None else timeout)
        self._wait_in_flight(timeout)
        self._target.uploads.wait(max(0.0, until - time.monotonic()))
        self._raise_first()

    def statistics(self) -> SaverStatistics:
        """Return counts and sums over all saves of this Saver so far, and the arenas of the process."""
        return self._counts.now(self._target.memory.plans.plans_made_count)

    @uninterrupted
    def close(self) -> None:
        """Wait for saves in flight and calls of other threads, release the directory, raise the first error nobody has
        asked for. Idempotent.

        Interrupted while it waits, it leaves the directory locked until the save in flight has ended. A forked child
        leaves the directory, and what is in flight, to its parent.
        """
        self._end()
        self._raise_first()

    async def aclose(self) -> None:
        """Close without stopping the event loop, as `async with` does; raises as `close`.

        Cancelled, it goes on by itself, and the error is that of the next `close`, or printed at exit.
        """
        await asyncio.to_thread(self._end)
        self._raise_first()

    def _end(self) -> None:
        """Take no more saves, wait for those in flight, and give the directory back."""
        if self._pid != os.getpid():
            self._closed = True
            return
        if self._calls.has_current_thread():
            what = f"the Saver of {self.path!r} cannot be closed by what one of its calls calls"
            raise UsageError(what, hint="close it when that call has returned")
        self._closed = True
        if not self._finalizer.alive:
            return
        self._calls.wait(f"a call of the Saver of {self.path!r} on another thread", SAVE_DEADLINE_S)
        self._wait_in_flight(SAVE_DEADLINE_S)
        if self._target.ranks is not None and not background.is_current_thread():
            self._target.ranks.wait_announced()
        if self._target.events is not None:
            self._target.events.wait(EVENTS_WAIT_S)
        self._finalizer()  # Uploads go on without the directory's lock.
        self._target.uploads.wait(SAVE_DEADLINE_S)

    def _start(
        self,
        step: int | None,
        kind: SaveKind,
        metadata: Mapping[str, Any] | None,
        on_busy: OnBusy | BusyPolicy | None,
        *,
        staged: bool,
    ) -> SaveFuture:
        with self._calls.one_more(self._check_open):
            ranks, begun = self._target.ranks, time.perf_counter()
            call = None if ranks is None else ranks.next_call()
            try:
                step = check_step(step)
                check_choice("kind", kind, SAVE_KINDS)
                busy = self._busy if on_busy is None else BusyPolicy.of(on_busy, deadline=self._busy.deadline)
                self._errors.raise_first()
                future = start_save(
                    self._target, step=step, kind=kind, metadata=metadata, busy=busy, staged=staged, call=call
                )
            except BaseException as error:
                if ranks is not None and call is not None:
                    announce_failed(ranks, call, error)
                raise
            self._errors.watch(future)
            future.before_done(self._counts.add)
            self._target.tell_end(future, "save", begun)
            return future

    def _wait_in_flight(self, timeout: float) -> None:
        """Wait for saves, and for retention, which goes on when a save has ended."""
        if self._pid != os.getpid():
            return
        until = time.monotonic() + timeout
        self._errors.wait(timeout)
        retention = self._target.memory.retention
        if retention is not None and not wait_until_done(retention, max(0.0, until - time.monotonic())):
            raise DeadlineError(f"retention in {self.path!r} did not end within {timeout} s")

    def _raise_first(self) -> None:
        """Raise the first error of saves that nobody has asked for; then one of uploads."""
        self._errors.raise_first()
        self._target.uploads.raise_left()

    def _is_idle(self) -> bool:
        """Return whether `close` would not wait."""
        retention = self._target.memory.retention
        is_kept = retention is None or retention.done()
        return is_kept and self._errors.are_settled() and self._target.uploads.are_settled()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"Saver of {self.path!r} is closed")
        if self._pid != os.getpid():
            raise UsageError("this Saver belongs to the parent process", hint="make a new one in this process")
        if self._lock is not None:
            self._lock.check()


@uninterrupted
def _give_back(opened: Opened, memory: SaverMemory, events: EventLine | None) -> None:
    """Let another process write to the directory, and other Savers use the arenas."""
    if events is not None:
        events.close()
    for layout in memory.regions.layouts():
        pool.forget(layout)
    opened.close()
