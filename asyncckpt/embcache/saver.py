"""The Saver of multi-level tables: RecSDK's shape (`Saver(rank).save(module, path)`, `.load(module, path)`), and ours.

A save of several ranks:
1. Every rank checks its arguments, opens its own folder, and sees which step would be next.
2. All ranks agree: nobody has failed, on the step, and on a random save id (see ranks.py).
3. Every rank saves its tables, in the background or blocking, with the id in the metadata.
4. After a blocking save the ranks agree that all have committed. After an asynchronous one a load finds out.

A load: check everything on all ranks, agree, then fill the tables (see load_ranks.py and recsdk_load.py).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from asyncckpt.arguments import check_seconds
from asyncckpt.embcache.find_collections import SavedTables, saved_tables
from asyncckpt.embcache.load_ranks import RanksLoad, prepare_ranks_load
from asyncckpt.embcache.path_rules import STRICT, PathRules, make_folders
from asyncckpt.embcache.rank_folders import RankFacts, SeenSteps, rank_folder, rank_folders
from asyncckpt.embcache.ranks import AgreedSave, Peers, which_rank
from asyncckpt.embcache.recsdk_load import RecsdkLoad, prepare_recsdk_load
from asyncckpt.embcache.report import SparseLoadReport
from asyncckpt.engine.future import SaveFuture
from asyncckpt.engine.lock import Ticket, save_lock
from asyncckpt.engine.open_errors import close_behind
from asyncckpt.errors import CheckpointError, ConflictError, SaveInProgressError, UsageError
from asyncckpt.format.names import STEP_MAX
from asyncckpt.model.result import SaveResult
from asyncckpt.options import BusyPolicy, DeltaPolicy, DeviceOptions, Durability, OnBusy, SaveKind
from asyncckpt.saver import Saver as RankSaver

ON_BUSY = ("raise", "wait", "queue")
OPEN_FOLDERS_MAX = 4
PEERS_DEADLINE_S = 1800.0


@dataclass
class _OpenFolder:
    """The open Saver of one folder and module. `newest` is the last step begun there, -1 before the first."""

    saver: RankSaver
    saved: SavedTables
    future: SaveFuture | None = None
    newest: int = -1

    def is_idle(self) -> bool:
        return self.future is None or self.future.done()


class _ExactModesSaver(RankSaver):
    """Gives what it makes the modes that RecSDK gives it."""

    _exact_modes = True


class Saver:
    """Save and load the multi-level tables of a module, and nothing else of it.

    rank                which rank this is; may be left out where torch.distributed is initialised
    world_size          how many ranks there are; from torch.distributed, else 1 unless given
    path_rules          what a path must be like; strict by default
    parallel            most shard files of one save and rank
    on_busy             what a call does while a save or load of this process is in flight: "raise", "wait", or, for
                        saves, "queue"; or a BusyPolicy
    durability, host_memory_limit, device   as for asyncckpt.Saver
    deltas              when a save holds only rows written since the one before, as for asyncckpt.Saver; every rank
                        has a chain of its own, and may save another kind than the other ones
    keep_latest         how many saves to keep; one rank only, for ranks do not yet forget together
    peers_deadline      seconds that ranks wait for each other in one agreement

    With torch.distributed, all ranks make the same calls in the same order, on the thread that may use collectives. The
    directory stays open, and its tables are held, until `close()`, or the end of a `with` block. Raises UsageError.
    Source of the interface: RecSDK `torchrec_embcache.saver.Saver`.
    """

    def __init__(
        self,
        rank: int | None = None,
        *,
        world_size: int | None = None,
        path_rules: PathRules = STRICT,
        parallel: int = 8,
        on_busy: OnBusy | BusyPolicy = "raise",
        durability: Durability = "fsync",
        host_memory_limit: int | None = None,
        device: DeviceOptions = DeviceOptions(),
        deltas: DeltaPolicy | None = None,
        keep_latest: int | None = None,
        peers_deadline: float = PEERS_DEADLINE_S,
    ) -> None:
        self._rank, self._world_size = which_rank(rank, world_size)
        if not isinstance(path_rules, PathRules):
            raise UsageError("path_rules is wrong", found=type(path_rules), expected=PathRules)
        self._busy = BusyPolicy.of(on_busy, actions=ON_BUSY)
        if keep_latest is not None and self._world_size > 1:
            what = "keep_latest of several ranks could remove the last save that all of them have"
            raise UsageError(what, found=keep_latest, expected=None, hint="remove old steps on all ranks together")
        check_seconds("peers_deadline", peers_deadline, above_zero=True)
        self._rules = path_rules
        self._options: dict[str, Any] = {
            "parallel": parallel,
            "durability": durability,
            "host_memory_limit": host_memory_limit,
            "device": device,
            "deltas": deltas,
            "keep_latest": keep_latest,
        }
        self._peers = Peers(self._rank, self._world_size, deadline_s=float(peers_deadline))
        self._open: OrderedDict[Path, _OpenFolder] = OrderedDict()
        self._closed = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def save(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        kind: SaveKind = "auto",
        save_id: str | None = None,
    ) -> SaveResult:
        """Save the tables of this rank and return when the checkpoint is durable, on all ranks.

        step None: one more than the newest in path. kind: as for asyncckpt.Saver; RecSDK's incremental=True is "delta".
        save_id: only for several ranks without torch.distributed. Raises
        UsageError, ConflictError (another rank failed, among others), SaveInProgressError, IOFailedError, ...
        """
        folder, agreed, metadata = self._begin(module, path, step=step, save_id=save_id)
        error: Exception | None = None
        result: SaveResult | None = None
        try:
            result = folder.saver.save(agreed.step, kind=kind, metadata=metadata, on_busy=self._busy)
        except Exception as failure:
            error = failure
        self._peers.vote(f"save step {agreed.step}", error)
        assert result is not None
        return result

    def save_async(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        kind: SaveKind = "auto",
        save_id: str | None = None,
    ) -> SaveFuture:
        """Capture the tables of this rank and return; training goes on at once, the files are written in the
        background.

        The future tells of this rank alone: the checkpoint is complete when the futures of all ranks have resolved, and
        a load passes over one that is not. Raises as `save`.
        """
        folder, agreed, metadata = self._begin(module, path, step=step, save_id=save_id)
        folder.future = folder.saver.save_async(agreed.step, kind=kind, metadata=metadata, on_busy=self._busy)
        return folder.future

    def load(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        incremental: bool = False,
        momentum_slots: Mapping[str, str | None] | None = None,
    ) -> SparseLoadReport:
        """Load the newest save that all its ranks have, or that of a step; also what RecSDK wrote.

        Any number of ranks may have saved it: each table takes the ids it owns, by their unsigned value modulo the
        number of ranks. Nothing is changed before all checks have passed, on all ranks; a failure after that leaves the
        tables empty, and the error says so.

        For RecSDK's files: incremental says that they hold only a part of the rows, which then go on top of those in
        the tables. momentum_slots maps "momentum1", "momentum2" to optimizer slots, or to None to leave one out; by
        default they go to the slots in their order. Raises UsageError, NotFoundError, CorruptError, IncompatibleError,
        ConflictError (another rank failed), SaveInProgressError, IOFailedError.
        """
        self._check_open()
        ticket: Ticket | None = None
        prepared: RanksLoad | RecsdkLoad | None = None
        error: Exception | None = None
        try:
            try:
                source = self._rules.check_source(path)
                saved = self._saved_tables(module)
                _check_step(step)
                ticket = self._acquire(source, step)
                prepared = self._prepare(source, saved, step, incremental, momentum_slots)
            except Exception as failure:
                error = failure
            found = -1 if prepared is None or prepared.step is None else prepared.step
            highest, lowest_negated = self._peers.vote("load", error, (found, -found))
            assert prepared is not None
            if highest != -lowest_negated:
                raise ConflictError("ranks found different newest steps", found=(-lowest_negated, highest))
            return self._run(prepared)
        finally:
            if ticket is not None:
                save_lock.release(ticket)

    def wait_idle(self, timeout: float | None = None) -> None:
        """Wait until no save of this Saver is in flight; then raise the first error nobody has asked for."""
        for folder in self._open.values():
            folder.saver.wait_idle(timeout)

    def close(self) -> None:
        """Wait for saves in flight, let go of all folders, raise the first error nobody has asked for. Idempotent."""
        self._closed = True
        self._peers.close()
        first: CheckpointError | None = None
        while self._open:
            _, folder = self._open.popitem(last=False)
            try:
                folder.saver.close()
            except CheckpointError as error:
                first = first or error
        if first is not None:
            raise first

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_behind(self.close, error, what="closing the Saver raised")

    def _begin(
        self, module: nn.Module, path: str | os.PathLike[str], *, step: int | None, save_id: str | None
    ) -> tuple[_OpenFolder, AgreedSave, dict[str, Any]]:
        """Check and open everything, and agree with the other ranks on what is saved."""
        self._check_open()
        folder: _OpenFolder | None = None
        error: Exception | None = None
        next_step = 0
        try:
            target = self._rules.check_target(path)
            saved = self._saved_tables(module)
            _check_step(step)
            self._check_not_busy()
            folder = self._folder(target, saved)
            seen = SeenSteps.of(target, rank=self._rank, world_size=self._world_size)
            if step in seen.taken:
                hint = "steps are never overwritten: save another step"
                raise ConflictError(f"step {step} exists already in {str(target)!r}", hint=hint)
            next_step = max(folder.newest, seen.newest) + 1
        except Exception as failure:
            error = failure
        agreed = self._peers.agree_on_save(next_step=next_step, step=step, save_id=save_id, error=error)
        assert folder is not None
        folder.newest = max(folder.newest, agreed.step)
        facts = RankFacts(save_id=agreed.save_id, companions=tuple(folder.saved.companions))
        return folder, agreed, facts.to_metadata(rank=self._rank, world_size=self._world_size)

    def _folder(self, target: Path, saved: SavedTables) -> _OpenFolder:
        """Return the open folder of this rank below target; opened anew for another module."""
        known = self._open.get(target)
        if known is not None and known.saved.is_same(saved):
            if known.is_idle():
                known.saver.wait_idle(0)  # Raises an error of an earlier save that nobody has asked for.
            self._open.move_to_end(target)
            return known
        if known is not None:
            self._open.pop(target).saver.close()
        while len(self._open) >= OPEN_FOLDERS_MAX:
            self._open.popitem(last=False)[1].saver.close()
        make_folders(target)
        place = target / rank_folder(rank=self._rank, world_size=self._world_size)
        self._rules.check_links(place)
        saver = _ExactModesSaver(path=place, hashtables=saved.tables, on_busy=self._busy, **self._options)
        self._open[target] = opened = _OpenFolder(saver=saver, saved=saved)
        return opened

    def _saved_tables(self, module: nn.Module) -> SavedTables:
        saved = saved_tables(module)
        saved.check_shard(rank=self._rank, world_size=self._world_size)
        return saved

    def _check_not_busy(self) -> None:
        """Find out before the other ranks begin."""
        in_flight = save_lock.in_flight()
        if self._busy.action == "raise" and in_flight:
            hint = "await it, or give the Saver on_busy='wait' or 'queue'"
            raise SaveInProgressError(f"a {in_flight[0]} is in flight", hint=hint)

    def _acquire(self, source: Path, step: int | None) -> Ticket:
        """Take the process's save lock for a whole load, over the folders of all ranks."""
        ticket = Ticket(kind="load", path=source, step=step)
        on_busy: OnBusy = "raise" if self._busy.action == "raise" else "wait"
        save_lock.acquire(ticket, on_busy=on_busy, deadline_s=self._busy.deadline)
        return ticket

    def _prepare(
        self,
        source: Path,
        saved: SavedTables,
        step: int | None,
        incremental: bool,
        momentum_slots: Mapping[str, str | None] | None,
    ) -> RanksLoad | RecsdkLoad:
        ranks = rank_folders(source)
        for folder in (folder for world in ranks.values() for folder in world.values()):
            self._rules.check_links(folder)
        if not ranks:
            if step is not None:
                raise UsageError("files of RecSDK have no steps", found=step, expected=None)
            return prepare_recsdk_load(source, saved, incremental=incremental, momentum_slots=momentum_slots)
        if incremental or momentum_slots is not None:
            raise UsageError("incremental and momentum_slots are for files of RecSDK", found=str(source))
        return prepare_ranks_load(source, saved, step=step)

    def _run(self, prepared: RanksLoad | RecsdkLoad) -> SparseLoadReport:
        error: Exception | None = None
        report: SparseLoadReport | None = None
        try:
            report = prepared.run()
        except Exception as failure:
            error = failure
        self._peers.vote("fill its tables (those of this rank are filled)", error)
        assert report is not None
        return report

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this Saver of multi-level tables is closed")


def _check_step(step: int | None) -> None:
    if step is not None and (type(step) is not int or not 0 <= step <= STEP_MAX):
        raise UsageError("step is wrong", found=step, expected=f"None, or an int in [0, {STEP_MAX}]")
