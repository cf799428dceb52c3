"""SparseSGD and SparseAdagrad against torch.optim on a dense table with the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashEmbedding, HashEmbeddingBag, HashTable, Slot, SparseAdagrad, SparseSGD, Uniform

DIM = 4
IDS = torch.tensor([7, -(2**63), 3, 2**63 - 1, -1, 100, 12, 13])


def new_table(**options: Any) -> HashTable:
    return HashTable(
        "user",
        DIM,
        optimizer_slots={"sum": Slot(torch.float32, (DIM,), 0.1), "rowwise": Slot(torch.float32, (), 0.1)},
        **{"initializer": Uniform(0.5, seed=2), "capacity": 2, **options},
    )


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (places in IDS, target), with duplicates in every batch."""
    random = torch.Generator().manual_seed(3)
    return [(torch.randint(8, (20,), generator=random), torch.randn(20, DIM, generator=random)) for _ in range(count)]


def train(table: HashTable, make: Callable[[nn.Module], SparseSGD | SparseAdagrad], *, order: torch.Tensor) -> None:
    """Train on batches; order is that in which ids get their rows."""
    table.lookup(IDS[order])
    module = HashEmbedding(table)
    optimizer = make(module)
    for places, target in batches(5):
        loss = (module(IDS[places]) - target).square().sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def train_dense(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> torch.Tensor:
    weight = torch.from_numpy(Uniform(0.5, seed=2).rows(IDS.numpy(), dim=DIM)).requires_grad_()
    optimizer = make([weight])
    for places, target in batches(5):
        loss = (functional.embedding(places, weight) - target).square().sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return weight.detach()


def rows_of(table: HashTable) -> torch.Tensor:
    rows = table.lookup(IDS)
    return table.embedding[rows]


SORTED, SHUFFLED = torch.arange(8), torch.tensor([5, 0, 7, 2, 6, 1, 4, 3])


@pytest.mark.parametrize("order", [SORTED, SHUFFLED])
def test_sgd_is_bit_equal_to_dense_sgd(order: torch.Tensor) -> None:
    table = new_table()
    train(table, lambda module: SparseSGD(module, lr=0.05), order=order)
    assert torch.equal(rows_of(table), train_dense(lambda weights: torch.optim.SGD(weights, lr=0.05)))


@pytest.mark.parametrize("order", [SORTED, SHUFFLED])
def test_adagrad_is_bit_equal_to_dense_adagrad(order: torch.Tensor) -> None:
    table = new_table()
    train(table, lambda module: SparseAdagrad(module, lr=0.05, eps=1e-8), order=order)
    dense = train_dense(lambda weights: torch.optim.Adagrad(weights, lr=0.05, eps=1e-8, initial_accumulator_value=0.1))
    assert torch.equal(rows_of(table), dense)


def test_rowwise_adagrad_adds_mean_squares() -> None:
    table = new_table()
    train(table, lambda module: SparseAdagrad(module, lr=0.05, slot="rowwise"), order=SHUFFLED)
    rows = torch.from_numpy(Uniform(0.5, seed=2).rows(IDS.numpy(), dim=DIM)).double()
    sums = torch.full((8,), 0.1, dtype=torch.float64)
    for places, target in batches(5):
        gradient = torch.zeros_like(rows).index_add_(0, places, 2 * (rows[places] - target))
        sums += gradient.square().mean(dim=1)
        rows -= 0.05 * gradient / (sums.sqrt() + 1e-10).unsqueeze(1)
    torch.testing.assert_close(rows_of(table), rows.float())
    torch.testing.assert_close(table.slot("rowwise")[table.lookup(IDS)], sums.float())


def test_modules_over_one_table_count_as_one() -> None:
    table, dense = new_table(), new_table()
    first, second = HashEmbedding(table), HashEmbeddingBag(table, mode="sum")
    SparseAdagrad([first, second], lr=0.1).step()
    optimizer = SparseAdagrad(nn.ModuleList([first, second]), lr=0.1)
    (first(IDS) * 3).sum().backward()
    (first(IDS[:4]) * 2).sum().backward()
    second(IDS[2:].unsqueeze(1)).sum().backward()
    optimizer.step()
    reference = HashEmbedding(dense)
    (reference(IDS) * torch.tensor([5, 5, 6, 6, 4, 4, 4, 4]).unsqueeze(1)).sum().backward()
    SparseAdagrad(reference, lr=0.1).step()
    assert torch.equal(rows_of(table), rows_of(dense))


def test_removed_ids_are_passed_over() -> None:
    table = new_table()
    module = HashEmbedding(table)
    module(IDS).sum().backward()
    table.remove(IDS[:3])
    table.lookup(torch.tensor([555]))
    before = table.embedding[table.lookup(torch.tensor([555]))].clone()
    SparseAdagrad(module, lr=0.1).step()
    assert set(table.ids().tolist()) == {555, *IDS[3:].tolist()}
    assert torch.equal(table.embedding[table.lookup(torch.tensor([555]))], before)
    assert table.slot("sum")[table.lookup(IDS[3:])].gt(1.0).all()


def test_zero_grad_forgets() -> None:
    table = new_table()
    module = HashEmbedding(table)
    optimizer = SparseSGD([module], lr=0.1)
    module(IDS).sum().backward()
    optimizer.zero_grad()
    before = rows_of(table)
    optimizer.step()
    assert torch.equal(rows_of(table), before)


def test_gradients_accumulate_over_forwards() -> None:
    table, reference = new_table(), new_table()
    module = HashEmbedding(table)
    for _ in range(3):
        module(IDS).sum().backward()
    SparseSGD(module, lr=0.5).step()
    expected = rows_of(reference) - 1.5
    torch.testing.assert_close(rows_of(table), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_adagrad_computes_in_float32_or_wider(dtype: torch.dtype) -> None:
    table = HashTable("user", DIM, dtype=dtype, optimizer_slots={"sum": torch.float32}, initializer=1.0)
    module = HashEmbedding(table)
    optimizer = SparseAdagrad(module, lr=0.25)
    # The square of this gradient is below the smallest float16, and so is eps.
    (module(IDS) * 1e-4).sum().backward()
    optimizer.step()
    assert rows_of(table).dtype is dtype
    # The exact value is 0.75 + 2.5e-7, which rounds to 0.75 in 16 bits.
    torch.testing.assert_close(rows_of(table).double(), torch.full((8, DIM), 0.75).double(), rtol=0, atol=1e-6)


def test_sgd_in_half_precision_rounds_once() -> None:
    table = HashTable("user", 1, dtype=torch.float16, initializer=1.0)
    module = HashEmbedding(table)
    module(IDS).sum().backward()
    SparseSGD(module, lr=0.25).step()
    assert rows_of(table).tolist() == [[0.75]] * 8


def test_state_dict_round_trip() -> None:
    module = HashEmbedding(new_table())
    source, target = SparseAdagrad(module, lr=0.1, eps=1e-6), SparseAdagrad(module, lr=1.0)
    assert source.state_dict() == {"lr": 0.1, "eps": 1e-6}
    target.load_state_dict(source.state_dict())
    assert (target.lr, target.eps) == (0.1, 1e-6)
    sgd = SparseSGD(module, lr=2)
    assert sgd.state_dict() == {"lr": 2.0}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"lr": 0.1}, r"state of a sparse optimizer is wrong, found \['lr'\], expected \['eps', 'lr'\]"),
        ({"lr": 0.1, "eps": 0.1, "rho": 1}, "state of a sparse optimizer is wrong"),
        ([("lr", 0.1)], "state of a sparse optimizer is wrong, found <class 'list'>"),
        ({"lr": 0.5, "eps": "0"}, "eps of a sparse optimizer is wrong, found '0'"),
        ({"lr": -0.5, "eps": 0.1}, "lr of a sparse optimizer is wrong, found -0.5"),
    ],
)
def test_wrong_state_changes_nothing(state: Any, message: str) -> None:
    optimizer = SparseAdagrad(HashEmbedding(new_table()), lr=0.1, eps=1e-6)
    with pytest.raises(UsageError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict() == {"lr": 0.1, "eps": 1e-6}


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (nn.Linear(1, 1), "hold no HashEmbedding or HashEmbeddingBag"),
        ([], "hold no HashEmbedding or HashEmbeddingBag"),
        (3, "modules of a sparse optimizer are wrong, found <class 'int'>"),
        (["user"], "module of a sparse optimizer is wrong, found <class 'str'>"),
    ],
)
def test_modules_without_tables_are_refused(modules: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SparseSGD(modules, lr=0.1)


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf"), "0.1", None, True])
def test_wrong_lr_is_refused(lr: Any) -> None:
    with pytest.raises(UsageError, match="lr of a sparse optimizer is wrong"):
        SparseSGD(HashEmbedding(DIM), lr=lr)


@pytest.mark.parametrize("spec", [None, torch.int64, (2,), (DIM, 1)])
def test_adagrad_refuses_a_wrong_slot(spec: Any) -> None:
    table = HashTable("user", DIM, optimizer_slots={} if spec is None else {"sum": spec})
    expected = r"expected 'a floating-point optimizer slot of row shape \(4,\) or \(\)'"
    with pytest.raises(UsageError, match=f"slot 'sum' of table 'user' is wrong, found .*, {expected}"):
        SparseAdagrad(HashEmbedding(table), lr=0.1)


def test_resumed_training_is_bit_equal() -> None:
    table = new_table()
    train(table, lambda module: SparseAdagrad(module, lr=0.05), order=SORTED)
    resumed = new_table()
    ids = table.ids().flip(0)
    rows = table.lookup(ids)
    resumed.insert(ids, table.embedding[rows], sum=table.slot("sum")[rows])
    for each in (table, resumed):
        train(each, lambda module: SparseAdagrad(module, lr=0.05), order=SHUFFLED)
    assert torch.equal(rows_of(table), rows_of(resumed))
    assert np.array_equal(np.sort(table.ids().numpy()), np.sort(resumed.ids().numpy()))
