"""Optimizers that a save was not told of, or that have changed since, wait for it where they reach into its memory.

Their steps are fused: torch counts no writes of these, so nothing else would have seen them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

import asyncckpt
from asyncckpt.devices.host_copies import Pending
from asyncckpt.devices.step_copies import StepCopies
from asyncckpt.engine.features.steps import StepFences
from tests.steps.gate import StepGate

pytestmark = pytest.mark.any_core


class Neighbours:
    """Two parameters, which lie in one memory, with an optimizer each."""

    def __init__(self) -> None:
        self.memory = torch.arange(3000.0)
        self.first, self.second = (torch.nn.Parameter(torch.empty(0)) for _ in range(2))
        self.first.data, self.second.data = self.memory[500:1500], self.memory[1500:2500]
        self.optimizers = [torch.optim.SGD([one], lr=1.0, fused=True) for one in (self.first, self.second)]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def of_pieces(world: Neighbours) -> None:
    pieces = [torch.nn.Parameter(world.memory[begin : begin + 90]) for begin in (700, 1600, 1900)]
    world.step(torch.optim.SGD(pieces, lr=1.0, fused=True))


def of_all_memory(world: Neighbours) -> None:
    world.step(torch.optim.SGD([torch.nn.Parameter(world.memory)], lr=1.0, fused=True))


def of_memory_that_was_exchanged(world: Neighbours) -> None:
    world.first.data, world.second.data = world.second.data, world.first.data
    world.step(world.optimizers[1])


def of_a_parameter_that_was_another_ones(world: Neighbours) -> None:
    """The background stands before a chunk of the other one, whose part is the first."""
    world.optimizers[1].add_param_group({"params": [world.first]})
    world.step(world.optimizers[1])


@pytest.mark.parametrize(
    "act", [of_pieces, of_all_memory, of_memory_that_was_exchanged, of_a_parameter_that_was_another_ones]
)
def test_a_step_waits_for_the_memory_that_it_changes(
    tmp_path: Path, gate: StepGate, act: Callable[[Neighbours], None]
) -> None:
    world = Neighbours()
    state = {"first": world.first, "second": world.second}
    device = asyncckpt.DeviceOptions(optimizers=world.optimizers)
    with asyncckpt.Saver(path=tmp_path, tensors=state, device=device) as saver:
        saver.save(0)
        before = {name: value.detach().clone() for name, value in state.items()}
        gate.shut()
        future = saver.save_async(1)
        gate.await_copier()
        opened = threading.Timer(0.2, gate.open)
        opened.start()
        act(world)
        gate.open()
        future.result(30)
        opened.join()
    assert not all(torch.equal(state[name].detach(), value) for name, value in before.items())
    found = asyncckpt.load(tmp_path, step=1)
    assert [name for name, value in before.items() if not torch.equal(found[name].detach(), value)] == []


class _Steps:
    """Copies for which a step has to wait, that do something when they are asked whether they are such."""

    def __init__(self, when_asked: Callable[[], object]) -> None:
        self._when_asked = when_asked

    def begin(self) -> None:
        """There are no tables."""

    @property
    def is_open(self) -> bool:
        self._when_asked()
        return True


class _Saved(Pending):
    def __init__(self, when_asked: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.steps = cast(StepCopies, _Steps(when_asked))


def test_a_save_is_waited_for_that_begins_while_the_optimizer_of_another_thread_steps() -> None:
    """Of another training, with which the Saver has nothing to do."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    fences, later, threads = StepFences([optimizer]), _Saved(), list[threading.Thread]()
    is_stepping = False

    def save() -> None:
        if not threads:
            threads.append(threading.Thread(target=fences.expect, args=(later,)))
            threads[0].start()
            threads[0].join(0.1)  # It may have to wait until the step has looked.

    fences.expect(_Saved(lambda: is_stepping and save()))
    is_stepping = True
    fences._prune()  # As behind each step of the process.
    threads[0].join(30)
    pending, fences._pending = fences._pending, ()  # Other tests step, too.
    assert later in pending
