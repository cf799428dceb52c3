"""The core, torch's operations and a table of another kind give the same bits, and marks say what was updated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.native import TwinCore
from asyncckpt.tables import (
    HashEmbedding,
    HashTable,
    MultiLevelTable,
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseFTRL,
    SparseSGD,
    Uniform,
    row_update,
)
from asyncckpt.tables.sparse_optimizer import SparseOptimizer
from tests.worlds.rows import table_image

OPTIMIZERS: dict[str, tuple[type[SparseOptimizer], dict[str, Any], bool]] = {
    "sgd": (SparseSGD, {"lr": 0.1, "weight_decay": 0.1}, False),
    "momentum": (SparseSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, False),
    "adagrad": (SparseAdagrad, {"lr": 0.1}, False),
    "rowwise adagrad": (SparseAdagrad, {"lr": 0.1, "weight_decay": 0.1}, True),
    "adam": (SparseAdam, {"lr": 0.1, "weight_decay": 0.1}, False),
    "rowwise adam": (SparseAdam, {"lr": 0.1}, True),
    "adamw": (SparseAdamW, {"lr": 0.1}, False),
    "ftrl": (SparseFTRL, {"lr": 0.1, "l1": 0.1, "l2": 0.1}, False),
}


class Foreign:
    """A TrainableTable that is none of ours, over one that is."""

    def __init__(self, table: HashTable) -> None:
        self.table = table
        self.asked_for: list[int] = []
        self.name, self.dim, self.device = table.name, table.dim, table.device
        self.schema, self.lookup, self.update = table.schema, table.lookup, table.update

    @property
    def embedding(self) -> torch.Tensor:
        return self.table.embedding

    def rows(self, ids: Any) -> Any:
        self.asked_for += np.asarray(ids).tolist()
        return self.table.rows(ids)


def trained(table: Any, make: Callable[[HashEmbedding], SparseOptimizer], *, steps: int = 6) -> None:
    module = HashEmbedding(table)
    optimizer = make(module)
    random = torch.Generator().manual_seed(5)
    for step in range(steps):
        ids = torch.randint(-40, 40, (30,), generator=random)
        (module(ids) * torch.randn(30, table.dim, generator=random)).sum().backward()
        if step == 3:
            (table.table if isinstance(table, Foreign) else table).remove(torch.arange(10))
        optimizer.step()


@contextmanager
def cut_of(table: Any) -> Iterator[Any]:
    cut = table.begin_cut()
    try:
        yield cut
    finally:
        cut.fence()
        cut.end(True)


@pytest.mark.parametrize(
    ("name", "shape"), list(product(OPTIMIZERS, [(1, torch.float32), (40, torch.float32), (19, torch.bfloat16)]))
)
def test_all_ways_give_the_same_bits(
    name: str, shape: tuple[int, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    (kind, numbers, rowwise), (dim, dtype) = OPTIMIZERS[name], shape
    slots = kind.optimizer_slots(rowwise=rowwise)

    def new_table() -> HashTable:
        return HashTable("t", dim, dtype=dtype, optimizer_slots=slots, initializer=Uniform(0.5))

    def make(module: HashEmbedding) -> SparseOptimizer:
        return kind(module, **numbers)

    by_core, by_torch, by_twin = new_table(), new_table(), new_table()
    trained(by_core, make)
    trained(Foreign(by_torch), make)
    with monkeypatch.context() as patch:
        patch.setattr(row_update, "core", TwinCore())
        trained(by_twin, make)
    with monkeypatch.context() as patch:
        patch.setattr(row_update, "core_takes", lambda *_: False)
        by_plain_torch = new_table()
        trained(by_plain_torch, make)
    expected = table_image(by_core)
    assert table_image(by_torch) == expected
    assert table_image(by_twin) == expected
    assert table_image(by_plain_torch) == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_small_cache_gives_the_same_bits(name: str) -> None:
    kind, numbers, rowwise = OPTIMIZERS[name]
    slots = kind.optimizer_slots(rowwise=rowwise)
    plain = HashTable("t", 5, optimizer_slots=slots, initializer=Uniform(0.5))
    cached = MultiLevelTable("t", 5, cache_rows=40, optimizer_slots=slots, initializer=Uniform(0.5))
    trained(plain, lambda module: kind(module, **numbers))
    trained(cached, lambda module: kind(module, **numbers))
    ids = plain.ids()
    rows, read = plain.lookup(ids), cached.read(ids)
    assert set(ids.tolist()) == set(cached.ids().tolist())
    for column in plain.schema().columns[1:]:
        own = plain.embedding if column.name == "embedding" else plain.slot(column.name)
        assert torch.equal(own[rows], read[column.name])


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("levels", [True, False])
def test_updated_rows_are_marked_and_no_others(takes: bool, levels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    table: Any = (
        MultiLevelTable("t", 2, cache_rows=64, initializer=1.0) if levels else HashTable("t", 2, initializer=1.0)
    )
    module = HashEmbedding(table)
    optimizer = SparseSGD(module, lr=0.1)
    module(torch.arange(10)).sum().backward()
    module(torch.arange(20))
    table.remove(torch.tensor([3]))
    if not takes:
        monkeypatch.setattr(row_update, "core_takes", lambda *_: False)
    with cut_of(table) as cut:
        version = cut.version
    optimizer.step()
    with cut_of(table) as cut:
        touched = cut.touched_since(version)
        assert touched is not None  # torch has counted no write that the table does not know.
        assert sorted(table._store.ids_of(touched).tolist()) == [id for id in range(10) if id != 3]


def test_a_table_of_another_kind_is_asked_for_its_rows() -> None:
    table = Foreign(HashTable("t", 2))
    module = HashEmbedding(table)  # type: ignore[arg-type]
    module(torch.tensor([5, 6])).sum().backward()
    table.table.remove(torch.tensor([5]))
    SparseSGD(module, lr=0.5).step()
    assert table.asked_for == [5, 6]
    assert table.embedding[table.lookup(torch.tensor([6]))].tolist() == [[-0.5, -0.5]]


@pytest.mark.parametrize("slot", [torch.float64, torch.float32])
def test_a_float64_column_is_computed_in_float64(slot: torch.dtype) -> None:
    table = HashTable("t", 3, dtype=torch.float64, optimizer_slots={"sum": slot}, initializer=1.0)
    module = HashEmbedding(table)
    optimizer = SparseAdagrad(module, lr=0.1, eps=0.0)
    (module(torch.tensor([1])) * 3).sum().backward()
    optimizer.step()
    assert table.embedding[0].tolist() == [1 - 0.1 * 3 / 3] * 3
