"""Sparse optimizers against torch.optim on a dense table with the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from asyncckpt.errors import UsageError
from asyncckpt.tables import (
    HashEmbedding,
    HashEmbeddingBag,
    HashTable,
    Slot,
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseFTRL,
    SparseSGD,
    Uniform,
)
from asyncckpt.tables.sparse_optimizer import SparseOptimizer

DIM = 4
IDS = torch.tensor([7, -(2**63), 3, 2**63 - 1, -1, 100, 12, 13])


def new_table(**options: Any) -> HashTable:
    return HashTable(
        "user",
        DIM,
        optimizer_slots={
            "sum": Slot(torch.float32, (DIM,), 0.1),
            "rowwise": Slot(torch.float32, (), 0.1),
            **SparseSGD.optimizer_slots(),
            **SparseAdam.optimizer_slots(),
            **SparseFTRL.optimizer_slots(),
        },
        **{"initializer": Uniform(0.5, seed=2), "capacity": 2, **options},
    )


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (places in IDS, target), with duplicates in every batch."""
    random = torch.Generator().manual_seed(3)
    return [(torch.randint(8, (20,), generator=random), torch.randn(20, DIM, generator=random)) for _ in range(count)]


def train(
    table: HashTable, make: Callable[[nn.Module], SparseOptimizer], *, order: torch.Tensor, batches_count: int = 5
) -> None:
    """Train on batches; order is that in which ids get their rows."""
    table.lookup(IDS[order])
    module = HashEmbedding(table)
    optimizer = make(module)
    for places, target in batches(batches_count):
        loss = (module(IDS[places]) - target).square().sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def train_dense(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], *, batches_count: int = 5, sparse: bool = False
) -> torch.Tensor:
    weight = torch.from_numpy(Uniform(0.5, seed=2).rows(IDS.numpy(), dim=DIM)).requires_grad_()
    optimizer = make([weight])
    for places, target in batches(batches_count):
        loss = (functional.embedding(places, weight, sparse=sparse) - target).square().sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return weight.detach()


def rows_of(table: HashTable) -> torch.Tensor:
    rows = table.lookup(IDS)
    return table.embedding[rows]


SORTED, SHUFFLED = torch.arange(8), torch.tensor([5, 0, 7, 2, 6, 1, 4, 3])


# Each of the numbers is rounded at the end of every operation. torch fuses some of them, so the last bits may differ.
CLOSE = {"rtol": 2e-6, "atol": 1e-7}
Sparse = Callable[[nn.Module], SparseOptimizer]
Dense = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

PAIRS: dict[str, tuple[Sparse, Dense]] = {
    "sgd": (lambda m: SparseSGD(m, lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
    "sgd with decay": (
        lambda m: SparseSGD(m, lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    ),
    "sgd with momentum": (
        lambda m: SparseSGD(m, lr=0.02, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.1),
    ),
    "nesterov": (
        lambda m: SparseSGD(m, lr=0.02, momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.8, nesterov=True),
    ),
    "adagrad": (
        lambda m: SparseAdagrad(m, lr=0.05, eps=1e-8),
        lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-8, initial_accumulator_value=0.1),
    ),
    "adagrad with decays": (
        lambda m: SparseAdagrad(m, lr=0.05, lr_decay=0.1, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    ),
    "adam": (lambda m: SparseAdam(m, lr=0.05), lambda p: torch.optim.Adam(p, lr=0.05)),
    "adam with decay": (
        lambda m: SparseAdam(m, lr=0.05, betas=(0.8, 0.99), eps=1e-4, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.99), eps=1e-4, weight_decay=0.1),
    ),
    "adamw": (
        lambda m: SparseAdamW(m, lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    ),
}


def full_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Like batches, but every row is in each of them."""
    random = torch.Generator().manual_seed(3)
    places = [torch.cat([torch.arange(8), torch.randint(8, (12,), generator=random)]) for _ in range(count)]
    return [(some, torch.randn(20, DIM, generator=random)) for some in places]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("order", [SORTED, SHUFFLED])
def test_with_all_rows_in_each_step_it_is_the_optimizer_of_torch(
    name: str, order: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "batches", full_batches)
    sparse, dense = PAIRS[name]
    table = new_table()
    train(table, sparse, order=order, batches_count=30)
    torch.testing.assert_close(rows_of(table), train_dense(dense, batches_count=30), **CLOSE)


# Where untouched rows stay as they are in torch too.
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_with_some_rows_in_each_step_it_is_the_optimizer_of_torch(name: str) -> None:
    sparse, dense = PAIRS[name]
    table = new_table()
    train(table, sparse, order=SHUFFLED, batches_count=30)
    torch.testing.assert_close(rows_of(table), train_dense(dense, batches_count=30), **CLOSE)


def few_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Like batches, with about three of the rows in each of them."""
    random = torch.Generator().manual_seed(3)
    return [(torch.randint(8, (3,), generator=random), torch.randn(3, DIM, generator=random)) for _ in range(count)]


def test_sparse_adam_is_torchs_sparse_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "batches", few_batches)
    table = new_table()
    train(table, lambda module: SparseAdam(module, lr=0.05), order=SHUFFLED, batches_count=40)
    dense = train_dense(lambda weights: torch.optim.SparseAdam(weights, lr=0.05), batches_count=40, sparse=True)
    # torch.optim.SparseAdam adds eps before the correction of the bias, torch.optim.Adam and this one behind it.
    torch.testing.assert_close(rows_of(table), dense, rtol=1e-5, atol=1e-6)


LAZY: dict[str, Sparse] = {
    "momentum": lambda m: SparseSGD(m, lr=0.02, momentum=0.9, weight_decay=0.1),
    "adamw": lambda m: SparseAdamW(m, lr=0.05, weight_decay=0.1),
    "adam": lambda m: SparseAdam(m, lr=0.05, weight_decay=0.1),
    "ftrl": lambda m: SparseFTRL(m, lr=0.05, l1=0.1, l2=0.1),
    "adagrad": lambda m: SparseAdagrad(m, lr=0.05, weight_decay=0.1),
}


@pytest.mark.parametrize("name", LAZY)
def test_untouched_rows_stay_as_they_are(name: str) -> None:
    table = new_table()
    module = HashEmbedding(table)
    optimizer = LAZY[name](module)

    def step(ids: torch.Tensor) -> None:
        module(ids).square().sum().backward()
        optimizer.step()

    step(IDS)
    columns = [table.embedding, *(table.slot(c.name) for c in table.schema().columns[2:])]
    rows = table.lookup(IDS)
    before = [column[rows].clone() for column in columns]
    step(IDS[:3])
    for column, old in zip(columns, before, strict=True):
        assert torch.equal(column[rows[3:]], old[3:])
    assert not torch.equal(table.embedding[rows[:3]], before[0][:3])


def test_rowwise_adam_has_one_second_moment_per_row() -> None:
    slots = SparseAdam.optimizer_slots(rowwise=True)
    table = HashTable("user", DIM, optimizer_slots=slots, initializer=Uniform(0.5, seed=2))
    train(table, lambda module: SparseAdam(module, lr=0.05), order=SHUFFLED)
    rows = torch.from_numpy(Uniform(0.5, seed=2).rows(IDS.numpy(), dim=DIM)).double()
    first, second = torch.zeros_like(rows), torch.zeros(8, dtype=torch.float64)
    for step, (places, target) in enumerate(batches(5), start=1):
        gradient = torch.zeros_like(rows).index_add_(0, places, 2 * (rows[places] - target))
        touched = torch.unique(places)
        first[touched] = 0.9 * first[touched] + 0.1 * gradient[touched]
        second[touched] = 0.999 * second[touched] + 0.001 * gradient[touched].square().mean(dim=1)
        divisor = (second / (1 - 0.999**step)).sqrt().unsqueeze(1) + 1e-8
        rows[touched] -= 0.05 / (1 - 0.9**step) * (first / divisor)[touched]
    torch.testing.assert_close(rows_of(table), rows.float(), rtol=1e-5, atol=1e-6)
    assert table.slot("exp_avg_sq").shape == (table.capacity,)
    torch.testing.assert_close(table.slot("exp_avg_sq")[table.lookup(IDS)], second.float())


@pytest.mark.parametrize(("l1", "l2", "beta"), [(0.0, 0.0, 0.0), (2.0, 0.1, 0.0), (2.0, 0.0, 1.0)])
def test_ftrl_is_that_of_the_paper(l1: float, l2: float, beta: float) -> None:
    table = new_table()
    train(table, lambda module: SparseFTRL(module, 0.1, l1, l2, beta), order=SHUFFLED)
    rows = torch.from_numpy(Uniform(0.5, seed=2).rows(IDS.numpy(), dim=DIM)).double()
    z, n = torch.zeros_like(rows), torch.zeros_like(rows)
    for places, target in batches(5):
        gradient = torch.zeros_like(rows).index_add_(0, places, 2 * (rows[places] - target))
        touched = torch.zeros(8, dtype=torch.bool).index_fill_(0, places, True)
        sigma = ((n + gradient.square()).sqrt() - n.sqrt()) / 0.1
        z = z + gradient - sigma * rows
        n = n + gradient.square()
        new = -(z - z.sign() * l1) / ((beta + n.sqrt()) / 0.1 + l2)
        new[z.abs() <= l1] = 0
        rows = torch.where(touched.unsqueeze(1), new, rows)
    torch.testing.assert_close(rows_of(table), rows.float(), rtol=1e-4, atol=1e-6)
    if l1:
        assert (rows_of(table) == 0).any()


def test_rowwise_adagrad_adds_mean_squares() -> None:
    table = new_table()
    train(table, lambda module: SparseAdagrad(module, lr=0.05, slots={"sum": "rowwise"}), order=SHUFFLED)
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


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (nn.Linear(1, 1), "hold no HashEmbedding or HashEmbeddingBag"),
        ([], "hold no HashEmbedding or HashEmbeddingBag"),
        (3, "modules of a sparse optimizer must be .*; got an int"),
        (["user"], "module of a sparse optimizer must be .*; got a str"),
    ],
)
def test_modules_without_tables_are_refused(modules: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SparseSGD(modules, lr=0.1)


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf"), "0.1", None, True])
def test_wrong_lr_is_refused(lr: Any) -> None:
    with pytest.raises(UsageError, match="lr of a sparse optimizer must be"):
        SparseSGD(HashEmbedding(DIM), lr=lr)


@pytest.mark.parametrize("spec", [None, torch.int64, (2,), (DIM, 1)])
def test_adagrad_refuses_a_wrong_slot(spec: Any) -> None:
    table = HashTable("user", DIM, optimizer_slots={} if spec is None else {"sum": spec})
    rule = r"a floating-point optimizer slot of row shape \(4,\) or \(\)"
    with pytest.raises(UsageError, match=f"slot 'sum' of table 'user' must be {rule}; got "):
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


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (SparseAdam, {"exp_avg": ()}),
        (SparseAdam, {"exp_avg_sq": torch.float32}),
        (SparseFTRL, {"accumulator": torch.float32, "linear": ()}),
        (lambda module: SparseSGD(module, momentum=0.9), {}),
    ],
)
def test_missing_and_narrow_slots_are_refused(make: Callable[[nn.Module], SparseOptimizer], slots: Any) -> None:
    with pytest.raises(UsageError, match=r"slot '\w+' of table 'user' must be"):
        make(HashEmbedding(HashTable("user", DIM, optimizer_slots=slots)))


def test_plain_sgd_needs_no_slot() -> None:
    SparseSGD(HashEmbedding(HashTable("user", DIM)))


def test_slots_have_the_names_they_are_given() -> None:
    table = HashTable("user", DIM, optimizer_slots={"sparse_adam_exp_avg": torch.float32, "v": torch.float32})
    module = HashEmbedding(table)
    optimizer = SparseAdam(module, slots={"exp_avg": "sparse_adam_exp_avg", "exp_avg_sq": "v"})
    module(IDS).sum().backward()
    optimizer.step()
    assert table.slot("sparse_adam_exp_avg")[table.lookup(IDS)].gt(0).all()
    with pytest.raises(UsageError, match="slots of a sparse optimizer must be"):
        SparseAdam(module, slots={"momentum": "v"})


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (SparseSGD, {"nesterov": 1}),
        (SparseSGD, {"momentum": -1}),
        (SparseAdam, {"betas": (0.9,)}),
        (SparseAdam, {"betas": (0.9, 1.0)}),
        (SparseAdam, {"betas": 0.9}),
        (SparseAdam, {"eps": None}),
        (SparseFTRL, {"lr": 0}),
        (SparseFTRL, {"l1": float("inf")}),
        (SparseAdagrad, {"lr_decay": "0"}),
    ],
)
def test_wrong_numbers_are_refused(make: Callable[..., SparseOptimizer], wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(UsageError, match=f"{name} of a sparse optimizer must be"):
        make(HashEmbedding(new_table()), **wrong)


@pytest.mark.parametrize("make", [SparseSGD, SparseAdagrad, SparseAdam, SparseAdamW, SparseFTRL])
def test_a_table_has_the_slots_that_its_optimizer_names(make: type[SparseOptimizer]) -> None:
    table = HashTable("user", DIM, optimizer_slots=make.optimizer_slots(dtype=torch.bfloat16))
    optimizer = make(HashEmbedding(table))
    assert [column.name for column in table.schema().columns[2:]] == optimizer.defaults["slots"]
    with pytest.raises(UsageError, match="dtype of slots"):
        make.optimizer_slots(dtype=torch.int64)
    if make in (SparseSGD, SparseFTRL):
        with pytest.raises(UsageError, match="has no row-wise form"):
            make.optimizer_slots(rowwise=True)
