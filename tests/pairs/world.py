"""A state whose every number is its generation, saved and loaded by every door; and what must be true of it.

Training sets all of it to the next generation. A save captures one generation, which was there between its call and its
return; so a checkpoint whose numbers differ is torn. Doors that save and load the dense tensors alone (DCP, the
strategies) may make them differ from the table, but not among each other.

    run/      a Saver's: dense tensors, an object with state_dict, a table
    dcp/      the dense tensors by DCP            mcore/    the same, by the strategies
    emb/      a module's multi-level table
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

import asyncckpt
import asyncckpt.embcache
from asyncckpt.commit import retention
from asyncckpt.commit.attempt import claims
from asyncckpt.embcache import EmbCacheEmbeddingBagCollection, EmbCacheTableConfig
from asyncckpt.engine.process.background import retainer
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.staging.pool import ArenaState, pool
from asyncckpt.storage.owner_lock import _registry
from asyncckpt.strategies import ShardedSave
from asyncckpt.strategies.mapping import ShardedTensor
from tests.pairs.gate import PlaceGate

MEMORY_FILE_SYSTEM = "/dev/shm"
WAIT_S_MAX = 60.0
SIDES = 2
MEMORY_LIMIT = 64 << 20
IDS = torch.arange(40)
PEER_DEADLINE_S = 20.0
FOREIGN = 1e6  # What another process trains begins with this.
POLICY = asyncckpt.BusyPolicy("wait", WAIT_S_MAX)


class HeldGeneration:
    """An object of the state."""

    def __init__(self, gate: PlaceGate) -> None:
        self.gate = gate
        self.generation = -1.0

    def state_dict(self) -> dict[str, float]:
        generation = self.generation
        self.gate.reach("state_dict")
        return {"generation": generation}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.gate.reach("load_state_dict")
        self.generation = state["generation"]


class SharedState:
    """What is saved, and what is loaded into."""

    def __init__(self, gate: PlaceGate, rank: int = 0, ranks_count: int = 1) -> None:
        self.ids = IDS[IDS % ranks_count == rank]
        self.rank = rank
        self.dense = {"x": torch.full((50,), -1.0), "y": torch.full((7, 30), -1.0)}
        self.held = HeldGeneration(gate)
        self.table = asyncckpt.HashTable("t", 4, shard=(rank, ranks_count))
        config = EmbCacheTableConfig(name="e", dim=4, feature_names=("f",), cache_rows=8, capacity=64)
        self.module = EmbCacheEmbeddingBagCollection([config], shard=(rank, ranks_count))

    @property
    def tables(self) -> dict[str, asyncckpt.HashTable]:
        return {"t": self.table}

    @property
    def tensors(self) -> dict[str, Any]:
        return {**self.dense, "held": self.held}

    @property
    def sharded(self) -> dict[str, Any]:
        return {
            "x": ShardedTensor.from_rank_offsets("model.x", self.dense["x"], replica_id=self.rank),
            "y": ShardedTensor.from_rank_offsets("optimizer.y", self.dense["y"], replica_id=self.rank),
        }

    def train(self, generation: float) -> None:
        for tensor in self.dense.values():
            tensor.fill_(generation)
        self.held.generation = generation
        for table in (self.table, *self.module.tables().values()):
            table.insert(self.ids, torch.full((len(self.ids), 4), generation))

    def generation(self) -> tuple[float, float]:
        """Of the dense tensors, and of the rest. AssertionError when it is torn."""
        dense = {value for tensor in self.dense.values() for value in tensor.unique().tolist()}
        rest = {self.held.generation, *self.table.embedding[self.table.used_rows()].unique().tolist()}
        assert len(dense) == 1, f"the dense tensors are torn: {dense}"
        assert len(rest) == 1, f"object and table are torn: {rest}"
        assert len(self.table.ids()) == len(self.ids), "rows of the table are lost"
        return dense.pop(), rest.pop()

    def module_generation(self) -> float:
        [table] = self.module.tables().values()
        assert len(table.ids()) == len(self.ids), "rows of the module are lost"
        found = set(table.read(self.ids)["embedding"].unique().tolist())
        assert len(found) == 1, f"the module is torn: {found}"
        return float(found.pop())


class TwoSides:
    """The directories, a state, and for each of two sides a Saver of either kind. Closed at the end.

    of: this rank and how many save together. meet: wait for the other ranks.
    """

    def __init__(
        self,
        gate: PlaceGate,
        *,
        folder: Path | None = None,
        of: tuple[int, int] = (0, 1),
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.of = of
        self.meet = meet
        self.gate = gate
        self._owned = folder is None
        parent = MEMORY_FILE_SYSTEM if Path(MEMORY_FILE_SYSTEM).is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="asyncckpt-pairs-", dir=parent)) if folder is None else folder
        self.run, self.dcp, self.mcore, self.emb = (self.folder / name for name in ("run", "dcp", "mcore", "emb"))
        self.state = SharedState(gate, *of)
        x, y = self.state.dense.values()
        gate.is_half_filled = lambda: bool(x[-1] != y[-1, -1])
        self.live = 0.0
        self.foreign: set[float] = set()  # What other processes have trained.
        self.steps: dict[int, tuple[float, float]] = {}
        self._savers: dict[int | str, asyncckpt.Saver] = {}
        self._modules_savers: dict[int, asyncckpt.embcache.Saver] = {}

    def saver(self, side: int | str) -> asyncckpt.Saver:
        """That of a side; "pruner" keeps one checkpoint only."""
        if side not in self._savers:
            self._savers[side] = asyncckpt.Saver(
                *self.of,
                path=self.run,
                ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S),
                hashtables=self.state.tables,
                tensors=self.state.tensors,
                filter_func=self._filter,
                host_memory_limit=MEMORY_LIMIT,
                keep=1 if side == "pruner" else None,
            )
        return self._savers[side]

    def module_saver(self, side: int) -> asyncckpt.embcache.Saver:
        if side not in self._modules_savers:
            self._modules_savers[side] = asyncckpt.embcache.Saver(rank=0, host_memory_limit=MEMORY_LIMIT)
        return self._modules_savers[side]

    def _filter(self, blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        self.gate.reach("filter")
        return blocks

    def train(self) -> None:
        self.live += 1
        self.state.train(self.live)

    def renew(self, sides: int, rooms: Collection[str] = ("mcore", "emb")) -> None:
        """A full checkpoint of every side, a delta on top; in other rooms one each; then train."""
        self.train()
        for side in range(sides):
            self._note(self.saver(side).save(kind="full", on_busy=POLICY))
        self.train()
        self._note(self.saver(0).save(kind="delta", on_busy=POLICY))
        if "mcore" in rooms:
            ShardedSave().save(self.state.sharded, self.mcore)
        if "emb" in rooms:
            self.module_saver(0).save(self.state.module, self.emb)
        self.train()
        self.meet()

    def _note(self, result: asyncckpt.SaveResult) -> None:
        self.steps[result.step] = (self.live, self.live)

    def loaded(self, step: int) -> tuple[float, float]:
        """What a step holds, as a load into new targets gives it."""
        fresh = SharedState(PlaceGate(), *self.of)
        asyncckpt.Loader(self.run, fresh.tables, fresh.tensors, step=step, on_busy=POLICY).load()
        return fresh.generation()

    def module_loaded(self) -> float:
        fresh = SharedState(PlaceGate())
        with asyncckpt.embcache.Saver(rank=0, on_busy=POLICY) as saver:
            saver.load(fresh.module, self.emb)
        return fresh.module_generation()

    def check_nothing_held(self) -> None:
        """No save in flight, no step claimed, no arena taken, no retention under way."""
        for saver in self._savers.values():
            saver.wait_idle(WAIT_S_MAX)
        assert save_lock.in_flight() == []
        assert not claims.held, f"claimed: {claims.held}"
        retainer.submit(int).result(WAIT_S_MAX)  # Behind what is under way.
        # What dcp.async_save has staged goes with a thread of DCP that is about to end.
        until = time.monotonic() + WAIT_S_MAX
        while any(arena.state is not ArenaState.FREE for arena in pool._arenas):
            assert time.monotonic() < until, f"arenas are taken: {[arena.state for arena in pool._arenas]}"
            gc.collect()
        assert not retention._retaining.locked()
        self.meet()

    def check_last_save(self) -> None:
        """One more save commits, loads and leaves nothing behind it; old checkpoints go with it."""
        self.train()
        pruner = self.saver("pruner")
        step = pruner.save_async(on_busy=POLICY).result(WAIT_S_MAX).step
        pruner.wait_idle(WAIT_S_MAX)
        self.meet()
        assert self.loaded(step) == (self.live, self.live)
        report = asyncckpt.verify(self.run)
        assert (report.step, report.strays) == (step, ())
        self.steps = {found: self.steps.get(found, (self.live, self.live)) for found in asyncckpt.list_steps(self.run)}
        assert step in self.steps

    def reopen(self) -> None:
        """Forget Savers that were closed."""
        self._savers = {side: saver for side, saver in self._savers.items() if not saver._closed}
        open_savers = {side: saver for side, saver in self._modules_savers.items() if not saver._closed}
        self._modules_savers = open_savers

    def close(self) -> None:
        self.gate.open()
        for saver in (*self._savers.values(), *self._modules_savers.values()):
            saver.close()
        self._savers, self._modules_savers = {}, {}
        if self._owned:
            shutil.rmtree(self.folder, ignore_errors=True)


def check_no_directory_is_held() -> None:
    assert not _registry.held, f"locks are held: {_registry.held}"
