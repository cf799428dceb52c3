"""The Saver: RecIS' shape (shard_index, shard_num, parallel, path, hashtables, tensors, filter_func), and ours."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from asyncckpt.arguments import check_choice, check_type
from asyncckpt.engine.open_saver import (
    Asked,
    announcing_errors,
    checked_filters,
    make_features,
    open_saver,
    own_tables,
    which_rank,
)
from asyncckpt.engine.process.background import background
from asyncckpt.engine.process.event_loop import Closing
from asyncckpt.engine.process.future import SaveFuture
from asyncckpt.engine.process.save_lock import OpenFutures, RunningCalls, SaveCounts
from asyncckpt.engine.save.save_job import SaveCall
from asyncckpt.engine.save.start_save import encode_metadata, start_save
from asyncckpt.errors import DeadlineError, UsageError
from asyncckpt.format.names import check_step
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
from asyncckpt.plan.leaf_memory import check_kinds
from asyncckpt.plan.state import TensorsArgument, named_state
from asyncckpt.signals import check_timeout, uninterrupted, wait_until_done
from asyncckpt.storage.folder import check_place
from asyncckpt.tables.left_out import check_all_taken

if TYPE_CHECKING:
    from asyncckpt.engine.save.prepare import PrepareFuture
    from asyncckpt.pipeline.row_filters import RowFilter

__all__ = ["Saver", "SaverStatistics"]

LEFT_OUT_HINT = (
    "add hashtables={'NAME': table}; to leave tables out on purpose, pass "
    "asyncckpt.adapters.dense_state_of(module), and an optimizer in a TrainerState"
)
# `path` comes behind parameters that have defaults, so Python wants one for it too.
_REQUIRED: Any = ...

REPORTS = "it reports the error of an earlier save"


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
                            position. Read again at every save. Tables that they hold must be in hashtables
    filter_func             list[WriteBlock] -> list[WriteBlock], run in the background on the staged copy
    on_busy                 what a call does while a save or load is in flight: "raise", "wait", "skip" or "queue"; with
                            a deadline of its own as BusyPolicy("wait", deadline=60). None: save waits, save_async
                            raises
    durability              "fsync": a result means that the checkpoint survives power loss; "none": only process death
    host_memory_limit       bytes that staging may take in this process; None: a share of what is available. A snapshot
                            that does not fit is saved the blocking way
    keep                    how many of the newest checkpoints stay, or a KeepPolicy; None keeps all
    upload                  the URL of a prefix in an object store, or UploadOptions: rank 0 uploads what is committed
                            in the background (docs/object-stores.md); retention keeps what is not yet there
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
        own = which_rank(shard_index, shard_num, path, ranks)
        with announcing_errors(own, ranks):
            if not callable(filter_func):
                raise UsageError("filter_func is not callable", found=type(filter_func))
            self._busy, self._save_waits = BusyPolicy.of("raise" if on_busy is None else on_busy), on_busy is None
            options = SaveOptions(
                parallel=parallel,
                durability=durability,
                host_memory_limit=host_memory_limit,
                keep=KeepPolicy.of(keep),
                deltas=deltas,
                device=device,
                debug=debug,
            )
            tables = own_tables(hashtables, own, ranks)
            row_filters = () if filters == () else checked_filters(filters, tables)
            asked = Asked(
                path=check_place(path),
                options=options,
                ranks=ranks,
                own=own,
                tables=tables,
                state=named_state(tensors),
                filter_func=None if filter_func is identity else filter_func,
                filters=row_filters,
                upload=UploadOptions.of(upload),
                exact_modes=self._exact_modes,
            )
            check_all_taken(asked.state, asked.tables.values(), hint=LEFT_OUT_HINT)
            check_kinds(asked.state)
            features = make_features(asked)
        self._errors, self._counts, self._calls = OpenFutures(), SaveCounts(), RunningCalls()
        self._closed, self._pid = False, os.getpid()
        opened = open_saver(asked, features)
        self._target, self._lock, self._finalizer = opened.target, opened.lock, opened.finalizer
        self._ranks, self._uploads, self._events = opened.ranks, opened.uploads, opened.events

    def __repr__(self) -> str:
        return f"Saver({self.path!r}, {len(self._target.tables)} tables, {'closed' if self._closed else 'open'})"

    @property
    def path(self) -> str:
        """The checkpoint directory, absolute."""
        return str(self._target.root.path)

    @property
    def ranks_count(self) -> int:
        """How many ranks save together."""
        return self._target.ranks_count

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
        See asyncckpt.compact for what it does and raises. With several ranks, rank 0 does it, and the others skip it.
        """
        with self._calls.one_more(self._check_open):
            begun = time.perf_counter()
            self._errors.raise_first()
            from asyncckpt.engine.compact.run_compaction import start_compaction

            future = start_compaction(self._target, step)
            self._errors.watch(future)
            self._tell_end(future, "compaction", begun)
            return future

    def _leave_out_call(self, error: BaseException | None) -> None:
        """Announce to the other ranks that this one does not make the save which they make now, because of an error.

        For code around a Saver that raises where other ranks save: ranks that do not count their saves alike would not
        find together again. Does nothing with one rank. None: it is the error of an earlier save, which they skip this
        one for: as an error of theirs it would be reported by their next call, which leaves out a save of this rank.
        """
        if self._ranks is not None:
            call = self._ranks.next_call()
            if error is None:
                self._ranks.announce_skipped(call, REPORTS)
            else:
                self._ranks.announce_failed(call, error)

    @uninterrupted
    def prepare(self) -> PrepareFuture:
        """Plan, and allocate and touch the arena in the background, so that the first save is as fast as later ones.

        Returns a future; waiting for it is not needed. The state must not be resized until it is done. Raises
        SaveInProgressError on an event loop while a load is in flight.
        """
        from asyncckpt.engine.save.prepare import prepare_arena

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
        if self._uploads is not None:
            self._uploads.wait(max(0.0, until - time.monotonic()))
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
        if self._ranks is not None and not background.is_current_thread():
            self._ranks.wait_announced()
        self._finalizer()  # Uploads go on without the directory's lock.
        if self._uploads is not None:
            self._uploads.wait(SAVE_DEADLINE_S)
        if self._events is not None:  # Ends of uploads are told, too.
            self._events.wait_for_all()
            self._events.close()

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
            ranks, begun = self._ranks, time.perf_counter()
            number, earlier = None if ranks is None else ranks.next_call(), None
            try:
                step = check_step(step)
                if kind not in SAVE_KINDS:
                    check_choice("kind", kind, SAVE_KINDS)
                busy = self._busy if on_busy is None else BusyPolicy.of(on_busy, deadline=self._busy.deadline)
                earlier = self._errors.take_error()
                if earlier is not None:
                    raise earlier
                encoded = encode_metadata(metadata)
                if self._target.options.keep is not None and self._target.rank == 0:  # Its metadata counts.
                    self._target.options.keep.check_metadata(metadata)
                call = SaveCall(step, kind, encoded, busy, staged, number=number)
                if kind == "delta":
                    from asyncckpt.engine.features.deltas import as_delta

                    call = as_delta(call, self._target)
                future = start_save(self._target, call)
            except BaseException as error:
                if ranks is not None and number is not None:
                    if earlier is None:
                        ranks.announce_failed(number, error)
                    else:
                        ranks.announce_skipped(number, REPORTS)
                raise
            self._errors.watch(future)
            future.before_done(self._counts.add)
            if self._events is not None:
                self._tell_end(future, "save", begun)
            return future

    def _tell_end(self, future: SaveFuture, name: Literal["save", "compaction"], begun: float) -> None:
        """Let whoever listens know how a save ends."""
        if self._events is not None:
            target = self._target
            ended = self._events.ended(name, step=future.step, begun=begun, path=target.root.path, rank=target.rank)
            future.before_done(ended)

    def _wait_in_flight(self, timeout: float) -> None:
        """Wait for saves, and for what goes on when a save has ended: retention, compactions."""
        if self._pid != os.getpid():
            return
        until = time.monotonic() + timeout
        self._errors.wait(timeout)
        for what, future in (*self._target.memory.behind.items(),):
            if not wait_until_done(future, max(0.0, until - time.monotonic())):
                raise DeadlineError(f"{what} in {self.path!r} did not end within {timeout} s")

    def _raise_first(self) -> None:
        """Raise the first error of saves that nobody has asked for; then one of uploads."""
        self._errors.raise_first()
        if self._uploads is not None:
            self._uploads.raise_left()

    def _is_idle(self) -> bool:
        """Return whether `close` would not wait."""
        is_uploaded = self._uploads is None or self._uploads.are_settled()
        are_done = all(future.done() for future in (*self._target.memory.behind.values(),))
        return are_done and self._errors.are_settled() and is_uploaded

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"Saver of {self.path!r} is closed")
        if self._pid != os.getpid():
            raise UsageError("this Saver belongs to the parent process", hint="make a new one in this process")
        if self._lock is not None:
            self._lock.check()
