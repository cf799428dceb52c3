"""What a StepWatch sees of the optimizers of a state, wherever they are and whatever wraps them."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.adapters import dense_state_of, tables_of
from asyncckpt.engine.features.step_watch import StepWatch
from tests.adapters.fake_tbe import FakeTbe, Spec


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as in Accelerate: it never calls torch's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


class Keyed(Wrapper):
    """As in TorchRec: it has hooks of its own, which its step does not call, and groups of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._optimizer_step_pre_hooks = OrderedDict()

    @property
    def param_groups(self) -> Any:
        return [{"params": [parameter]} for group in self.optimizer.param_groups for parameter in group["params"]]


class Fused(Wrapper):
    """One whose parameters are updated elsewhere, so that its step is nobody's."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return None


def sgd() -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.mark.parametrize(
    "hold",
    [
        lambda one: {"o": one},
        lambda one: {"all": [one]},
        lambda one: {"all": (one,)},
        lambda one: {"all": OrderedDict(g=one)},
        lambda one: {"all": {"deep": [OrderedDict(g=one)]}},
    ],
    ids=["itself", "list", "tuple", "OrderedDict", "deep"],
)
@pytest.mark.parametrize("wrap", [lambda one: one, Wrapper, Keyed], ids=["plain", "wrapper", "keyed"])
def test_a_step_is_seen_wherever_its_optimizer_is(
    hold: Callable[[Any], Any], wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
) -> None:
    optimizer, other = wrap(sgd()), sgd()
    watch = StepWatch(hold(optimizer))
    optimizer.step()
    assert watch.is_changed is True
    watch.step_ended()
    assert watch.is_changed is False
    other.step()
    assert watch.is_changed is False
    optimizer.step()
    assert watch.is_changed is True


def test_an_optimizer_whose_steps_nobody_sees_says_nothing() -> None:
    plain, fused = sgd(), Fused(sgd())
    watch = StepWatch({"plain": plain, "fused": fused})
    for _ in range(2):
        plain.step()
        fused.step()
        watch.step_ended()
    assert watch.is_changed is None
    plain.step()
    assert watch.is_changed is True
    assert StepWatch({"x": torch.ones(1)}).is_changed is None


def rows_trained_in_backward() -> tuple[Any, Mapping[str, Any], Callable[[], torch.Tensor]]:
    """A TBE with a fused optimizer: what of the state is dense, its tables, and a forward."""
    tbe = FakeTbe([Spec(4, 2)])
    return {}, tables_of(tbe), lambda: tbe(torch.tensor([1, 2]), torch.tensor([0, 2]))


def optimizer_in_backward() -> tuple[Any, Mapping[str, Any], Callable[[], torch.Tensor]]:
    """As by torch's _apply_optimizer_in_backward: a step with each gradient, of an optimizer that nobody saves."""
    embedding = torch.nn.Embedding(4, 2)
    hidden = torch.optim.SGD([embedding.weight], lr=1.0)
    embedding.weight.register_post_accumulate_grad_hook(lambda _: hidden.step())
    return {"model": embedding}, {}, lambda: embedding(torch.tensor([1, 2])).sum()


def optimizer_in_backward_of_tables() -> tuple[Any, Mapping[str, Any], Callable[[], torch.Tensor]]:
    """The same beside tables of another library, where the state has the dense state of a module."""
    dense, tables, forward = optimizer_in_backward()
    return {"model": dense_state_of(torch.nn.Sequential(dense["model"], torch.nn.Linear(2, 1)))}, tables, forward


def rows_of_a_sparse_optimizer() -> tuple[Any, Mapping[str, Any], Callable[[], torch.Tensor]]:
    """The rows of a table by an optimizer that is not in the state, here in the backward as well."""
    bag = asyncckpt.nn.HashEmbeddingBag(asyncckpt.HashTable("t", 2))
    rows = asyncckpt.optim.SparseSGD(bag, lr=1.0)

    def forward() -> torch.Tensor:
        x = torch.ones((), requires_grad=True)
        x.register_hook(lambda _: rows.step())
        return bag(torch.tensor([[1, 2]])).sum() * x

    return {}, {"t": bag.table}, forward


@pytest.mark.parametrize(
    "trained",
    [
        rows_trained_in_backward,
        optimizer_in_backward,
        optimizer_in_backward_of_tables,
        rows_of_a_sparse_optimizer,
    ],
    ids=lambda function: function.__name__,
)
def test_what_is_trained_without_an_optimizer_of_the_state_is_seen(
    trained: Callable[[], tuple[Any, Mapping[str, Any], Callable[[], torch.Tensor]]],
) -> None:
    """A step was whole for the dense optimizer beside it, which had not begun its own."""
    state, tables, forward = trained()
    dense = sgd()
    watch = StepWatch({**state, "dense": dense}, tables)
    for _ in range(2):
        assert watch.is_changed is False
        with torch.no_grad():
            forward()
        loss = forward()
        assert watch.is_changed is False
        loss.backward()
        assert watch.is_changed is True
        dense.step()
        watch.step_ended()


def test_what_others_train_changes_nothing() -> None:
    watches = []
    for trained in (rows_trained_in_backward, optimizer_in_backward, rows_of_a_sparse_optimizer):
        state, tables, _ = trained()
        watches.append(StepWatch({**state, "dense": sgd()}, tables))
    for trained in (rows_trained_in_backward, optimizer_in_backward, rows_of_a_sparse_optimizer):
        trained()[2]().backward()
    assert [watch.is_changed for watch in watches] == [False] * 3


def test_the_hooks_go_with_the_watch() -> None:
    tbe = FakeTbe([Spec(4, 2)])
    watch = StepWatch([sgd()], tables_of(tbe))
    assert len(tbe._forward_hooks) == 1
    loss = tbe(torch.tensor([1]), torch.tensor([0, 1]))
    del watch
    gc.collect()
    assert len(tbe._forward_hooks) == 0
    loss.backward()
