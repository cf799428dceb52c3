"""Something to train and save, and a reference of it that nothing interrupts."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt import signals as guard
from asyncckpt.commit.attempt import claims
from asyncckpt.engine.process.future import CheckpointFuture
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.staging.pool import ArenaState, pool
from asyncckpt.tables.optim import SparseAdagrad
from tests.worlds.rows import table_image

DEADLINE_S = 30.0
DIM = 4
KEPT = 2
VALUES_KEPT = 2 * KEPT + 16  # Between two looks at what is there, a slow machine may give up all saves.
FEW_IDS = 200


class TrainedTables:
    """Two tables with their modules and optimizer, and dense tensors. Equal calls make equal states."""

    def __init__(self) -> None:
        slots: dict[str, Any] = {"sum": torch.float32}
        self.table = asyncckpt.HashTable("t", DIM, optimizer_slots=slots, capacity=8)
        self.levels = asyncckpt.MultiLevelTable("m", DIM, cache_rows=8, optimizer_slots=slots, capacity=8)
        self.modules = [asyncckpt.nn.HashEmbedding(self.table), asyncckpt.nn.HashEmbedding(self.levels)]
        self.optimizer = SparseAdagrad(self.modules, lr=0.1)
        self.tensors = {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(5, 2).t(), "n": 3}

    @property
    def tables(self) -> dict[str, Any]:
        return {"t": self.table, "m": self.levels}

    def forward(self, ids: torch.Tensor) -> None:
        for module in self.modules:
            module(ids).square().sum().backward()

    def rows(self) -> dict[str, dict[int, bytes]]:
        """Return what the tables hold, by id."""
        return {name: table_image(table) for name, table in self.tables.items()}

    def values(self) -> tuple[object, ...]:
        """Return what tables and tensors hold, to be compared."""
        return self.rows(), self.tensors["w"].tolist(), self.tensors["b"].tolist()


class SaverAndReference:
    """A Saver, what it saves, and the reference."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own, self.reference = TrainedTables(), TrainedTables()
        self.saver = self.new_saver()
        self.futures: list[CheckpointFuture[Any]] = []  # What a call waited for.
        self.steps = 0
        self.values_at: dict[int, tuple[object, ...]] = {}  # What these steps saved.
        self.next_id = 0
        for trained in (self.own, self.reference):
            trained.forward(torch.arange(20) * 1000)
            trained.optimizer.step()
        self.save_and_load()
        gc.collect()  # What earlier tests have left may have descriptors.
        self.fds = settled_fds()

    def new_saver(self) -> asyncckpt.Saver:
        return asyncckpt.Saver(
            path=self.path, hashtables=self.own.tables, tensors=self.own.tensors, keep=KEPT, durability="none"
        )

    def new_ids(self, count: int) -> torch.Tensor:
        """Return ids of which half are new, and so many that tables grow and rows leave the cache."""
        self.next_id += count
        return torch.arange(self.next_id - count // 2, self.next_id + count // 2)

    def next_step(self) -> int:
        self.steps += 1
        return self.steps

    def train(self) -> None:
        """Change the state that the next step saves. Half of the ids are new, or have been away for long.

        The tables have another number of rows each time, so that a blocking save makes its plan anew each time.
        """
        self.own.forward(self.new_ids(6) % FEW_IDS)
        self.own.optimizer.step()
        next_ids = torch.arange(self.next_id + 3, self.next_id + 4 + self.next_id // 6 % 2) % FEW_IDS
        for table in self.own.tables.values():
            table.remove(next_ids)
        for name in ("w", "b"):
            self.own.tensors[name] += 1
        self.values_at = {**dict(list(self.values_at.items())[-VALUES_KEPT:]), self.steps + 1: self.own.values()}

    def save_and_load(self) -> None:
        """Check that a save commits, and loads what is there."""
        step = self.next_step()
        self.values_at[step] = self.own.values()
        assert self.saver.save_async(step).result(DEADLINE_S).step == step
        assert self.load() == step

    def load(self) -> int:
        """Load the newest checkpoint, check that it has what was saved, and return its step."""
        loaded = TrainedTables()
        loaded.tensors = {"w": torch.zeros(3, 4), "b": torch.zeros(2, 5), "n": 0}
        step = asyncckpt.Loader(str(self.path), loaded.tables, loaded.tensors).load().step
        assert loaded.values() == self.values_at[step], f"step {step} has other values than were saved"
        return step

    def check_nothing_is_held(self) -> None:
        check_nothing_is_held(self.futures)
        for name, table in self.own.tables.items():
            assert wait_for(lambda lock=table._lock._lock: not lock.locked()), f"table {name} is locked"  # type: ignore[misc]

    def check_folders(self) -> None:
        """Check that nothing of what was interrupted is left. After a save, which sweeps."""
        self.saver.wait_idle(DEADLINE_S)
        names = {path.name for path in (self.path / "manifests").iterdir()}
        assert all(name.endswith(".json") for name in names), names
        folders = {path.name for path in (self.path / "data").iterdir()}
        assert len(folders) == len(names), (names, folders)


def settled_fds() -> int:
    """Return how many descriptors are open when the background has ended."""
    wait_for(lambda: not any(thread.name.startswith("asyncckpt") for thread in threading.enumerate()), 5.0)
    return len(os.listdir("/proc/self/fd"))


def check_nothing_is_held(futures: Iterable[CheckpointFuture[Any]] = ()) -> None:
    """Check that no call of this process holds anything any more, and nobody a lock of these futures."""
    assert held_locks(futures) == []
    assert wait_for(lambda: not save_lock.in_flight()), save_lock.in_flight()
    assert wait_for(lambda: all(arena.state is ArenaState.FREE for arena in pool._arenas)), pool._arenas
    assert wait_for(lambda: not claims.held), claims.held


def held_locks(futures: Iterable[CheckpointFuture[Any]] = ()) -> list[str]:
    """Return the guards of the process, and the locks of futures, that stay held: by any thread, this one too."""
    locks: list[Any] = [reference() for reference in guard._guards.valuerefs()]
    locks += [future._inner._condition._lock for future in futures]  # type: ignore[attr-defined]
    held = []
    for lock in locks:
        # A thread may take once more what it holds.
        if lock is not None and (lock._is_owned() or not lock.acquire(timeout=DEADLINE_S)):
            held.append(repr(lock))
        elif lock is not None:
            lock.release()
    return held


def wait_for(is_so: Callable[[], bool], seconds: float = DEADLINE_S) -> bool:
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.0005)
    return True
