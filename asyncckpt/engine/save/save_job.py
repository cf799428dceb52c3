"""The records of a save: where a Saver saves to, one save on its way from the call to its commit, and what it wrote."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncckpt.commit.attempt import Claim, body_structure
from asyncckpt.commit.root import WriteRoot
from asyncckpt.commit.transaction import Commits
from asyncckpt.devices.host_copies import Pending
from asyncckpt.engine.process.event_line import EventLine
from asyncckpt.engine.process.future import FutureState, SaveFuture
from asyncckpt.engine.process.half_filled import half_filled
from asyncckpt.engine.process.save_lock import Ticket
from asyncckpt.engine.ranks.replicas import WrittenByPeers
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.engine.save.delta_chain import ChainLink, Choice
from asyncckpt.engine.save.device_stage import StepFences
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.engine.upload.uploads import Uploads
from asyncckpt.errors import SaveCancelledError, UsageError
from asyncckpt.format.manifest import FileFacts, ParentFacts, SaveTimes
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Json
from asyncckpt.format.write_manifest import BodyTemplate
from asyncckpt.model.block import TableFacts
from asyncckpt.model.event import Recorder, unix_time
from asyncckpt.model.table import Table
from asyncckpt.native import I64, U8
from asyncckpt.options import SaveOptions
from asyncckpt.pipeline.filters import FilterFunction
from asyncckpt.pipeline.fingerprints import RowFingerprints
from asyncckpt.pipeline.row_filters import RowFilter
from asyncckpt.plan.regions import CapturedTable, RegionCache, RegionFilesCache
from asyncckpt.plan.save_plan import PlanCache, SavePlan
from asyncckpt.staging.arena import Arena
from asyncckpt.staging.pool import pool

WRITE_S_MAX = 0.25
"""How long a write to a tensor takes that has begun before it was copied."""


@dataclass
class SaverMemory:
    """What a Saver keeps from save to save.

    newest     the newest checkpoint that it has committed, upon which the next delta builds
    retention  the one that was begun last
    behind     those that have perhaps not ended, the oldest first
    half_loaded  the step that a Checkpointer has begun to fill the state with, until that has succeeded
    is_of_loop   whether it saves for a loop, which goes on as if nothing had failed, and not as it is told
    """

    plans: PlanCache
    regions: RegionCache = field(default_factory=RegionCache)
    region_files: RegionFilesCache = field(default_factory=RegionFilesCache)
    newest: ChainLink | None = None
    retention: Future[None] | None = None
    behind: deque[Future[None]] = field(default_factory=deque)
    half_loaded: int | None = None
    is_of_loop: bool = False


@dataclass(frozen=True)
class SaveTarget:
    """Where a Saver saves to, what and how: the same for all its saves. ranks: None when it saves alone. events: None
    where nobody listens.
    """

    commits: Commits
    options: SaveOptions
    tables: Mapping[str, Table]
    state: Mapping[str, Any]
    filter_func: FilterFunction
    filters: tuple[RowFilter, ...]
    ranks: Ranks | None
    step_fences: StepFences
    memory: SaverMemory
    uploads: Uploads
    events: EventLine | None = None

    def begin_anew(self) -> None:
        """Take the state for whole, whatever a load has left in it."""
        self.memory.half_loaded = None
        half_filled.forget(self.state, self.tables)

    def check_whole(self) -> None:
        """Raise UsageError where a load that has failed has left parts of another step in the state."""
        step = self.memory.half_loaded
        if step is None and self.memory.is_of_loop:
            step = half_filled.step_of(self.state, self.tables)
        if step is not None:
            raise UsageError(
                f"the state is not saved: loading step {step} has failed when parts of it were filled",
                hint="load a step into it, as by restore(); or make the objects anew, call begin_anew(), and go on "
                "above the newest step there, or in another directory",
            )

    def tell_end(self, future: SaveFuture, name: Literal["save", "compaction"], begun: float) -> None:
        """Let whoever listens know how a save ends."""
        if self.events is not None:
            future.before_done(
                self.events.ended(name, step=future.step, begun=begun, path=self.root.path, rank=self.rank)
            )

    @property
    def root(self) -> WriteRoot:
        return self.commits.root

    @property
    def rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank


@dataclass(frozen=True)
class Staged:
    """A snapshot in an arena: the plan's image from `base` on, and the regions of `tables`, all before it.

    pending: what devices still copy into it.
    """

    arena: Arena
    base: int
    tables: tuple[CapturedTable, ...]
    pending: Pending

    def give_back(self) -> None:
        """Let others have the arena, when nothing writes to it any more."""
        try:
            self.pending.steps.drop()
            self.pending.settle()
        except Exception:
            pass  # Whoever waits for the snapshot gets the error.
        finally:
            if not self.pending.steps.is_whole:
                self.arena.contents = None
            pool.release(self.arena)


@dataclass
class SaveJob:
    """One save. `staged` is None for a blocking save, which keeps its cut unfenced.

    begun   time of the call, by the performance counter
    plan    of what is not in regions
    choice  full or delta, and the rows of every table by its number among the cuts

    begun_us: so long after the call the background has begun with it. staged_at: when all was copied, by the monotonic
    clock.
    """

    target: SaveTarget
    ticket: Ticket
    claim: Claim
    future: SaveFuture
    begun: float
    plan: SavePlan
    choice: Choice
    values: tuple[Json, ...]
    metadata: Json
    cut: Cut
    staged: Staged | None
    fallback: str | None
    recorder: Recorder
    stall_seconds: float = 0.0
    begun_us: int = 0
    staged_at: float = 0.0

    @property
    def step(self) -> int:
        return self.claim.step

    @property
    def captured(self) -> tuple[CapturedTable, ...]:
        """The tables in regions of the arena."""
        return () if self.staged is None else self.staged.tables

    @property
    def by_peers(self) -> WrittenByPeers | None:
        """What has been captured, and other ranks write; None when there is nothing."""
        return None if self.cut.share is None else self.cut.share.by_peers or None

    def since_call_us(self) -> int:
        return round(1e6 * (time.perf_counter() - self.begun))

    def times(self) -> SaveTimes:
        """Return what the manifest says of the time this save has taken. Called when the shard files are written."""
        return SaveTimes(
            called_us=max(0, round(1e6 * unix_time(self.begun))),
            stall_us=None if self.staged is None else round(1e6 * self.stall_seconds),
            begun_us=self.begun_us,
            written_us=self.since_call_us(),
        )

    async def let_writes_end(self) -> None:
        """Wait for writes to what no step has asked for, as long as one may take: torch counts them when they end."""
        until = self.staged_at + WRITE_S_MAX
        while self.staged is not None and self.staged.pending.steps.is_open and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def enter(self, state: FutureState) -> None:
        """Enter the next state, unless the save was cancelled, or refused because the state was changed too early."""
        if self.staged is not None:
            if state is FutureState.COMMITTING:
                self.staged.pending.steps.close()
            self.staged.pending.steps.check()
        if not self.future.enter(state):
            raise SaveCancelledError(f"save of step {self.step} was cancelled")


@dataclass(frozen=True)
class Written:
    """Shard files on disk, and what the manifest says of their blocks: digests with those of leaves.

    tables: as they are in the checkpoint. dense_structure: a digest of what the manifest says of dense tensors but
    their digests, where it is known without looking at each. fingerprints, missed: see row_fingerprints.Selections.
    holds_all: the user's filter has left out no tensor, and renamed none.
    """

    files: tuple[FileFacts, ...]
    body: BodyTemplate
    digests: U8
    tables: tuple[TableFacts, ...]
    dense_structure: str | None = None
    fingerprints: Mapping[str, RowFingerprints] = field(default_factory=dict)
    missed: Mapping[str, I64] = field(default_factory=dict)
    holds_all: bool = True

    @property
    def structure(self) -> str:
        """A digest of what the body says beside digests, and beside rows of tables where it is known without."""
        if self.dense_structure is None:
            return body_structure(self.body)
        tables = [(facts.name, facts.shard, facts.whole, bool(facts.removed_count)) for facts in self.tables]
        return f"{self.dense_structure} {self.body.blocks_count} {tables}"


@dataclass(frozen=True)
class Committed:
    """A save that has committed, as this rank knows it.

    parent: this checkpoint, as the parent of a later one; None when that is not known here. manifest_bytes: on the rank
    that published it, else 0. waits_for: it has not committed yet, for the parts of these ranks are missing.
    """

    written: Written
    attempt: Attempt
    parent: ParentFacts | None
    parents: tuple[ParentFacts, ...]
    manifest_bytes: int = 0
    waits_for: tuple[int, ...] = ()

    @property
    def bytes_written(self) -> int:
        """By this rank."""
        return sum(file.bytes for file in self.written.files) + self.manifest_bytes
