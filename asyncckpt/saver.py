"""The Saver: RecIS' shape (shard_index, shard_num, parallel, path, hashtables, tensors, filter_func), and ours."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from asyncckpt.adapters import tables_of
from asyncckpt.devices.chosen import device_of
from asyncckpt.engine.arguments import check_choice, check_int, check_seconds
from asyncckpt.engine.background import background, check_may_wait
from asyncckpt.engine.compact_job import skipped_compaction, start_compaction
from asyncckpt.engine.future import SaveFuture
from asyncckpt.engine.held_directory import commits_of
from asyncckpt.engine.open_errors import OpenErrors
from asyncckpt.engine.open_ranks import Opened, open_directory, which_shard
from asyncckpt.engine.prepare import PrepareFuture, prepare_arena
from asyncckpt.engine.ranks_told import tell_failed
from asyncckpt.engine.save import start_save
from asyncckpt.engine.save_counts import SaveCounts
from asyncckpt.engine.save_request import SaveTarget
from asyncckpt.engine.step_fences import StepFences
from asyncckpt.engine.verify import newest_verified
from asyncckpt.errors import DeadlineError, UsageError
from asyncckpt.format import limits
from asyncckpt.model.result import SaveResult, SaverStatistics
from asyncckpt.model.table import Table
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.options import (
    BUSY_DEADLINE_S,
    DURABILITIES,
    HOST_LEVELS,
    ON_BUSY,
    PARALLEL_MAX,
    PEER_DEADLINE_S,
    SAVE_DEADLINE_S,
    SAVE_KINDS,
    DeltaPolicy,
    Durability,
    HostLevel,
    OnBusy,
    SaveKind,
    SaveOptions,
)
from asyncckpt.pipeline.filters import identity
from asyncckpt.pipeline.row_filters import RowFilter, check_filters
from asyncckpt.plan.named_tables import named_tables
from asyncckpt.plan.regions import RegionCache
from asyncckpt.plan.save_plan import PlanCache
from asyncckpt.plan.state import named_state
from asyncckpt.staging.pool import pool
from asyncckpt.storage.directory import check_path


class Saver:
    """Save hash tables and tensors to one checkpoint directory, in the background or blocking.

    shard_index, shard_num  this rank and how many there are; all of them save into the same directory, and commit
                            together or not at all (docs/ranks.md)
    parallel                most shard files of one rank for tables, and for tensors
    path                    the directory; its last part is made when missing. One process at a time writes to it, or
                            the ranks of one job
    hashtables              mapping name -> Table (for example HashTable), or a module, whose tables are found by
                            asyncckpt.adapters.tables_of
    tensors                 mapping (or pairs) of name -> Tensor, ndarray, plain value, nested mapping or list, or
                            anything with state_dict() (module, optimizer); read anew at every save
    filter_func             list[WriteBlock] -> list[WriteBlock], run in the background on the staged copy
    on_busy                 what a call does while a save or load is in flight: "raise", "wait", "skip" or "queue"
    durability              "fsync": a result means that the checkpoint survives power loss; "none": only process death
    host_memory_limit       bytes that staging may take in this process; None: a share of what is available. A snapshot
                            that does not fit is saved the blocking way
    keep_latest             how many checkpoints to keep; None keeps all
    busy_deadline           seconds that "wait" waits for the lock, and "queue" for an arena
    host_level              how a multi-level table gets out: "copy" copies both levels while training waits;
                            "first_touch" copies the cache level and exports the host level while training goes on, old
                            values of rows being kept when they are about to change; "auto" does so when a copy of the
                            host level does not fit into memory
    deltas                  when a save of kind "auto" is a delta, which holds only rows written since its parent; None:
                            never. Tables without marks are then compared row by row, in the background
    filters                 row filters and encodings of asyncckpt.filters, applied in the background
    refresh                 a full save copies only rows written since the arena was filled, where tables have marks.
                            False: all rows
    audit                   every save copies all rows, compares them in the background with those of the last one, and
                            tells in SaveResult.missed_ids which were changed without a mark
    process_group           the ranks are those of this group of torch.distributed, and shard_index and shard_num may be
                            left out. None: several ranks are those of the default group if they are as many, else
                            they find each other by files in the directory
    peer_deadline           seconds that ranks wait for each other to come to a save, and (at most 30) for a sign of
                            life during one; then PeerError
    device_scratch_bytes    memory of each device that a save may use: what fits is copied within the device, so that
                            its streams wait only for that; the rest, and all when 0, goes to the host first
    device_prints           of tables on devices that have no marks, a full save copies only rows whose print differs
                            from the one that the arena's row had; takes 8 bytes a row there, for each of two arenas
    pinned_memory_limit     bytes of staging memory that may be pinned in this process for copies from devices; None: as
                            much as is needed. Beyond it, the call and the devices wait for slower copies
    streams                 streams beside the current ones that change the state (torch.cuda.Stream); saves follow
                            what is queued on them, and they wait for saves
    optimizers              torch optimizers whose parameters and state nothing but their step() changes, called as such
                            (not replayed as a graph, not fused into the backward pass): the next step() waits for the
                            copies of these, and forward and backward do not
    exact_modes             files get mode 0640 and folders 0750 whatever the umask; else the umask takes from these

    One training thread uses a Saver; futures may be used from any. Every rank makes the same saves in the same order;
    a save does not wait for the other ranks, its future does. The constructor waits for rank 0, and without a process
    group for all ranks. Source of the interface: RecIS `Saver`.
    """

    def __init__(
        self,
        shard_index: int = 0,
        shard_num: int = 1,
        parallel: int = 8,
        path: str | os.PathLike[str] = ".",
        hashtables: Mapping[str, Table] | torch.nn.Module | None = None,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        filter_func: Callable[[list[WriteBlock]], Sequence[WriteBlock]] = identity,
        *,
        on_busy: OnBusy = "raise",
        durability: Durability = "fsync",
        host_memory_limit: int | None = None,
        keep_latest: int | None = None,
        busy_deadline: float = BUSY_DEADLINE_S,
        host_level: HostLevel = "auto",
        deltas: DeltaPolicy | None = None,
        filters: Sequence[RowFilter] = (),
        refresh: bool = True,
        audit: bool = False,
        process_group: Any = None,
        peer_deadline: float = PEER_DEADLINE_S,
        device_scratch_bytes: int = 0,
        device_prints: bool = False,
        pinned_memory_limit: int | None = None,
        streams: Sequence[Any] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        exact_modes: bool = False,
    ) -> None:
        shard_index, shard_num = which_shard(shard_index, shard_num, process_group)
        check_int("shard_num", shard_num, at_least=1, at_most=limits.RANKS_MAX)
        check_int("shard_index", shard_index, at_least=0, at_most=shard_num - 1)
        check_choice("on_busy", on_busy, ON_BUSY)
        check_choice("durability", durability, DURABILITIES)
        check_choice("host_level", host_level, HOST_LEVELS)
        check_int("parallel", parallel, at_least=1, at_most=PARALLEL_MAX)
        if host_memory_limit is not None:
            check_int("host_memory_limit", host_memory_limit, at_least=0)
        if keep_latest is not None:
            check_int("keep_latest", keep_latest, at_least=1)
        check_int("device_scratch_bytes", device_scratch_bytes, at_least=0)
        if pinned_memory_limit is not None:
            check_int("pinned_memory_limit", pinned_memory_limit, at_least=0)
        if not all(isinstance(item, torch.optim.Optimizer) for item in optimizers):
            found = [type(item).__name__ for item in optimizers]
            raise UsageError("optimizers are wrong", found=found, expected="torch.optim.Optimizer")
        if not callable(filter_func):
            raise UsageError("filter_func is not callable", found=type(filter_func).__name__)
        check_seconds("busy_deadline", busy_deadline)
        check_seconds("peer_deadline", peer_deadline, above_zero=True)
        if deltas is not None and not isinstance(deltas, DeltaPolicy):
            raise UsageError("deltas is wrong", found=type(deltas).__name__, expected="a DeltaPolicy or None")
        tables = named_tables(tables_of(hashtables) if isinstance(hashtables, torch.nn.Module) else hashtables)
        row_filters = check_filters(filters, {name: table.schema() for name, table in tables.items()})
        state = named_state(tensors)
        self._on_busy: OnBusy = on_busy
        self._errors = OpenErrors()
        self._counts = SaveCounts()
        self._closed = False
        self._pid = os.getpid()
        opened = open_directory(
            check_path(path),
            index=shard_index,
            count=shard_num,
            process_group=process_group,
            peer_deadline_s=float(peer_deadline),
            exact_modes=exact_modes,
        )
        root, self._lock = opened.root, opened.lock
        self._target = SaveTarget(
            commits=commits_of(root, self._lock, durability),
            options=SaveOptions(
                parallel=parallel,
                durability=durability,
                host_memory_limit=host_memory_limit,
                keep_latest=keep_latest,
                busy_deadline_s=float(busy_deadline),
                host_level=host_level,
                refresh=refresh and not audit,
                audit=audit,
                deltas=deltas,
                device_scratch_bytes=device_scratch_bytes,
                device_prints=device_prints,
                pinned_memory_limit=pinned_memory_limit,
                streams=tuple(streams),
            ),
            plans=PlanCache(parallel=parallel, rank=shard_index, ranks_count=shard_num, device_of=device_of),
            tables=tables,
            filter_func=filter_func,
            state=lambda: state,
            protected=lambda: newest_verified(root),
            filters=row_filters,
            ranks=opened.ranks,
            step_fences=StepFences(optimizers),
        )
        # The directory is given back with the target, which a save in flight holds too: a Saver that is dropped while
        # it saves lets the save end first.
        self._finalizer = weakref.finalize(self._target, _give_back, opened, self._target.regions)

    @property
    def path(self) -> str:
        """The checkpoint directory, absolute."""
        return str(self._target.root.path)

    @property
    def ranks_count(self) -> int:
        """How many ranks save together."""
        return 1 if self._target.ranks is None else self._target.ranks.ranks_count

    def save_async(
        self,
        step: int | None = None,
        *,
        kind: SaveKind = "auto",
        metadata: Mapping[str, Any] | None = None,
        on_busy: OnBusy | None = None,
    ) -> SaveFuture:
        """Capture the state of this step and return; the files are written in the background.

        When it returns, the caller may change or free everything. step None means one more than the newest in the
        directory. kind: "full" holds everything; "delta" dense tensors and the rows written since the newest checkpoint
        that this Saver has committed; "auto" what the policy `deltas` says. Raises SaveInProgressError, ConflictError,
        UsageError, UnsupportedError, DeadlineError; or, once, the error of an earlier background save that nobody has
        asked for.
        """
        return self._start(step, kind, metadata, on_busy, staged=True)

    def save(
        self,
        step: int | None = None,
        *,
        kind: SaveKind = "auto",
        metadata: Mapping[str, Any] | None = None,
        on_busy: OnBusy | None = None,
    ) -> SaveResult:
        """Save and return when the checkpoint is durable; needs two chunk buffers instead of an arena."""
        return self._start(step, kind, metadata, on_busy, staged=False).result(SAVE_DEADLINE_S)

    def compact(self, step: int | None = None) -> SaveFuture:
        """Fold the chain of a delta (default: the newest step) into a full checkpoint of that step, in the background.

        Beside training and saves, without a stall. The future's result says `skipped` for a step that is full already.
        See asyncckpt.compact for what it does and raises. Of several ranks, rank 0 does it, and the others skip it.
        """
        self._check_open()
        self._errors.raise_first()
        if self._target.rank:
            return skipped_compaction(self._target, step)
        future = start_compaction(self._target, step)
        self._errors.watch(future)
        return future

    def leave_out_call(self, error: BaseException) -> None:
        """Tell the other ranks that this one does not make the save which they make now, because of an error.

        For code around a Saver that raises where other ranks save: ranks that do not count their saves alike would not
        find together again. Does nothing with one rank.
        """
        if self._target.ranks is not None:
            tell_failed(self._target, self._target.ranks.next_call(), error)

    def prepare(self) -> PrepareFuture:
        """Plan the save, and allocate and touch its arena in the background, so that the first save is as fast as later
        ones.

        Returns a future; waiting for it is not needed. The state must not be resized until it is done.
        """
        self._check_open()
        return prepare_arena(self._target)

    def wait_idle(self, timeout: float | None = None) -> None:
        """Wait for saves in flight and their retention; then raise the first error nobody has asked for."""
        self._wait_in_flight(SAVE_DEADLINE_S if timeout is None else timeout)
        self._errors.raise_first()

    def statistics(self) -> SaverStatistics:
        """Counts and sums over all saves of this Saver so far, and the arenas of the process."""
        arenas = pool.statistics()
        return replace(
            self._counts.statistics,
            plans_made_count=self._target.plans.plans_made_count,
            arenas_count=arenas.arenas_count,
            arena_bytes=arenas.touched_bytes,
            arena_touches_count=arenas.touches_count,
        )

    def close(self) -> None:
        """Wait for saves in flight, release the directory, raise the first error nobody has asked for. Idempotent.

        Interrupted while it waits, it leaves the directory locked until the save in flight has ended.
        """
        self._closed = True
        if not self._finalizer.alive:
            return
        self._wait_in_flight(SAVE_DEADLINE_S)
        if self._target.ranks is not None and not background.is_current_thread():
            self._target.ranks.wait_told()
        self._finalizer()
        self._errors.raise_first()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except Exception as closing:  # The error that is on its way matters more.
            if error is not None and hasattr(error, "add_note"):
                error.add_note(f"and closing the Saver raised: {closing}")

    def _start(
        self,
        step: int | None,
        kind: SaveKind,
        metadata: Mapping[str, Any] | None,
        on_busy: OnBusy | None,
        *,
        staged: bool,
    ) -> SaveFuture:
        self._check_open()
        ranks = self._target.ranks
        call = None if ranks is None else ranks.next_call()
        try:
            check_choice("kind", kind, SAVE_KINDS)
            if on_busy is not None:
                check_choice("on_busy", on_busy, ON_BUSY)
            self._errors.raise_first()
            future = start_save(
                self._target,
                step=step,
                kind=kind,
                metadata=metadata,
                on_busy=on_busy or self._on_busy,
                staged=staged,
                call=call,
            )
        except BaseException as error:
            if call is not None:
                tell_failed(self._target, call, error)
            raise
        self._errors.watch(future)
        future.add_done_callback(self._counts.add)
        return future

    def _wait_in_flight(self, timeout: float) -> None:
        """Also for retention, which goes on when a save has ended."""
        if self._errors.in_flight():
            check_may_wait("a save")
        until = time.monotonic() + timeout
        for future in self._errors.in_flight():
            try:
                future._inner.exception(max(0.0, until - time.monotonic()))
            except TimeoutError:
                raise DeadlineError(f"{future!r} did not end within {timeout} s") from None
        if wait(self._target.retaining, max(0.0, until - time.monotonic())).not_done:
            raise DeadlineError(f"retention in {self.path!r} did not end within {timeout} s")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"Saver of {self.path!r} is closed")
        if self._pid != os.getpid():
            raise UsageError("this Saver belongs to the parent process", hint="make a new one in this process")
        if self._lock is not None:
            self._lock.check()


def _give_back(opened: Opened, regions: RegionCache) -> None:
    """Let another process write to the directory, and other Savers use the arenas."""
    for layout in regions.layouts():
        pool.forget(layout)
    if opened.ranks is not None:
        opened.ranks.channel.close()
    if opened.lock is not None:
        opened.lock.release()
    opened.root.close()
