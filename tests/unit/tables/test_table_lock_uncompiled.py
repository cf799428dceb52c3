"""A compiled model trains its tables as it does eagerly, and as nn.Embedding does."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.embcache import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection, EmbCacheTableConfig
from asyncckpt.nn import HashEmbedding, HashEmbeddingBag, Uniform
from asyncckpt.optim import SparseAdagrad, SparseAdam, SparseAdamW, SparseFTRL, SparseSGD

pytestmark = pytest.mark.any_core

DIM, STEPS = 4, 5
OPTIMIZERS = (SparseSGD, SparseAdagrad, SparseAdam, SparseAdamW, SparseFTRL)
INITIALIZERS: tuple[Any, ...] = (None, 0.5, Uniform(0.1), lambda ids: ids[:, None].float() * torch.ones(DIM))
KINDS = ("rows", "bags", "levels", "collection", "bag collection")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class WeighedRows(nn.Module):
    """Two of one kind, whose rows a linear layer weighs."""

    def __init__(self, kind: str, optimizer: Any, chosen: random.Random) -> None:
        super().__init__()
        self.kind = kind
        options = {
            "optimizer_slots": optimizer.optimizer_slots(),
            "initializer": chosen.choice(INITIALIZERS),
            "metadata": {"count": torch.int64, "last_seen": torch.int64},
            "admit_after": chosen.choice([1, 2]),
        }
        self.tables: list[Any] = []
        if "collection" in kind:
            configs = [EmbCacheTableConfig(name, DIM, [name], cache_rows=64, **options) for name in ("a", "b")]
            made = EmbCacheEmbeddingBagCollection if kind == "bag collection" else EmbCacheEmbeddingCollection
            self.first: nn.Module = made(configs)
            self.tables = list(self.first.tables().values())
        else:
            levels = {"cache_rows": 64} if kind == "levels" else {}
            new: Any = asyncckpt.MultiLevelTable if levels else asyncckpt.HashTable
            self.tables = [new(name, DIM, **levels, **options) for name in ("a", "b")]
            module: Any = HashEmbeddingBag if kind == "bags" else HashEmbedding
            self.first, self.second = (module(table) for table in self.tables)
        self.linear = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if "collection" not in self.kind:
            return self.linear(torch.relu(self.first(ids)) + self.second(ids + 1)).sum()
        flat, offsets = ids.reshape(-1), torch.arange(0, ids.numel() + 1, ids.shape[1])
        found = self.first({"a": (flat, offsets), "b": (flat + 1, offsets)})
        rows = [found[key] if self.kind == "bag collection" else found[key].values for key in ("a", "b")]
        return self.linear(torch.relu(rows[0]) + rows[1]).sum()


def trained(kind: str, seed: int, compiled: Callable[[Any], Any]) -> list[Any]:
    """Train with batches of two sizes, and evaluate; all that it gives."""
    chosen = random.Random(f"{kind} {seed}")
    torch.manual_seed(seed)
    optimizer_kind = chosen.choice(OPTIMIZERS)
    net = WeighedRows(kind, optimizer_kind, chosen)
    optimizer: Any = optimizer_kind(net, lr=0.5)
    run = compiled(net)
    found: list[Any] = []
    for step in range(STEPS):
        run.train(step % 3 != 2)
        for module in net.modules():
            if isinstance(module, HashEmbedding):
                module.step = step + 1
        with torch.set_grad_enabled(step % 3 != 2):
            loss = run(torch.arange(6 + 6 * (step % 2)).view(2, -1) + step)
        found.append(loss.item())
        if step % 3 != 2:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            net.tables[0].remove(torch.tensor([step]))
    for table in net.tables:
        table.evict("count", below=2)
        ids = table.ids().sort().values
        found += [ids.tolist(), {name: rows.tolist() for name, rows in table.read(ids).items()}]
        found += [sorted(zip(*(part.tolist() for part in one.counts()), strict=True)) for one in candidates_of(table)]
    return found


def candidates_of(table: Any) -> list[Any]:
    return list(table.companions().values())


def compare(kind: str, seed: int, **options: Any) -> None:
    print(f"kind {kind!r}, seed {seed}")
    eager = trained(kind, seed, lambda net: net)
    assert trained(kind, seed, lambda net: torch.compile(net, **options)) == eager


def test_a_compiled_model_trains_its_tables_as_eagerly() -> None:
    compare("rows", 4, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_any_compiled_model_trains_its_tables_as_eagerly(kind: str, seed: int) -> None:
    compare(kind, seed, backend="aot_eager", dynamic=[None, True][seed % 2])


@pytest.mark.slow
def test_a_model_that_inductor_compiles_trains_its_tables() -> None:
    net = nn.Sequential(HashEmbedding(asyncckpt.HashTable("t", DIM, initializer=Uniform(0.1))), nn.Linear(DIM, 1))
    before = net(torch.arange(6)).detach()
    assert torch.allclose(torch.compile(net)(torch.arange(6)), before, atol=1e-6)


def test_a_compiled_model_trains_as_one_of_nn_embedding() -> None:
    table = asyncckpt.HashTable("t", DIM, initializer=Uniform(0.1))
    ids = torch.arange(20)
    table.lookup(ids)
    dense = nn.Embedding.from_pretrained(table.read(ids)["embedding"], freeze=False)
    outputs = []
    for first in (dense, HashEmbedding(table)):
        torch.manual_seed(0)
        net = nn.Sequential(first, nn.Linear(DIM, 1))
        sparse = first is not dense
        optimizers = [torch.optim.SGD(net[1:].parameters() if sparse else net.parameters(), lr=0.1)]
        optimizers += [SparseSGD(net, lr=0.1)] if sparse else []
        run = torch.compile(net, backend="eager")
        for step in range(4):
            loss = run(torch.randint(20, (2, 3 + step % 2))).square().sum()
            loss.backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        outputs.append(run.eval()(ids))
    assert torch.allclose(*outputs, atol=1e-6)


def use(table: asyncckpt.HashTable, step: int) -> torch.Tensor:
    ids = torch.arange(4) + step
    table.lookup(ids)
    table.insert(ids + 50, torch.ones(4, DIM))
    table.remove(ids[:1])
    table.update(torch.arange(2), lambda values: values.embedding.mul_(2.0))
    return table.read(ids, absent_as_zeros=True)["embedding"]


def test_a_table_may_be_used_in_a_compiled_function() -> None:
    seen = []
    for run in (use, torch.compile(use, backend="eager")):
        table = asyncckpt.HashTable("t", DIM, initializer=Uniform(0.1), capacity=1)
        seen.append([run(table, step).tolist() for step in range(3)])
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_a_table_alone_loads_no_compiler() -> None:
    program = (
        "import sys, torch\n"
        "from asyncckpt.nn import HashEmbedding\n"
        "HashEmbedding(4).eval()(torch.arange(3))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
