"""The records of a save: where a Saver saves to, one save on its way from the call to its commit, and what it wrote."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from asyncckpt.commit.attempt import Claim, body_structure, claims
from asyncckpt.commit.root import WriteRoot
from asyncckpt.commit.transaction import Commits
from asyncckpt.engine.process.future import FutureState, SaveFuture
from asyncckpt.engine.process.save_lock import Ticket
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.state_cut import NOTHING_BY_PEERS, ByPeers, Cut
from asyncckpt.errors import SaveCancelledError, UsageError
from asyncckpt.format.head import FileFacts, ParentFacts, SaveTimes
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Json
from asyncckpt.format.write_manifest import BodyTemplate
from asyncckpt.model.block import TableFacts
from asyncckpt.model.table import CutVersion, Table, TableSchema
from asyncckpt.model.table_shard import Shard
from asyncckpt.native import I64, U8, Progress
from asyncckpt.options import BusyPolicy, SaveKind, SaveOptions
from asyncckpt.plan.regions import CapturedTable, RegionCache, RegionFilesCache, TableRows
from asyncckpt.plan.save_plan import PlanCache, SavePlan
from asyncckpt.staging.pool import Arena, ArenaPool, pool

if TYPE_CHECKING:
    from asyncckpt.devices.host_copies import Pending
    from asyncckpt.engine.save.device_stage import DeviceStage
    from asyncckpt.model.event import EventName, Recorder
    from asyncckpt.pipeline.filters import FilterFunction
    from asyncckpt.pipeline.fingerprints import RowFingerprints
    from asyncckpt.pipeline.row_filters import RowFilter
    from asyncckpt.shard.files import ShardTarget

WRITE_S_MAX = 0.25
"""How long a write to a tensor takes that has begun before it was copied."""


# -- from save to save -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableLink:
    """A table as it is in a committed checkpoint.

    fingerprints  where it has no marks and deltas are wanted
    written_as    what of which columns the user's filter function has left under this name
    """

    schema: TableSchema
    shard: Shard
    version: CutVersion | None
    fingerprints: RowFingerprints | None
    written_as: Collection[object] | None = None

    def is_of(self, schema: TableSchema, shard: Shard) -> bool:
        """Return whether rows of a table like that can be laid over this one."""
        return self.schema == schema and self.shard == shard


@dataclass(frozen=True)
class ChainLink:
    """A committed checkpoint, which may be a delta's base: itself as a parent, its own parents, and its tables.

    bytes: this rank's in each checkpoint of the chain, newest first. full_time: that of the full one at the end.
    """

    parent: ParentFacts
    parents: tuple[ParentFacts, ...]
    tables: Mapping[str, TableLink]
    bytes: tuple[int, ...]
    full_time: float

    @property
    def chain(self) -> tuple[ParentFacts, ...]:
        """The parents of a delta on top of it, newest first."""
        return (self.parent, *self.parents)

    def ending(self, count: int, *, full_bytes: int | None = None) -> ChainLink:
        """Return the link when its chain ends with the checkpoint of this number, because that was compacted.

        full_bytes: of this rank in it; None: as many as in the full one before.
        """
        if count == len(self.chain):
            return self
        end = self.bytes[-1] if full_bytes is None else full_bytes
        return replace(
            self, parents=self.parents[: count - 1], bytes=(*self.bytes[: count - 1], end), full_time=time.monotonic()
        )


@dataclass
class SaverMemory:
    """What a Saver keeps from save to save.

    newest       the newest checkpoint that it has committed, the base of the next delta
    behind       what goes on behind saves, by what it is: the retention and the compaction that were begun last
    half_loaded  the step that a Checkpointer has begun to fill the state with, until that has succeeded
    is_of_loop   whether it saves for a loop, which goes on as if nothing had failed, and not as it is told
    skipped      how many calls have been skipped since the last save
    """

    plans: PlanCache
    regions: RegionCache = field(default_factory=RegionCache)
    region_files: RegionFilesCache = field(default_factory=RegionFilesCache)
    newest: ChainLink | None = None
    behind: dict[str, Future[Any]] = field(default_factory=dict)
    half_loaded: int | None = None
    is_of_loop: bool = False
    skipped: int = 0


@dataclass(frozen=True)
class SaveTarget:
    """Where a Saver saves to, what and how: the same for all its saves.

    features  see feature.py; none of a plain Saver
    claim     claims a step of the directory, or (None) the next one
    arenas    who gives the memory of snapshots, and hears when one is complete
    """

    commits: Commits
    options: SaveOptions
    tables: Mapping[str, Table]
    state: Mapping[str, Any]
    memory: SaverMemory
    rank: int = 0
    ranks_count: int = 1
    filter_func: FilterFunction | None = None
    filters: tuple[RowFilter, ...] = ()
    is_filtered: bool = False
    features: tuple[SaveFeature, ...] = ()
    claim: Callable[[WriteRoot, int | None], Claim] = claims.save
    arenas: ArenaPool = pool

    def begin_anew(self) -> None:
        """Take the state for whole, whatever a load has left in it."""
        from asyncckpt.engine.process.half_filled import half_filled  # Only loops need it.

        self.memory.half_loaded = None
        half_filled.forget(self.state, self.tables)

    def check_whole(self) -> None:
        """Raise UsageError where a load that has failed has left parts of another step in the state."""
        step = self.memory.half_loaded
        if step is None and self.memory.is_of_loop:
            from asyncckpt.engine.process.half_filled import half_filled

            step = half_filled.step_of(self.state, self.tables)
        if step is not None:
            raise UsageError(
                f"the state is not saved: loading step {step} has failed when parts of it were filled",
                hint="call restore() to load a step into it; or make new objects, call begin_anew(), and continue "
                "above the newest step there, or in another directory",
            )

    @property
    def root(self) -> WriteRoot:
        return self.commits.root


# -- one save ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveCall:
    """What a save was asked for. staged: the call returns when the state is captured, else when the save has ended.

    number: the call's, where several ranks save. progress: counts what is written, for whoever cannot ask the future
    before it is returned. features: in place of those of the Saver.
    """

    step: int | None
    kind: SaveKind
    metadata: Json
    busy: BusyPolicy
    staged: bool
    number: int | None = None
    progress: Progress | None = None
    features: tuple[SaveFeature, ...] | None = None


@dataclass(frozen=True)
class Staged:
    """A snapshot in an arena of a pool: the plan's image from `base` on, after the regions of tables.

    pending: what is still copied into it; None: nothing.
    """

    arena: Arena
    arenas: ArenaPool
    base: int
    pending: Pending | None = None

    def give_back(self) -> None:
        """Let others have the arena, when nothing writes to it any more."""
        try:
            if self.pending is not None:
                self.pending.end()
        finally:
            if self.pending is not None and not self.pending.steps.is_whole:
                self.arena.contents = None
            self.arenas.release(self.arena)


@dataclass
class SaveJob:
    """One save. `staged` is None for a blocking save, which keeps its cut unfenced.

    begun          time of the call, by the performance counter
    write, commit  how it is written and committed: write_files.py, run_save.py, unless a feature does it otherwise
    rows           of each table by its number among the cuts
    base, newest   its base as a delta, None: it is full; and the newest committed checkpoint at the call
    plan           of what is not in regions
    captured       the tables in regions of the arena
    by_peers       what has been captured, and other ranks write
    copies         with which the state is captured; None: as it is, of the host or of devices
    begun_us       how long after the call the background has begun with it
    staged_at      when all was copied, by the monotonic clock
    """

    target: SaveTarget
    call: SaveCall
    ticket: Ticket
    claim: Claim
    begun: float
    future: SaveFuture
    write: Callable[[SaveJob, ShardTarget], Written]
    commit: Callable[[SaveJob], Awaitable[Committed | SkippedByPeer]]
    recorder: Recorder | None = None
    features: tuple[SaveFeature, ...] = ()
    cut: Cut = field(default_factory=Cut)
    rows: tuple[TableRows, ...] = ()
    base: ChainLink | None = None
    newest: ChainLink | None = None
    plan: SavePlan = field(init=False)
    values: tuple[Json, ...] = ()
    copies: DeviceStage | None = None
    staged: Staged | None = None
    captured: tuple[CapturedTable, ...] = ()
    by_peers: ByPeers = NOTHING_BY_PEERS
    fallback: str | None = None
    stall_seconds: float = 0.0
    begun_us: int = 0
    staged_at: float = 0.0

    @property
    def step(self) -> int:
        return self.claim.step

    @property
    def pending(self) -> Pending | None:
        """What is still copied into the arena, or was; None where nothing is copied after the call."""
        return None if self.staged is None else self.staged.pending

    def note(self, name: EventName, begun: float, ended: float | None = None) -> None:
        """Note a span of the save that ends now, or has, where somebody listens."""
        if self.recorder is not None:
            self.recorder.note(name, begun, ended)

    def since_call_us(self) -> int:
        return round(1e6 * (time.perf_counter() - self.begun))

    def times(self) -> SaveTimes:
        """Return what the manifest says of the time this save has taken. Called when the shard files are written."""
        written_us = self.since_call_us()
        return SaveTimes(
            called_us=max(0, round(1e6 * time.time()) - written_us),
            stall_us=None if self.staged is None else round(1e6 * self.stall_seconds),
            begun_us=self.begun_us,
            written_us=written_us,
        )

    async def begin_commit(self) -> None:
        """Enter the commit. Writes to what no step has asked for end first: torch counts them when they end."""
        pending = self.pending
        if pending is not None:
            until = self.staged_at + WRITE_S_MAX
            while pending.steps.is_open and time.monotonic() < until:
                await asyncio.sleep(0.01)
            pending.steps.close()
        self.enter(FutureState.COMMITTING)

    def enter(self, state: FutureState) -> None:
        """Enter the next state, unless the save was cancelled, or refused because the state was changed too early."""
        if self.pending is not None:
            self.pending.steps.check()
        if not self.future.enter(state):
            raise SaveCancelledError(f"save of step {self.step} was cancelled")


# -- what came of it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """Shard files on disk, and what the manifest says of their blocks: digests with those of leaves.

    tables: as they are in the checkpoint. dense_structure: a digest of what the manifest says of dense tensors but
    their digests, where it is known without looking at each. fingerprints: those of rows of tables that are compared.
    missed: by table the ids of rows that were changed without a mark. holds_all: the user's filter has left out no
    tensor, and renamed none. written_as: see TableLink, by table.
    """

    files: tuple[FileFacts, ...]
    body: BodyTemplate
    digests: U8
    tables: tuple[TableFacts, ...]
    dense_structure: str | None = None
    fingerprints: Mapping[str, RowFingerprints] = field(default_factory=dict)
    missed: Mapping[str, I64] = field(default_factory=dict)
    holds_all: bool = True
    written_as: Mapping[str, Collection[object]] = field(default_factory=dict)

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


@dataclass(frozen=True)
class SkippedByPeer:
    """All ranks skip a save that one of them skips."""

    rank: int | None
    cause: str
