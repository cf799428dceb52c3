"""Every scheduler of torch drives sparse optimizers as torch's own, also past its end; numbers of any kind."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashEmbedding, HashTable, SparseAdagrad, SparseAdam, SparseAdamW, SparseFTRL, SparseSGD
from asyncckpt.tables.sparse_optimizer import SparseOptimizer

IDS = torch.tensor([7, -3, 2**62])
STEPS_COUNT = 13  # More than any scheduler below has.

# OneCycleLR takes no steps past its end.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(step, 4) / 4),  # A warm-up from 0.
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9 if step < 9 else 0.0),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.0),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, end_factor=0.0, total_iters=10),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.0, 0.1, step_size_up=3, cycle_momentum="betas" in o.defaults),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=STEPS_COUNT, cycle_momentum="betas" in o.defaults or o.defaults.get("momentum", 0) != 0
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.3, 0.0, total_iters=7), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=4), lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=7)],
        milestones=[4],
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.0, anneal_epochs=5),
}

OPTIMIZERS: dict[str, tuple[Callable[..., SparseOptimizer], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (lambda m, lr: SparseSGD(m, lr, momentum=0.9), lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "adagrad": (SparseAdagrad, torch.optim.Adagrad),
    "adam": (SparseAdam, torch.optim.Adam),
    "adamw": (SparseAdamW, torch.optim.AdamW),
}


def new_module() -> HashEmbedding:
    slots = {**SparseSGD.optimizer_slots(), **SparseAdam.optimizer_slots(), "sum": torch.float32}
    slots |= SparseFTRL.optimizer_slots()
    module = HashEmbedding(HashTable("user", 2, optimizer_slots=slots, initializer=1.0))
    module.table.lookup(IDS)
    return module


def rows_of(module: HashEmbedding) -> torch.Tensor:
    return module.table.embedding[module.table.lookup(IDS, insert=False)].clone()


def columns_of(module: HashEmbedding) -> dict[str, torch.Tensor]:
    assert isinstance(module.table, HashTable)
    return module.table.read(IDS)


def advance(scheduler: Any) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    elif not isinstance(scheduler, lr_scheduler.OneCycleLR) or scheduler.last_epoch < STEPS_COUNT - 1:
        scheduler.step()


def test_no_scheduler_of_torch_is_left_out() -> None:
    assert {name for name in lr_scheduler.__all__ if name != "LRScheduler"} <= set(SCHEDULERS)


# torch warns of the order of steps in CosineAnnealing, and of ends of chains.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_beside_torchs_optimizers(kind: str, name: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    module, weight = new_module(), nn.Parameter(torch.ones(3, 2))
    sparse, dense = ours(module, lr=0.1), theirs([weight], lr=0.1)
    schedulers = SCHEDULERS[kind](sparse), SCHEDULERS[kind](dense)
    lowest = sparse.param_groups[0]["lr"]
    for _ in range(STEPS_COUNT):
        module(IDS).square().sum().backward()
        torch.autograd.backward(weight.square().sum())
        for optimizer, scheduler in zip((sparse, dense), schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            advance(scheduler)
        for key in ("lr", "momentum", "betas"):
            assert sparse.param_groups[0].get(key) == dense.param_groups[0].get(key)
        torch.testing.assert_close(rows_of(module), weight.detach())
        lowest = min(lowest, sparse.param_groups[0]["lr"])
    # What a step takes comes back from a checkpoint too.
    again = ours(new_module(), lr=0.5)
    again.load_state_dict(sparse.state_dict())
    assert again.param_groups[0]["lr"] == sparse.param_groups[0]["lr"]
    if kind == "LinearLR":
        assert lowest < 0, "no rate below 0 was tried"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_ftrl_rests_where_the_rate_is_0(kind: str) -> None:
    module = new_module()
    optimizer = SparseFTRL(module, lr=0.1, beta=1.0, l2=0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    for step in range(STEPS_COUNT):
        before = columns_of(module)
        is_above_0 = optimizer.param_groups[0]["lr"] > 1e-38
        module(IDS).sin().sum().backward()
        optimizer.step()
        assert optimizer.state_dict()["state"] == {0: {"step": step + 1}}
        columns = columns_of(module)
        assert all(bool(values.isfinite().all()) for values in columns.values())
        is_same = all(torch.equal(values, before[column]) for column, values in columns.items())
        assert is_same != is_above_0
        advance(scheduler)
    state = optimizer.state_dict()
    again = SparseFTRL(new_module(), lr=0.5)
    again.load_state_dict(state)
    assert again.state_dict() == state


NUMBERS: list[Any] = [
    np.float32(0.25),
    np.float64(0.25),
    np.float16(0.25),
    np.array(0.25),
    np.longdouble(0.25),
    Fraction(1, 4),
    torch.tensor(0.25),
    torch.tensor([0.25], dtype=torch.float64),
    torch.tensor(0.25, dtype=torch.bfloat16, requires_grad=True),
]


@pytest.mark.parametrize("number", NUMBERS, ids=[f"{type(number).__name__}-{number}" for number in NUMBERS])
@pytest.mark.parametrize("make", [SparseSGD, SparseAdagrad, SparseAdam, SparseAdamW, SparseFTRL])
def test_numbers_of_any_kind(make: Any, number: Any) -> None:
    expected, by_lambda, by_argument = new_module(), new_module(), new_module()
    plain, scheduled = make(expected, lr=0.25), make(by_lambda, lr=1.0)
    lr_scheduler.LambdaLR(scheduled, lambda step: number)
    given = make(by_argument, lr=number)
    for module, optimizer in ((expected, plain), (by_lambda, scheduled), (by_argument, given)):
        for _ in range(2):
            module(IDS).square().sum().backward()
            optimizer.step()
    for module in (by_lambda, by_argument):
        assert torch.equal(rows_of(module), rows_of(expected))


def test_a_rate_that_is_a_tensor_follows_its_scheduler() -> None:
    module = new_module()
    optimizer = SparseSGD(module, lr=torch.tensor(1.0))  # type: ignore[arg-type]
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        module(IDS).sum().backward()
        optimizer.step()
        scheduler.step()
    assert rows_of(module).tolist() == [[-0.75, -0.75]] * 3


def test_moments_of_numpy() -> None:
    first, second = new_module(), new_module()
    betas: Any = (np.float64(0.8), torch.tensor(0.5))
    for module, optimizer in ((first, SparseAdam(first, betas=betas)), (second, SparseAdam(second, betas=(0.8, 0.5)))):
        module(IDS).square().sum().backward()
        optimizer.step()
    assert torch.equal(rows_of(first), rows_of(second))


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps", "betas"])
@pytest.mark.parametrize(
    "wrong",
    [
        float("nan"),
        float("inf"),
        np.float32("nan"),
        10**400,
        torch.tensor(float("inf")),
        torch.ones(2),
        "0.1",
        None,
        1j,
        True,
        torch.tensor(True),
        np.bool_(True),
        (),
        (0.5,),
        (0.5, 1.0),
        (0.5, -1.0),
    ],
    ids=repr,
)
def test_a_step_refuses_what_is_no_number_and_changes_nothing(name: str, wrong: Any) -> None:
    module = new_module()
    optimizer = SparseAdam(module, lr=0.1)
    module(IDS).sum().backward()
    right = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = wrong
    with pytest.raises(UsageError, match=f"{name} of a sparse optimizer must be"):
        optimizer.step()
    assert rows_of(module).tolist() == [[1.0, 1.0]] * 3
    assert optimizer.state_dict()["state"] == {}
    optimizer.param_groups[0][name] = right
    optimizer.step()
    assert rows_of(module)[0, 0].item() == pytest.approx(0.9)


@pytest.mark.parametrize("wrong", [-1e-19, torch.tensor(-0.1), np.float32(-1), Fraction(-1, 2)])
def test_what_the_caller_gives_has_no_sign(wrong: Any) -> None:
    optimizer = SparseAdam(new_module())
    for give in (
        lambda: SparseAdam(new_module(), lr=wrong),
        lambda: SparseAdam(new_module(), betas=(0.9, wrong)),
        lambda: optimizer.add_param_group({"params": new_module(), "eps": wrong}),
    ):
        with pytest.raises(UsageError, match=r"of a sparse optimizer must be"):
            give()
    assert len(optimizer.param_groups) == 1
