"""Where a Saver saves to and how: the same for all its saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Commits
from asyncckpt.engine.ranks.replicas import NO_REPLICAS, NOTHING_BY_PEERS, ReplicaList, WrittenByPeers
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.engine.save.delta_chain import SaverChain
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.engine.save.step_fences import StepFences
from asyncckpt.model.table import Table
from asyncckpt.options import SaveOptions
from asyncckpt.pipeline.filters import FilterFunction
from asyncckpt.pipeline.row_filters import RowFilter
from asyncckpt.plan.region_files import RegionFilesCache
from asyncckpt.plan.regions import RegionCache
from asyncckpt.plan.save_plan import PlanCache
from asyncckpt.plan.state import FlatState


@dataclass(frozen=True)
class SaveTarget:
    """`protected` are steps that retention must keep, `chain` what the next delta builds upon.

    `retaining`: the retention that was begun last. `ranks`: with which this one saves; None: it saves alone.
    """

    commits: Commits
    options: SaveOptions
    plans: PlanCache
    tables: Mapping[str, Table]
    filter_func: FilterFunction
    state: Callable[[], Mapping[str, Any]]
    protected: Callable[[], Collection[int]]
    filters: tuple[RowFilter, ...] = ()
    regions: RegionCache = field(default_factory=RegionCache)
    region_files: RegionFilesCache = field(default_factory=RegionFilesCache)
    chain: SaverChain = field(default_factory=SaverChain)
    retaining: list[Future[None]] = field(default_factory=list)
    ranks: Ranks | None = None
    step_fences: StepFences = field(default_factory=StepFences)

    @property
    def root(self) -> CheckpointRoot:
        return self.commits.root

    @property
    def rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank


@dataclass(frozen=True)
class Share:
    """What of a state this rank captures. by_peers: other ranks write it; None: not known yet, all is captured."""

    replicas: ReplicaList = NO_REPLICAS
    by_peers: WrittenByPeers | None = NOTHING_BY_PEERS

    @property
    def is_known(self) -> bool:
        return self.by_peers is not None

    @property
    def leaves_by_peers(self) -> frozenset[int]:
        return (self.by_peers or NOTHING_BY_PEERS).leaves


def begin_cut(target: SaveTarget) -> tuple[Cut, Share]:
    """Freeze what this rank captures of its state."""
    replicas = None if target.ranks is None else target.ranks.replicas
    found = Share()

    def leave_out(flat: FlatState) -> Collection[str]:
        nonlocal found
        if replicas is not None:
            listed = replicas.list_of(flat, target.tables)
            found = Share(replicas=listed, by_peers=replicas.by_peers(listed))
        return (found.by_peers or NOTHING_BY_PEERS).tables

    cut = Cut.begin(target.state(), target.tables, leave_out=leave_out)
    return cut, found
