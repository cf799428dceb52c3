"""Zipf training with this library's modules, and copies of what it held: for tests and proofs of long chains.

Hot ids come again and again, so between two saves training touches a small share of the rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import asyncckpt
from tests.worlds.rows import columns_of

DIM = 16
ROWS_COUNT = 20_000
BATCH_IDS = 48
ZIPF_EXPONENT = 1.05

Contents = dict[str, np.ndarray[Any, Any]]


class Tower(torch.nn.Module):
    """Two embeddings and a linear layer over them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = torch.nn.ModuleDict(
            {name: asyncckpt.nn.HashEmbeddingBag(new_table(name)) for name in ("user", "item")}
        )
        self.head = torch.nn.Linear(2 * DIM, 1)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(torch.cat([bag(ids[name]) for name, bag in self.bags.items()], dim=1))

    @property
    def tables(self) -> dict[str, asyncckpt.HashTable]:
        return {name: bag.table for name, bag in self.bags.items()}


def new_table(name: str) -> asyncckpt.HashTable:
    return asyncckpt.HashTable(
        name,
        DIM,
        optimizer_slots={"sum": torch.float32},
        metadata={"last_seen": torch.int64},
        initializer=asyncckpt.nn.Uniform(0.1, seed=3),
    )


class ZipfTraining:
    """A tower whose tables know all ids already, as after weeks of training."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._random = np.random.default_rng(seed)
        self.tower = Tower()
        self.dense = torch.optim.SGD(self.tower.head.parameters(), lr=0.01)
        self.sparse = asyncckpt.optim.SparseAdagrad(self.tower, lr=0.05)
        self._ids = {name: self._random.permutation(ROWS_COUNT) * 7919 - 2**40 for name in self.tower.tables}
        for name, table in self.tower.tables.items():
            table.lookup(self._ids[name])
        self.steps_count = 0

    def train(self, steps_count: int) -> None:
        for _ in range(steps_count):
            self._step()

    def _step(self) -> None:
        self.steps_count += 1
        for bag in self.tower.bags.values():
            bag.step = self.steps_count
        ids = {name: torch.from_numpy(ids[self._zipf()]).view(-1, 4) for name, ids in self._ids.items()}
        target = torch.from_numpy(self._random.standard_normal((BATCH_IDS // 4, 1)).astype(np.float32))
        self.dense.zero_grad()
        self.sparse.zero_grad()
        ((self.tower(ids) - target) ** 2).mean().backward()
        self.dense.step()
        self.sparse.step()

    def _zipf(self) -> np.ndarray[Any, Any]:
        """Ranks whose frequency falls as rank ** -ZIPF_EXPONENT, by the inverse of the distribution function."""
        power = 1 - ZIPF_EXPONENT
        ranks = ((ROWS_COUNT**power - 1) * self._random.random(BATCH_IDS) + 1) ** (1 / power)
        return np.minimum(ranks.astype(np.int64), ROWS_COUNT) - 1

    def state(self) -> dict[str, Any]:
        return {"head": self.tower.head, "dense": self.dense}

    def contents(self) -> Contents:
        return contents(self.tower.tables, self.tower.head)


def contents(tables: dict[str, asyncckpt.HashTable], head: torch.nn.Linear) -> Contents:
    """Every bit, by name; rows in the order of their ids."""
    found: Contents = {"weight": head.weight.detach().numpy().copy(), "bias": head.bias.detach().numpy().copy()}
    for name, table in tables.items():
        found |= {f"{name}@{column}": values.numpy() for column, values in columns_of(table).items()}
    return found


def load(path: Path, step: int) -> Contents:
    """A step in fresh tables."""
    tables, head = {name: new_table(name) for name in ("user", "item")}, torch.nn.Linear(2 * DIM, 1)
    asyncckpt.Loader(path, hashtables=tables, tensors={"head": head}, step=step).load()
    return contents(tables, head)


def differences(left: Contents, right: Contents) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not np.array_equal(left[name], right[name])]
