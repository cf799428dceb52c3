"""The Saver of multi-level tables: RecSDK's shape (`Saver(rank).save(module, path)`, `.load(module, path)`), and ours.

A save: every rank checks its arguments, opens the directory, which all ranks share, and calls the asyncckpt.Saver of
that directory. The ranks agree and commit in the background (docs/ranks.md). A rank that cannot begin aborts the save
on all of them.

A load: check everything on all ranks, agree, then fill the tables (see load_ranks.py and recsdk_load.py).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from asyncckpt.arguments import check_seconds
from asyncckpt.embcache.find_collections import SavedTables, saved_tables
from asyncckpt.embcache.load_ranks import RanksLoad, SparseLoadReport, prepare_ranks_load
from asyncckpt.embcache.path_rules import STRICT, PathRules, make_folders
from asyncckpt.embcache.rank_folders import METADATA_KEY, earlier_steps, rank_folders, steps_of
from asyncckpt.embcache.ranks import Peers, which_saver
from asyncckpt.embcache.recsdk_load import RecsdkLoad, prepare_recsdk_load
from asyncckpt.engine.process.event_loop import Closing, check_may_wait_here
from asyncckpt.engine.process.future import SaveFuture
from asyncckpt.engine.process.save_lock import Ticket, save_lock
from asyncckpt.engine.ranks.open_directory import announce_open, leave_out_opening
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.errors import CheckpointError, ConflictError, SaveInProgressError, UsageError, closing_beside, must_be
from asyncckpt.format.names import DATA_DIR, LOCK_NAME, MANIFESTS_DIR, check_step
from asyncckpt.model.result import SaveResult
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.options import (
    SAVE_DEADLINE_S,
    BusyPolicy,
    DeltaPolicy,
    DeviceOptions,
    Durability,
    KeepPolicy,
    OnBusy,
    RankOptions,
    SaveKind,
)
from asyncckpt.pipeline.row_filters import RowFilter
from asyncckpt.saver import Saver as DirectorySaver
from asyncckpt.signals import check_timeout, uninterrupted
from asyncckpt.tables.left_out import check_all_taken

ON_BUSY = ("raise", "wait", "queue")
OPEN_FOLDERS_MAX = 4
PEERS_DEADLINE_S = 1800.0
_LEFT_OUT_HINT = "pass the part with the collections alone, and save the others with asyncckpt.Saver(hashtables=...)"


@dataclass(frozen=True)
class _OpenFolder:
    """The open Saver of one folder and module. earlier: steps that are there in the earlier form."""

    saver: DirectorySaver
    saved: SavedTables
    ranks: Ranks | None
    earlier: frozenset[int]

    @property
    def metadata(self) -> dict[str, Any]:
        """What the manifest says beside the tables: which of them are companions of others."""
        return {METADATA_KEY: {"companions": list(self.saved.companions)}}

    def next_step(self, step: int | None) -> int | None:
        """Return the step to save; None: one more than the newest one in the directory. Raises ConflictError."""
        if step is not None and step in self.earlier:
            hint = "steps are never overwritten: save another step"
            raise ConflictError(f"step {step} already exists in {self.saver.path!r}", hint=hint)
        if step is not None or not self.earlier:
            return step
        path = Path(self.saver.path)
        begun = {ticket.step for ticket in save_lock.in_flight() if ticket.path == path and ticket.step is not None}
        newest = max(self.earlier)
        return newest + 1 if max(steps_of(path) | begun, default=-1) <= newest else None


class _ExactModesSaver(DirectorySaver):
    """Gives what it makes the modes that RecSDK gives it."""

    _exact_modes = True


class Saver(Closing):
    """Save and load the multi-level tables of a module, and nothing else of it.

    rank                which rank this is; may be left out where torch.distributed is initialised
    world_size          how many ranks there are; from torch.distributed, else, unless given, as the tables say
    path_rules          what a path must be like; strict by default, which refuses URLs of object stores too
    parallel            most shard files of one save and rank
    on_busy             what a call does while a save or load of this process is in flight: "raise", "wait", or, for
                        saves, "queue"; or a BusyPolicy. None: save and load wait, save_async raises
    durability, host_memory_limit, device, deltas, keep, filters   as for asyncckpt.Saver
    peers_deadline      seconds that ranks wait for each other to come to a save or a load
    in_turn             one process saves all ranks in turn, as with RankOptions(in_turn=True), and loads them

    All ranks make the same calls in the same order. They find each other by torch.distributed, or, where that is not
    initialised, by files in the directory. The directory stays open, and its tables are held, until `close()`, or the
    end of a `with` block. Raises UsageError. Source of the interface: RecSDK `torchrec_embcache.saver.Saver`.
    """

    def __init__(
        self,
        rank: int | None = None,
        *,
        world_size: int | None = None,
        path_rules: PathRules = STRICT,
        parallel: int = 8,
        on_busy: OnBusy | BusyPolicy | None = None,
        durability: Durability = "fsync",
        host_memory_limit: int | None = None,
        device: DeviceOptions = DeviceOptions(),
        deltas: DeltaPolicy | None = None,
        keep: int | KeepPolicy | None = None,
        filters: Sequence[RowFilter] = (),
        peers_deadline: float = PEERS_DEADLINE_S,
        in_turn: bool = False,
    ) -> None:
        self._rank, self._world_size = which_saver(rank, world_size, in_turn=in_turn)
        self._in_turn = in_turn
        if not isinstance(path_rules, PathRules):
            raise must_be("path_rules", PathRules, type(path_rules))
        self._busy = BusyPolicy.of("raise" if on_busy is None else on_busy, actions=ON_BUSY)
        self._on_busy = on_busy
        check_seconds("peers_deadline", peers_deadline, above_zero=True)
        self._rules = path_rules
        self._peers_deadline = float(peers_deadline)
        self._options: dict[str, Any] = {
            "parallel": parallel,
            "durability": durability,
            "host_memory_limit": host_memory_limit,
            "device": device,
            "deltas": deltas,
            "keep": KeepPolicy.of(keep, has_metadata=False),
            "filters": filters,
        }
        self._peers = Peers(self._rank, self._world_size, deadline_s=self._peers_deadline)
        self._open: OrderedDict[Place, _OpenFolder] = OrderedDict()
        self._checked: weakref.ref[nn.Module] | None = None  # The module that holds no other tables.
        self._closed = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int | None:
        return self._world_size

    @uninterrupted
    def save(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        kind: SaveKind = "auto",
    ) -> SaveResult:
        """Save the tables of this rank and return when the checkpoint is durable, with the tables of all ranks.

        step None: one more than the newest in path. kind: as for asyncckpt.Saver; RecSDK's incremental=True is "delta".
        Raises UsageError, ConflictError, SaveInProgressError, PeerError (another rank failed), IOFailedError, ...
        """
        folder, step = self._begin(module, path, step)
        return folder.saver.save(step, kind=kind, metadata=folder.metadata)

    @uninterrupted
    def save_async(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        kind: SaveKind = "auto",
    ) -> SaveFuture:
        """Capture the tables of this rank and return; training goes on at once, the files are written in the
        background.

        The future resolves when the tables of all ranks are committed, together. Raises as `save`; what goes wrong on
        another rank, or later, the future raises.
        """
        folder, step = self._begin(module, path, step, may_wait=False)
        return folder.saver.save_async(step, kind=kind, metadata=folder.metadata)

    @uninterrupted
    def load(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        incremental: bool = False,
        momentum_slots: Mapping[str, str | None] | None = None,
    ) -> SparseLoadReport:
        """Load the newest save, or that of a step; also of the earlier form, with one directory per rank, and of
        RecSDK.

        Any number of ranks may have saved it: each table takes the ids it owns, by their unsigned value modulo the
        number of ranks. Nothing is changed before all checks have passed, on all ranks; a failure after that leaves the
        tables empty, as the error tells.

        For RecSDK's files: incremental says that they hold only a part of the rows, which then go on top of those in
        the tables. momentum_slots maps "momentum1", "momentum2" to optimizer slots, or to None to leave one out; by
        default they go to the slots in their order. Raises UsageError, NotFoundError, CorruptError, IncompatibleError,
        ConflictError, PeerError (another rank failed), SaveInProgressError, IOFailedError.
        """
        self._check_open()
        ticket: Ticket | None = None
        prepared: RanksLoad | RecsdkLoad | None = None
        error: BaseException | None = None
        try:
            try:
                source = self._rules.check_source(path)
                saved = self._saved_tables(module)
                step = check_step(step)
                # For the folders of all ranks.
                wanted = Ticket(kind="load", path=source, step=step, thread=threading.get_ident())
                on_busy: OnBusy = "wait" if self._on_busy is None or self._busy.action != "raise" else "raise"
                ticket = wanted
                save_lock.acquire(wanted, on_busy=on_busy, deadline_s=self._busy.deadline)
                prepared = self._prepare(source, saved, step, incremental, momentum_slots)
            except BaseException as failure:  # The other ranks hear of Ctrl-C too.
                error = failure
            found = "" if prepared is None or prepared.step is None else f"step {prepared.step}"
            self._peers.agree_on_load("the load", error, result=found)
            assert prepared is not None
            report: SparseLoadReport | None = None
            try:
                report = prepared.run()
            except BaseException as failure:
                error = failure
            self._peers.agree_on_load("filling the tables (those of this rank are filled)", error)
            assert report is not None
            return report
        finally:
            if ticket is not None:
                save_lock.release(ticket)

    @uninterrupted
    def wait_idle(self, timeout: float | None = None) -> None:
        """Wait until no save of this Saver is in flight; then raise the first error nobody has asked for."""
        check_timeout(timeout)
        savers = [folder.saver for folder in self._open.values()]
        until = time.monotonic() + (SAVE_DEADLINE_S if timeout is None else timeout)
        for saver in savers:
            saver._wait_in_flight(max(0.0, until - time.monotonic()))
        for saver in savers:
            saver._errors.raise_first()

    @uninterrupted
    def close(self) -> None:
        """Wait for saves in flight, let go of all folders, raise the first error nobody has asked for. Idempotent."""
        self._closed = True
        try:
            self._close_folders()
        finally:
            self._peers.close()

    async def aclose(self) -> None:
        """Close without stopping the event loop, as `async with` does; raises as `close`. Cancelled, close it again."""
        self._closed = True
        first: CheckpointError | None = None
        for path, folder in tuple(self._open.items()):
            try:
                with closing_beside(first, "closing another folder raised"):
                    await folder.saver.aclose()
            except CheckpointError as error:
                first = error
            self._open.pop(path, None)
        with closing_beside(first, "closing the channels raised"):
            await asyncio.to_thread(self._peers.close)
        if first is not None:
            raise first

    def _begin(
        self, module: nn.Module, path: str | os.PathLike[str], step: int | None, *, may_wait: bool = True
    ) -> tuple[_OpenFolder, int | None]:
        """Check and open everything; return the open folder and the step to save. The other ranks hear of an error.

        may_wait: also on an event loop, for saves to folders that have to be closed before.
        """
        self._check_open()
        ranks = self._peers.for_saving(before_reopening=self._close_folders)
        target: Place | None = None
        try:
            target = self._rules.check_target(path)
            saved = self._saved_tables(module)
            self._check_all_taken(module, saved)
            step = check_step(step)
            self._check_not_busy(may_wait=may_wait)
            folder = self._folder(target, saved, ranks, may_wait=may_wait)
            return folder, folder.next_step(step)
        except BaseException as error:
            if ranks is not None:
                leave_out_opening(ranks, error)
            elif target is not None and target in self._open:
                self._open[target].saver._leave_out_call(error)
            raise

    def _folder(self, target: Place, saved: SavedTables, ranks: Ranks | None, *, may_wait: bool) -> _OpenFolder:
        """Return the open folder; reopened for another module, or for ranks that have found each other again."""
        known = self._open.get(target)
        if known is not None and known.saved.is_same(saved) and known.ranks is ranks:
            self._open.move_to_end(target)
            if ranks is not None:
                announce_open(ranks)
            return known
        while target in self._open or len(self._open) >= OPEN_FOLDERS_MAX:
            leaving = target if target in self._open else next(iter(self._open))
            if not may_wait and not self._open[leaving].saver._is_idle():
                check_may_wait_here(f"folder {str(leaving)!r}")
            self._open.pop(leaving).saver.close()
        self._check_links_below(target)
        if isinstance(target, Path) and (self._rank == 0 or self._in_turn):
            make_folders(target)
        saver = _ExactModesSaver(
            self._rank,
            self._world_size or saved.world_size,
            path=str(target),
            hashtables=saved.tables,
            on_busy=self._on_busy,
            ranks=RankOptions(ranks, peer_deadline=self._peers_deadline, in_turn=self._in_turn),
            **self._options,
        )
        self._open[target] = opened = _OpenFolder(saver, saved, ranks, earlier_steps(target))
        return opened

    def _close_folders(self) -> None:
        first: CheckpointError | None = None
        while self._open:
            _, folder = self._open.popitem(last=False)
            try:
                with closing_beside(first, "closing another folder raised"):
                    folder.saver.close()
            except CheckpointError as error:
                first = error
        if first is not None:
            raise first

    def _saved_tables(self, module: nn.Module) -> SavedTables:
        saved = saved_tables(module)
        saved.check_shard(rank=self._rank, world_size=self._world_size)
        return saved

    def _check_all_taken(self, module: nn.Module, saved: SavedTables) -> None:
        """Raise UsageError for a module with other tables too; looks for them when a module is first seen."""
        if self._checked is None or self._checked() is not module:
            check_all_taken(module, saved.all.values(), hint=_LEFT_OUT_HINT)
            self._checked = weakref.ref(module)

    def _check_links_below(self, folder: Place) -> None:
        if isinstance(folder, StoreUrl):
            return
        ranks = [place for world in rank_folders(folder).values() for place in world.values()]
        for place in (folder / MANIFESTS_DIR, folder / DATA_DIR, *ranks):
            self._rules.check_links(place)

    def _check_not_busy(self, *, may_wait: bool) -> None:
        """Find out before another module's Saver is closed, which would wait."""
        in_flight = save_lock.in_flight()
        if self._busy.action == "raise" and in_flight and not (may_wait and self._on_busy is None):
            hint = "await it, or give the Saver on_busy='wait' or 'queue'"
            raise SaveInProgressError(f"a {in_flight[0]} is still running", hint=hint)

    def _prepare(
        self,
        source: Place,
        saved: SavedTables,
        step: int | None,
        incremental: bool,
        momentum_slots: Mapping[str, str | None] | None,
    ) -> RanksLoad | RecsdkLoad:
        self._check_links_below(source)
        ranks = rank_folders(source)
        ours = (MANIFESTS_DIR, LOCK_NAME)
        if isinstance(source, Path) and not ranks and not any((source / name).exists() for name in ours):
            if step is not None:
                raise UsageError("files of RecSDK have no steps", found=step, expected=None)
            return prepare_recsdk_load(source, saved, incremental=incremental, momentum_slots=momentum_slots)
        if incremental or momentum_slots is not None:
            raise UsageError("incremental and momentum_slots are for files of RecSDK", found=str(source))
        return prepare_ranks_load(source, saved, step=step)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this Saver of multi-level tables is closed")
