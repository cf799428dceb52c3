"""The Loader: first RecIS' arguments (`checkpoint_path, hashtables, tensors, parallel, filter_func`), then ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Literal

import torch

from asyncckpt.arguments import check_choice, check_int, check_type
from asyncckpt.commit.root import open_root
from asyncckpt.devices.current_runtime import CallerStreams
from asyncckpt.engine.load.run_load import LoadRequest, run_load
from asyncckpt.engine.load.whole_state import WholeRequest
from asyncckpt.engine.process.background import workers
from asyncckpt.engine.process.event_loop import WaitsUntilFree, check_may_wait_for
from asyncckpt.engine.process.future import FutureState, LoadFuture
from asyncckpt.engine.process.save_lock import Ticket, save_lock
from asyncckpt.errors import must_be
from asyncckpt.format.names import check_step
from asyncckpt.model.own_rank import own_rank
from asyncckpt.model.result import LoadReport
from asyncckpt.model.store_url import Place
from asyncckpt.model.table import Table
from asyncckpt.modules.walk import tables_of
from asyncckpt.native import Progress
from asyncckpt.options import PARALLEL_MAX, BusyPolicy, OnBusy, RankOptions
from asyncckpt.plan.load_offer import LoadFilter
from asyncckpt.plan.named_tables import named_tables
from asyncckpt.plan.rename import Names
from asyncckpt.plan.state import TensorsArgument, named_state
from asyncckpt.shard.reader import read_threads
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.folder import check_place


class Loader(WaitsUntilFree):
    """Load a checkpoint into hash tables and tensors.

    checkpoint_path  the directory a Saver wrote to, or the URL of one in an object store
    hashtables       mapping name -> Table, or a module (see asyncckpt.adapters.tables_of); a table takes only the ids
                     it owns (unsigned id modulo its shard count, or its range of rows), so tables of any sharding load
                     from checkpoints of any other
    tensors          like the Saver's: tensors, arrays and modules are filled in place, other objects get
                     load_state_dict, plain values are returned in LoadReport.values. For a tensor that is spread over
                     ranks (DTensor, ShardedTensor, Sharded), fills this rank's part, whichever rank saved which part
    parallel         most reading threads, but not more than cores (or 4, if those are fewer); each reads 4 MiB at a
                     time
    filter_func      gets and returns {destination: {source: [columns]}}: drop, rename, subset, merge sources. It gets
                     all destinations of the model, as in RecIS, and what the checkpoint has in `.sources` of it.
                     None: everything, under its own name
    step             None: the newest
    strict           raise IncompatibleError for missing entries, for unexpected ones inside a module, and for tables of
                     a module that are not in hashtables while the checkpoint has tables that nothing takes; else report
                     them, and warn if nothing is loaded at all. Then an optimizer takes what was saved of the tables,
                     and of the parameters with names (`param_names`), that it still has, slots of another shape are as
                     in new rows, and an object that does not fit stays as it is, with a warning
    verify           True: check digests while reading. "before": read and check everything (if several ranks have
                     saved, everything that this one needs) before any target is touched. False: do not check
    cast             fill targets of other dtypes than were saved, tables too: floats from floats, rounded to the
                     nearest as torch does it, and integers from integers whose values they all hold. Else another dtype
                     is an IncompatibleError
    rename           {old: new} for tables, tensors and values that have another name now, or what their names begin
                     with up to a dot. What the checkpoint has under its new name already is not renamed, so the same
                     load works again. No name may be both old and new
    resize           names of tables and tensors, or what these begin with, that may have another shape, with as many
                     dimensions, than was saved: what both shapes have is loaded. The rest of a tensor stays as it is;
                     that of a row is as in a new row, that of an optimizer's moments 0
    merge            add rows to what a table holds (as RecIS does); by default a table is emptied first
    fallback         if the wanted step is damaged, load the newest older one that is sound, and report that
    on_busy          "raise" or "wait" while a save or load of this process is in flight, or a BusyPolicy. None: load
                     waits, load_async raises
    shard_index      rank of this process among shard_num; None: of ranks.process_group, or of torch.distributed if
                     it is initialised, else 0 of 1. It decides which plain values, and which state of objects, are
                     loaded: those of the same rank if as many ranks have saved, else those of all ranks, the lowest
                     first
    ranks            RankOptions, as the Saver's: its process_group names the ranks that load together, if not all of
                     torch.distributed

    In a job of several ranks, each one loads by itself: none waits for another, and each reads only the blocks that it
    needs. All of them should name the same step. Never writes or deletes.

    Without hashtables, tensors and filter_func, everything but the tables is loaded into LoadReport.tree, as by
    asyncckpt.load.

    Targets on devices are written after what the caller has queued on the current streams, and are complete for every
    stream when the load returns or its future is done. Source of the interface: RecIS `Loader`.
    """

    def __init__(
        self,
        checkpoint_path: str | os.PathLike[str],
        hashtables: Mapping[str, Table] | torch.nn.Module | None = None,
        tensors: TensorsArgument | None = None,
        parallel: int = 16,
        filter_func: LoadFilter | None = None,
        *,
        step: int | None = None,
        strict: bool = True,
        verify: bool | Literal["before"] = True,
        cast: bool = False,
        rename: Mapping[str, str] | None = None,
        resize: Collection[str] = (),
        merge: bool = False,
        fallback: bool = False,
        on_busy: OnBusy | BusyPolicy | None = None,
        shard_index: int | None = None,
        shard_num: int | None = None,
        ranks: RankOptions = RankOptions(),
    ) -> None:
        check_int("parallel", parallel, at_least=1, at_most=PARALLEL_MAX)
        check_choice("verify", verify, (True, False, "before"))
        check_type("fallback", fallback, bool)
        names, sizes = checked_changes(strict, cast, rename, resize)
        step = check_step(step)
        check_type("ranks", ranks, RankOptions)
        self._busy = BusyPolicy.of("raise" if on_busy is None else on_busy, actions=("raise", "wait"))
        self._busy_of_load = BusyPolicy("wait") if on_busy is None else self._busy
        if ranks.alone and shard_num is None:
            shard_index, shard_num = 0, 1
        rank, ranks_count = own_rank(shard_index, shard_num, ranks.process_group, names=("shard_index", "shard_num"))
        self._path = check_place(checkpoint_path)
        tables = tables_of(hashtables) if isinstance(hashtables, torch.nn.Module) else hashtables
        if fallback and (sizes or not strict or merge or filter_func is not None):
            verify = "before"  # Parts of a damaged step would stay where an older one has none.
        self._request = LoadRequest(
            tables=dict(named_tables(tables)),
            state=named_state(tensors),
            filter_func=filter_func,
            step=step,
            strict=strict,
            verify=verify,
            cast=cast,
            rename=names,
            resize=sizes,
            merge=merge,
            fallback=fallback,
            threads=read_threads(parallel),
            rank=rank,
            ranks_count=ranks_count,
            whole=WholeRequest() if hashtables is None and tensors is None and filter_func is None else None,
        )

    def load(self) -> LoadReport:
        """Load now. Touches no target before reading begins.

        Raises NotFoundError, CorruptError, IncompatibleError, UnsupportedError, UsageError, IOFailedError,
        SaveInProgressError, DeviceError.
        """
        return load_now(self._path, self._request, self._busy_of_load)

    def load_async(self) -> LoadFuture:
        """Load on a background thread; the targets must not be used until the future is done."""
        future = None
        try:
            with uninterrupted:
                future = self._start()
        except BaseException:
            if future is not None:
                future.cancel()
            raise
        return future

    def _start(self) -> LoadFuture:
        streams = CallerStreams()
        ticket = _acquire(self._path, self._request, self._busy, check_may_wait_for)
        future = LoadFuture(step=self._request.step, path=self._path, what="load")

        def load() -> LoadReport:
            try:
                streams.follow()
                try:
                    with open_root(self._path) as root:
                        is_read = partial(future.enter, FutureState.COMMITTING)
                        return run_load(root, self._request, future.native_progress, on_read=is_read)
                finally:  # Nothing is written after the future has ended, even if it fails.
                    streams.wait()
            finally:
                save_lock.release(ticket)

        try:
            workers.submit(future.end_with, load)
        except BaseException:
            save_lock.release(ticket)
            raise
        save_lock.hand_over(ticket)
        return future


def changed_request(
    *,
    strict: bool = True,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
    resize: Collection[str] = (),
    filter_func: LoadFilter | None = None,
) -> LoadRequest:
    """Return what a trainer's `restore` asks for. UsageError."""
    names, sizes = checked_changes(strict, cast, rename, resize)
    return LoadRequest(filter_func=filter_func, strict=strict, cast=cast, rename=names, resize=sizes)


def checked_changes(
    strict: bool, cast: bool, rename: Mapping[str, str] | None, resize: Collection[str]
) -> tuple[Mapping[str, str], frozenset[str]]:
    """Return rename and resize of a Loader. UsageError for what none of the four may be."""
    check_type("strict", strict, bool)
    check_type("cast", cast, bool)
    if rename is not None and not isinstance(rename, Mapping):
        raise must_be("rename", "a mapping of old names to new ones", rename)
    names = [*resize] if isinstance(resize, Iterable) and not isinstance(resize, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise must_be("resize", "names of tables and tensors", resize)
    return (Names.of(rename).new if rename else {}), frozenset(names)


@uninterrupted
def load_now(path: Place, request: LoadRequest, busy: BusyPolicy) -> LoadReport:
    """Load when no other save or load of this process is in flight."""
    ticket = _acquire(path, request, busy, lambda other: None)
    try:
        with open_root(path) as root:
            return run_load(root, request, Progress())
    finally:
        save_lock.release(ticket)


def _acquire(path: Place, request: LoadRequest, busy: BusyPolicy, before_wait: Callable[[Ticket], None]) -> Ticket:
    ticket = Ticket(kind="load", path=path, step=request.step, thread=threading.get_ident())
    save_lock.acquire(ticket, on_busy=busy.action, deadline_s=busy.deadline, before_wait=before_wait)
    return ticket
