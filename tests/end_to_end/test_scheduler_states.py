"""States of schedulers and scalers: those of other ones are refused, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

import asyncckpt
from asyncckpt.errors import IncompatibleError


def optimizer(groups: int = 1) -> torch.optim.Optimizer:
    return SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(groups)], lr=0.1)


def grown() -> torch.optim.Optimizer:
    """An optimizer that got a group after its scheduler, which is the only one of it."""
    found = optimizer()
    found.schedule = lr_scheduler.StepLR(found, 1)
    found.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    return found


class OwnState(lr_scheduler.LRScheduler):
    """Has a list for its state."""

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> Any:
        return [self.last_epoch]

    def load_state_dict(self, state_dict: Any) -> None:
        (self.last_epoch,) = state_dict


class OwnScaler(torch.amp.GradScaler):
    def state_dict(self) -> Any:
        return {"mine": super().state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["mine"])


class First(lr_scheduler.LRScheduler):
    get_lr = OwnState.get_lr


class Second(lr_scheduler.LRScheduler):
    """The same after a change of the program."""

    get_lr = OwnState.get_lr

    def __init__(self, *arguments: Any) -> None:
        self.steepness = 1.0
        super().__init__(*arguments)


@pytest.mark.parametrize(("was", "now"), [
    (lambda: OwnState(optimizer()), lambda: OwnState(optimizer())),
    (lambda: OwnScaler("cpu"), lambda: OwnScaler("cpu")),
    (lambda: First(optimizer()), lambda: Second(optimizer())),
    (lambda: Second(optimizer()), lambda: First(optimizer())),
    (lambda: grown().schedule, lambda: lr_scheduler.StepLR(optimizer(2), 1)),
    (lambda: lr_scheduler.StepLR(optimizer(2), 1), lambda: grown().schedule),
], ids=["own state", "own scaler", "attribute more", "attribute less", "group later", "group earlier"])  # fmt: skip
def test_what_torch_would_load_is_loaded(tmp_path: Path, was: Callable[[], Any], now: Callable[[], Any]) -> None:
    saved, loaded = was(), now()
    if isinstance(saved, lr_scheduler.LRScheduler):
        saved.last_epoch = 7
    asyncckpt.save(tmp_path, {"it": saved}, durability="none")
    asyncckpt.Loader(tmp_path, tensors={"it": loaded}).load()
    assert getattr(loaded, "last_epoch", 7) == 7


@pytest.mark.parametrize("schedule", [
    lambda it: lr_scheduler.OneCycleLR(it, 1.0, 10),
    lambda it: lr_scheduler.CyclicLR(it, 0.1, 1.0, cycle_momentum=False),
    lambda it: torch.optim.swa_utils.SWALR(it, 0.1),
], ids=["one cycle", "cyclic", "averaged"])  # fmt: skip
def test_options_that_a_scheduler_puts_into_groups_are_none_of_the_optimizer(
    tmp_path: Path, schedule: Callable[[Any], Any]
) -> None:
    """Of an optimizer whose class is another one now, and has an option more."""
    was, option = SGD([nn.Parameter(torch.ones(1))], momentum=0.9, lr=0.1), "new_option"
    schedule(was)
    was.__class__ = type("NoneOfTorch", (torch.optim.Optimizer,), {})
    asyncckpt.save(tmp_path, {"it": was}, durability="none")
    now = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    now.defaults[option] = now.param_groups[0][option] = 1
    now.__class__ = type("Another", (torch.optim.Optimizer,), {})
    asyncckpt.Loader(tmp_path, tensors={"it": now}).load()
    assert "initial_lr" in now.param_groups[0] or "swa_lr" in now.param_groups[0]


@pytest.mark.parametrize(("was", "now", "why"), [
    (
        lambda it: lr_scheduler.LambdaLR(it, [lambda _: 1.0]),
        lambda: lr_scheduler.LambdaLR(optimizer(2), [lambda _: 1.0] * 2),
        "has 2 of 'lr_lambdas', the checkpoint 1",
    ),
    (
        lambda it: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(it, 1)]),
        lambda: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(it := optimizer(), 1), lr_scheduler.StepLR(it, 2)]),
        "has 2 of '_schedulers', the checkpoint 1",
    ),
    (
        lambda it: lr_scheduler.StepLR(it, 1),
        lambda: lr_scheduler.ExponentialLR(optimizer(), 0.9),
        "is of class 'ExponentialLR'",
    ),
    (
        lambda it: lr_scheduler.SequentialLR(it, [lr_scheduler.StepLR(it, 1), lr_scheduler.StepLR(it, 2)], [2]),
        lambda: lr_scheduler.SequentialLR(
            it := optimizer(), [lr_scheduler.StepLR(it, 1), lr_scheduler.CosineAnnealingLR(it, 2)], [2]
        ),
        "holds one that is of class 'CosineAnnealingLR', the checkpoint has the state of another class",
    ),
], ids=["lambdas", "schedulers", "class", "class within"])  # fmt: skip
def test_what_objects_do_not_take_says_what_helps(
    tmp_path: Path, was: Callable[[Any], Any], now: Callable[[], Any], why: str
) -> None:
    asyncckpt.save(tmp_path, {"it": was(optimizer())}, durability="none")
    helps = r"make such an object as the one that was saved; strict=False .*, or leaves it as it is\)"
    with pytest.raises(IncompatibleError, match=rf"'it' {why}.*\({helps}"):
        asyncckpt.Loader(tmp_path, tensors={"it": now()}).load()
    left = now()
    before = repr(left.state_dict())
    with pytest.warns(RuntimeWarning, match=f"'it' {why}.*; it stays as it is"):
        report = asyncckpt.Loader(tmp_path, tensors={"it": left}, strict=False).load()
    assert (report.missing, repr(left.state_dict())) == (("it",), before)


def check_refused(path: Path, state: Any, now: Callable[[Any], Any], why: str) -> None:
    """Load the state of a scheduler into another one: before anything is touched, it is refused."""
    asyncckpt.save(path, {"x": torch.ones(2), "schedule": state}, durability="none")
    x = torch.zeros(2)
    with pytest.raises(IncompatibleError, match=f"'schedule' {why}"):
        asyncckpt.Loader(path, tensors={"x": x, "schedule": now(optimizer())}).load()
    assert not x.any()


@pytest.mark.parametrize(("now", "why"), [
    (lambda it: lr_scheduler.ExponentialLR(it, 0.9), "is of class 'ExponentialLR', .* state of 'StepLR'"),
    (lambda it: lr_scheduler.LambdaLR(it, lambda _: 1.0), "is of class 'LambdaLR', .* state of 'StepLR'"),
    (lambda it: torch.optim.swa_utils.SWALR(it, 0.1), "is of class 'SWALR', .* state of 'StepLR'"),
], ids=["exponential", "lambda", "averaged"])  # fmt: skip
def test_another_scheduler_is_refused_before_anything_is_touched(
    tmp_path: Path, now: Callable[[Any], Any], why: str
) -> None:
    check_refused(tmp_path, lr_scheduler.StepLR(optimizer(), 2), now, why)


def step(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 2)


def cyclic(optimizer: Any) -> Any:
    return lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, cycle_momentum=False)


@pytest.mark.parametrize(("was", "now", "key"), [
    (step, lambda it: lr_scheduler.LambdaLR(it, lambda _: 1.0), "lr_lambdas"),
    (step, lambda it: lr_scheduler.ChainedScheduler([step(it)]), "_schedulers"),
    (step, cyclic, "max_lrs"),
    (cyclic, lr_scheduler.ReduceLROnPlateau, "threshold_mode"),
], ids=["lambda", "chained", "cyclic", "plateau"])  # fmt: skip
def test_a_dict_of_another_scheduler_is_refused_before_anything_is_touched(
    tmp_path: Path, was: Callable[[Any], Any], now: Callable[[Any], Any], key: str
) -> None:
    """Nothing says of which class a dict is."""
    check_refused(tmp_path, was(optimizer()).state_dict(), now, f"(has|is of class .* differs in) .*'{key}'")
