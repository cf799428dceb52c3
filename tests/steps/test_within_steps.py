"""Saves that are made within a step, and hooks of the whole process: the step writes without waiting for them then."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import asyncckpt
from asyncckpt.devices.stepped_memory import SteppedMemory, places_of
from asyncckpt.engine.features.step_hooks import is_stepping, listen
from tests.steps.gate import StepGate

pytestmark = pytest.mark.any_core


def _in_closure(optimizer: torch.optim.Optimizer, save: Callable[[], Any]) -> None:
    optimizer.step(lambda: save() and torch.tensor(0.0))  # type: ignore[arg-type]


def _in_own_hook(optimizer: torch.optim.Optimizer, save: Callable[[], Any]) -> None:
    handle = optimizer.register_step_pre_hook(lambda *_: save() and None)
    optimizer.step()
    handle.remove()


def _behind_a_step_within(optimizer: torch.optim.Optimizer, save: Callable[[], Any]) -> None:
    def closure() -> torch.Tensor:
        optimizer.step()
        save()
        return torch.tensor(0.0)

    optimizer.step(closure)  # type: ignore[arg-type]


def _behind_the_step_of_its_base(optimizer: Any, save: Callable[[], Any]) -> None:
    optimizer.between = save
    optimizer.step()


class _Longer(torch.optim.SGD):
    """One whose step goes on behind that of the class below, in which torch calls hooks, too."""

    between: Callable[[], Any] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.between()
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(3)
        return loss


@pytest.mark.parametrize("way", [_in_closure, _in_own_hook, _behind_a_step_within, _behind_the_step_of_its_base])
def test_a_save_within_a_fused_step_holds_what_was_there(tmp_path: Path, gate: StepGate, way: Any) -> None:
    """Fused kernels count no version, so nothing would have been seen."""
    weight = torch.nn.Parameter(torch.arange(3000.0))
    torch.optim.SGD([weight])  # torch hooks into the step of a class when one of it is made.
    optimizer = _Longer([weight], lr=1.0, fused=True)
    weight.grad = torch.ones_like(weight)
    device = asyncckpt.DeviceOptions(optimizers=[optimizer])
    with asyncckpt.Saver(path=tmp_path, tensors={"w": weight}, device=device) as saver:
        saver.save(0)
        saved: list[tuple[torch.Tensor, asyncckpt.SaveFuture]] = []
        with gate.held():
            way(optimizer, lambda: saved or saved.append((weight.detach().clone(), saver.save_async(1))) or True)
        before, future = saved[0]
        assert not torch.equal(weight.detach(), before)
        future.result(60)
    assert not is_stepping()
    assert torch.equal(asyncckpt.load(tmp_path, step=1)["w"].detach(), before)


FIRST_IN_A_STEP = """
import pathlib, sys, threading, torch, asyncckpt
from asyncckpt.devices.step_copies import Chunk
from asyncckpt.engine.features.step_hooks import is_stepping

path, how = pathlib.Path(sys.argv[1]), sys.argv[2]
weight = torch.nn.Parameter(torch.zeros(64, 256))
weight.grad = torch.ones_like(weight)
torch.optim.SGD([weight])  # torch hooks into the step of a class when one of it is made.
may_copy, made, futures = threading.Event(), [], []
copy = Chunk.copy
Chunk.copy = lambda self, *, threads: may_copy.wait(30) and copy(self, threads=threads)


def make(*_):
    device = asyncckpt.DeviceOptions(optimizers=[optimizer])
    made.append(asyncckpt.Saver(path=path, tensors={"w": weight}, device=device))
    if how != "base":
        futures.append(made[0].save_async(0))
    return None if how == "hook" else torch.tensor(0.0)


class Longer(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if how == "base":
            futures.append(made[0].save_async(0))
            self.param_groups[0]["params"][0].data.add_(1)


optimizer = (Longer if how == "base" else torch.optim.SGD)([weight], lr=1.0, fused=True)
if how == "hook":
    optimizer.register_step_pre_hook(make)
optimizer.step(*([] if how == "hook" else [make]))
may_copy.set()
futures[0].result(60)
made[0].close()
assert not is_stepping()
assert (asyncckpt.load(path)["w"] == (-1 if how == "base" else 0)).all()
"""


@pytest.mark.parametrize("how", ["closure", "hook", "base"])
def test_the_first_saver_of_a_process_may_be_made_in_a_step(tmp_path: Path, how: str) -> None:
    # Hooks stay in a process.
    subprocess.run([sys.executable, "-c", FIRST_IN_A_STEP, str(tmp_path), how], check=True, timeout=60)


def test_an_optimizer_with_a_state_of_its_own_form_may_step(tmp_path: Path, gate: StepGate) -> None:
    weight, other = torch.nn.Parameter(torch.ones(300)), torch.nn.Parameter(torch.ones(3))
    optimizer, odd = torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([other], lr=1.0)
    odd.state[other] = torch.ones(3)
    other.grad = torch.ones(3)
    device = asyncckpt.DeviceOptions(optimizers=[optimizer])
    with asyncckpt.Saver(path=tmp_path, tensors={"w": weight}, device=device) as saver:
        with gate.held():
            future = saver.save_async(1)
            odd.step()
        future.result(60)
    memory = SteppedMemory([odd])
    assert memory.find(*places_of([odd.state[other]])[:2]).min() >= 0
    assert len(memory.tensors) == 2


def test_savers_come_and_go_within_hooks(tmp_path: Path) -> None:
    """torch raises where a hook is removed or added while it goes through them."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(3)
    device = asyncckpt.DeviceOptions(optimizers=[optimizer])
    made = [asyncckpt.Saver(path=tmp_path / "0", tensors={"w": weight}, device=device)]

    def replace(*_: Any) -> None:
        made.append(asyncckpt.Saver(path=tmp_path / f"{len(made)}", tensors={"w": weight}, device=device))
        made[-2].close()
        made[-2] = made[-1]
        gc.collect()

    handle = register_optimizer_step_pre_hook(replace)
    last = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        optimizer.step()
        optimizer.step()
    finally:
        handle.remove()
        last.remove()
        made[-1].close()


class _Listener:
    def __init__(self) -> None:
        self.steps = 0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1


def test_a_listener_hears_of_steps_as_long_as_it_is_held() -> None:
    listener, weight = _Listener(), torch.nn.Parameter(torch.ones(3))
    listen(listener)
    weight.grad = torch.ones(3)
    torch.optim.SGD([weight], lr=1.0).step()
    assert listener.steps == 1


@pytest.mark.parametrize("is_within", [False, True])
def test_a_step_that_raised_counts_until_the_next_one(is_within: bool) -> None:
    listener, weight = _Listener(), torch.nn.Parameter(torch.ones(3))
    listen(listener)
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)

    if is_within:
        optimizer.step(lambda: fail() or 0.0)
    else:
        fail()
    assert is_stepping()
    optimizer.step()
    assert not is_stepping()
