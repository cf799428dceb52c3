"""Random training runs on a multi-level table, beside the same training on a plain HashTable, with saves in between.

The plain table says what is right: training on both is the same batch for batch, so at every step boundary both must
hold the same, and what a save brings out must be what the plain table held when the call returned.

While a table is left open its export is paced: a window leaves only when training has done one more thing (or after a
moment, for training may itself wait for the export). So the rows of most windows change before they are read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.plan import deferred_tables
from asyncckpt.shard import stream
from tests.worlds.rows import columns_of

DIM = 2
WINDOW_BYTES = 4096  # 128 rows of 32 bytes.
PACE_S_MAX = 0.02
IDS_COUNT = 500
COLUMNS = ("id", "embedding", "sum", "last_seen")

Contents = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class RunSpec:
    """What one run does; the rest follows from the seed."""

    seed: int
    cache_rows: int
    policy: str
    prefetch_depth: int
    host_level: str
    steps_count: int = 10
    undo_bytes_max: int = 1 << 20

    @property
    def kinds(self) -> Mapping[str, Any]:
        return {
            "optimizer_slots": {"sum": torch.float32},
            "metadata": {"last_seen": torch.int64},
            "initializer": asyncckpt.nn.Uniform(0.5, seed=3),
            "capacity": 160,
        }

    def multi_level(self) -> asyncckpt.MultiLevelTable:
        return asyncckpt.MultiLevelTable(
            "t",
            DIM,
            cache_rows=self.cache_rows,
            policy=self.policy,
            undo_bytes_max=self.undo_bytes_max,
            **self.kinds,
        )

    def plain(self) -> asyncckpt.HashTable:
        return asyncckpt.HashTable("t", DIM, **self.kinds)


def contents(table: asyncckpt.HashTable) -> Contents:
    """All columns of a plain table in the order of the ids."""
    return {name: column.numpy() for name, column in columns_of(table).items()}


def differing(left: Contents, right: Contents) -> list[str]:
    return [name for name in COLUMNS if not np.array_equal(left[name], right[name])]


class _Side:
    """One table with a module and an optimizer over it."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.bag = asyncckpt.nn.HashEmbeddingBag(table, mode="sum")
        self.adagrad = asyncckpt.optim.SparseAdagrad(self.bag, lr=0.1)

    def train(self, step: int, ids: torch.Tensor, target: torch.Tensor) -> None:
        self.bag.step = step
        self.adagrad.zero_grad()
        ((self.bag(ids) - target) ** 2).sum().backward()
        self.adagrad.step()


class LevelsRun:
    """Both tables, and what has happened to them."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._random = np.random.default_rng(spec.seed)
        self.cached, self.plain = _Side(spec.multi_level()), _Side(spec.plain())
        self._universe = self._random.integers(-(2**63), 2**63 - 1, IDS_COUNT)
        self._batches = [self._draw_batch() for _ in range(spec.steps_count + spec.prefetch_depth + 1)]
        for side in (self.cached, self.plain):  # A table large enough for several windows.
            side.table.insert(self._universe[:300], torch.full((300, DIM), 0.25))

    def _draw_batch(self) -> torch.Tensor:
        ids = self._random.zipf(1.3, (8, 4)) % IDS_COUNT
        return torch.from_numpy(self._universe[ids])

    def step(self, number: int) -> None:
        """One training step with its prefetches, and now and then something else that changes the tables."""
        for ahead in range(1, self.spec.prefetch_depth + 1):
            self.cached.table.prefetch(self._batches[number + ahead])
        target = torch.from_numpy(self._random.standard_normal((8, DIM)).astype(np.float32))
        for side in (self.cached, self.plain):
            side.train(number, self._batches[number], target)
        chance = self._random.random()
        if chance < 0.15:
            gone = self._random.choice(self._universe, 20)
            assert self.cached.table.remove(gone) == self.plain.table.remove(gone)
        elif chance < 0.25:
            below = number - 2
            assert self.cached.table.evict("last_seen", below=below) == self.plain.table.evict("last_seen", below=below)
        elif chance < 0.45:
            ids = np.unique(self._random.choice(self._universe, 40))
            rows = torch.from_numpy(self._random.standard_normal((len(ids), DIM)).astype(np.float32))
            for side in (self.cached, self.plain):
                side.table.insert(ids, rows)


class Pace:
    """Lets one window of an export go with every `go`, and all of them once it is `opened`."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(0)
        self._open = False

    def go(self) -> None:
        self._turns.release()

    def open(self) -> None:
        self._open = True
        self._turns.release()

    def wait(self) -> None:
        if not self._open:
            self._turns.acquire(timeout=PACE_S_MAX)


class _PacedCut:
    def __init__(self, cut: Any, pace: Pace) -> None:
        self._cut, self._pace = cut, pace

    def most_urgent(self, left: Sequence[int]) -> int:
        return int(self._cut.most_urgent(left))

    def export(self, index: int, targets: Mapping[str, int]) -> None:
        self._pace.wait()
        self._cut.export(index, targets)


@contextmanager
def paced_exports() -> Iterator[Pace]:
    """Small windows, and exports that wait for their turn."""
    pace = Pace()
    plain_export = stream.export_tables

    def export_tables(opened: Any, cuts: Sequence[Any], *rest: Any, **options: Any) -> Any:
        return plain_export(opened, [_PacedCut(cut, pace) for cut in cuts], *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "export_tables", export_tables)
        patch.setattr(deferred_tables, "CHUNK_BYTES", WINDOW_BYTES)
        yield pace


def load(spec: RunSpec, path: Path, step: int) -> Contents:
    target = spec.plain()
    asyncckpt.Loader(path, hashtables={"t": target}, step=step).load()
    return contents(target)


def run(spec: RunSpec, path: Path) -> list[str]:
    """Train and save at random boundaries; returns what differed, as text: nothing, when all is right."""
    wrong: list[str] = []
    training = LevelsRun(spec)
    expected: dict[int, Contents] = {}
    with paced_exports() as pace:
        saver = asyncckpt.Saver(
            path=path,
            hashtables={"t": training.cached.table},
            durability="none",
            on_busy="wait",
            device=asyncckpt.DeviceOptions(host_level=spec.host_level),
        )
        with saver:
            random = np.random.default_rng(spec.seed + 1)
            future: asyncckpt.SaveFuture | None = None
            for number in range(spec.steps_count):
                training.step(number)
                pace.go()
                if (future is None or future.done()) and random.random() < 0.4:
                    future = saver.save_async(number)
                    expected[number] = contents(training.plain.table)
            pace.open()
            saver.wait_idle()
    for step, reference in expected.items():
        try:
            found = load(spec, path, step)
        except asyncckpt.CorruptError as error:  # A torn id column may hold an id twice.
            wrong.append(f"step {step}: {error}")
        else:
            wrong += [f"step {step}: {column}" for column in differing(found, reference)]
    return wrong
