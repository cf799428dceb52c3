"""The Loader: RecIS' shape (`checkpoint_path, hashtables, tensors, parallel, filter_func`), and ours behind it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from asyncckpt.adapters import tables_of
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.devices.caller_streams import CallerStreams
from asyncckpt.engine.background import workers
from asyncckpt.engine.future import FutureState, LoadFuture
from asyncckpt.engine.load import LoadRequest, run_load
from asyncckpt.engine.lock import Ticket, save_lock
from asyncckpt.engine.reader_rank import reader_rank
from asyncckpt.errors import UsageError
from asyncckpt.model.result import LoadReport
from asyncckpt.model.table import Table
from asyncckpt.options import BUSY_DEADLINE_S, PARALLEL_MAX, OnBusy
from asyncckpt.pipeline.filters import identity
from asyncckpt.plan.load_plan import LoadFilter
from asyncckpt.plan.named_tables import named_tables
from asyncckpt.plan.state import named_state
from asyncckpt.storage.directory import check_path

READ_THREADS_MAX = 4


class Loader:
    """Load a checkpoint into hash tables and tensors.

    checkpoint_path  the directory a Saver wrote to
    hashtables       mapping name -> Table, or a module, whose tables are found by asyncckpt.adapters.tables_of; a table
                     takes just the ids it owns (unsigned id modulo its shard count, or its range of rows), so tables of
                     any sharding load from checkpoints of any other
    tensors          like the Saver's: tensors, arrays and modules are filled in place, other objects get
                     load_state_dict, plain values come back in LoadReport.values. Of a tensor that is spread over ranks
                     (DTensor, ShardedTensor, Sharded) this rank's part is filled, whatever part of it which rank saved
    parallel         most threads that read (this version uses up to 4)
    filter_func      gets and returns {destination: {source: [columns]}}: drop, rename, subset, merge sources
    step             None: the newest
    strict           missing entries, and unexpected ones inside a module, are an IncompatibleError; else they are
                     reported
    verify           True: digests are checked while reading. "before": all is read and checked before any target is
                     touched (of what several ranks have saved: all that this one needs). False: not checked
    merge            rows are added to what a table holds (RecIS' way); by default a table is emptied first
    fallback         when the wanted step is damaged, load the newest older one that is sound, and say so in the report
    on_busy          "raise" or "wait" while a save or load of this process is in flight
    shard_index      which rank of shard_num this process is; None: of process_group, or of torch.distributed when it is
                     initialised, else 0 of 1. It tells which plain values, and which state of objects, are loaded:
                     where as many ranks have saved, those of the same rank, else those of all ranks, the lowest first
    process_group    the ranks that load together, if not all of torch.distributed

    In a job of several ranks each one loads for itself: none waits for another, and each reads only the blocks that it
    needs. All of them should name the same step. Never writes or deletes.

    Targets on devices are written behind what the caller has queued on the current streams, and are complete for every
    stream when the load returns, or its future is done. Source of the interface: RecIS `Loader`.
    """

    def __init__(
        self,
        checkpoint_path: str | os.PathLike[str],
        hashtables: Mapping[str, Table] | torch.nn.Module | None = None,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        parallel: int = 16,
        filter_func: LoadFilter = identity,
        *,
        step: int | None = None,
        strict: bool = True,
        verify: bool | Literal["before"] = True,
        merge: bool = False,
        fallback: bool = False,
        on_busy: OnBusy = "raise",
        busy_deadline: float = BUSY_DEADLINE_S,
        shard_index: int | None = None,
        shard_num: int | None = None,
        process_group: Any = None,
    ) -> None:
        if type(parallel) is not int or not 1 <= parallel <= PARALLEL_MAX:
            raise UsageError("parallel is wrong", found=parallel, expected=f"an int in [1, {PARALLEL_MAX}]")
        if verify not in (True, False, "before"):
            raise UsageError("verify is wrong", found=verify, expected=(True, False, "before"))
        if on_busy not in ("raise", "wait"):
            raise UsageError("on_busy is wrong", found=on_busy, expected=("raise", "wait"))
        if step is not None and (type(step) is not int or step < 0):
            raise UsageError("step is wrong", found=step, expected="a non-negative int, or None for the newest")
        if not isinstance(busy_deadline, (int, float)) or not 0 <= busy_deadline <= threading.TIMEOUT_MAX:
            raise UsageError("busy_deadline is wrong", found=busy_deadline, expected="seconds, at least 0")
        self._rank, self._ranks_count = reader_rank(shard_index, shard_num, process_group)
        self._path = check_path(checkpoint_path)
        tables = tables_of(hashtables) if isinstance(hashtables, torch.nn.Module) else hashtables
        self._tables = dict(named_tables(tables))
        self._state = named_state(tensors)
        self._threads = min(parallel, READ_THREADS_MAX)
        self._filter_func = filter_func
        self._step = step
        self._strict = strict
        self._verify = verify
        self._merge = merge
        self._fallback = fallback
        self._on_busy: OnBusy = on_busy
        self._busy_deadline_s = float(busy_deadline)

    def load(self) -> LoadReport:
        """Load now. Until reading begins no target is touched.

        Raises NotFoundError, CorruptError, IncompatibleError, UnsupportedError, UsageError, IOFailedError,
        SaveInProgressError, DeviceError.
        """
        ticket = self._acquire(thread=threading.get_ident())
        try:
            return self._run(LoadFuture(step=self._step, path=self._path, what="load"))
        finally:
            save_lock.release(ticket)

    def load_async(self) -> LoadFuture:
        """Load on a background thread; the targets must not be used until the future is done."""
        streams = CallerStreams()
        ticket = self._acquire()
        future = LoadFuture(step=self._step, path=self._path, what="load")

        def work() -> None:
            try:
                streams.follow()
                try:
                    report = self._run(future)
                finally:  # Nothing is written behind the end of the future, however it ends.
                    streams.wait()
            except BaseException as error:
                save_lock.release(ticket)
                future.fail(error, FutureState.FAILED)
            else:
                save_lock.release(ticket)
                future.resolve(report, FutureState.COMMITTED)

        try:
            workers.submit(work)
        except BaseException:
            save_lock.release(ticket)
            raise
        return future

    def _acquire(self, thread: int | None = None) -> Ticket:
        ticket = Ticket(kind="load", path=self._path, step=self._step, thread=thread)
        save_lock.acquire(ticket, on_busy=self._on_busy, deadline_s=self._busy_deadline_s)
        return ticket

    def _run(self, future: LoadFuture) -> LoadReport:
        with CheckpointRoot.for_reading(self._path) as root:
            request = LoadRequest(
                root=root,
                tables=self._tables,
                state=self._state,
                filter_func=self._filter_func,
                step=self._step,
                strict=self._strict,
                verify=self._verify,
                merge=self._merge,
                fallback=self._fallback,
                threads=self._threads,
                rank=self._rank,
                ranks_count=self._ranks_count,
            )
            return run_load(request, future.native_progress)
