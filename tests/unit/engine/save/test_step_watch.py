"""What a StepWatch sees of the optimizers of a state, wherever they are and whatever wraps them."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from asyncckpt.engine.save.step_watch import StepWatch


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


def test_the_hook_goes_with_the_watch() -> None:
    before = len(_global_optimizer_pre_hooks)
    watch = StepWatch([sgd()])
    assert len(_global_optimizer_pre_hooks) == before + 1
    del watch
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before
