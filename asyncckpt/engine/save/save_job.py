"""One save on its way from the call to the background."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncckpt.commit.claims import Claim
from asyncckpt.devices.host_copies import Pending
from asyncckpt.engine.process.future import SaveFuture
from asyncckpt.engine.process.save_lock import Ticket
from asyncckpt.engine.ranks.replicas import NO_REPLICAS, NOTHING_BY_PEERS, ReplicaList, WrittenByPeers
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.engine.save.delta_chain import Choice
from asyncckpt.engine.save.save_target import SaveTarget
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import Node
from asyncckpt.model.table import CutVersion
from asyncckpt.plan.save_plan import SavePlan
from asyncckpt.plan.table_rows import CapturedTable
from asyncckpt.staging.arena import Arena
from asyncckpt.staging.pool import pool


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
        """Let others have the arena, when no device writes to it any more."""
        try:
            self.pending.settle()
        except Exception:
            pass  # Whoever waited for the snapshot is told.
        finally:
            give_back = pool.discard if self.pending.is_lost else pool.release
            give_back(self.arena)


@dataclass
class SaveJob:
    """One save. `staged` is None for a blocking save, which keeps its cut unfenced.

    plan      of what is not in regions
    choice    full or delta, and the rows of every table by its number among the cuts
    ranks     with which it is saved, as which call; None: alone
    replicas  what other ranks may hold too; is_share: of that, what others write was left out
    by_peers what has been captured, and other ranks write
    versions  of the cuts of all tables that have marks
    """

    target: SaveTarget
    ticket: Ticket
    claim: Claim
    future: SaveFuture
    plan: SavePlan
    choice: Choice
    tree: Node
    values: tuple[Json, ...]
    metadata: Json
    cut: Cut
    versions: Mapping[str, CutVersion]
    staged: Staged | None
    fallback: str | None
    ranks: Ranks | None = None
    call: int | None = None
    replicas: ReplicaList = NO_REPLICAS
    is_share: bool = False
    by_peers: WrittenByPeers = NOTHING_BY_PEERS
    begun: float = field(default_factory=time.perf_counter)
    stall_seconds: float = 0.0

    @property
    def step(self) -> int:
        return self.claim.step
