"""Random trainings that change their state before, in and behind steps: a save holds its cut, or is refused by name.

Every seed is another program, on the host or on a simulated device. The last tests take the wait away, and find it
missing in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.devices.step_copies import StepCopies
from asyncckpt.devices.watches import Watch
from asyncckpt.engine.features.steps import StepFences
from tests.devices.training import differing, loaded
from tests.shares import slow_but_for_a_share
from tests.simulated_device import SimulatedRuntime
from tests.steps import gate as gates
from tests.steps.held_program import HeldProgram, OpenSave, is_wrong
from tests.worlds.gates import nothing

pytestmark = pytest.mark.any_core

SEEDS_COUNT = 40
PARAMETERS_COUNT = 4

Tensors = dict[str, torch.Tensor]


class OptimizersProgram(HeldProgram):
    """One training of four parameters by two optimizers."""

    actions_count, saves_max = 14, 3

    def __init__(self, seed: int, path: Path, runtime: SimulatedRuntime | None, gate: gates.StepGate) -> None:
        super().__init__(seed, path, gate)
        self.runtime = runtime
        self.state: Tensors = {}
        self.parameters = [torch.nn.Parameter(self._new(self.random.choice([1, 40, 700]))) for _ in range(4)]
        self.buffer = self._new(20)
        self.optimizers = [
            torch.optim.SGD(self.parameters[:2], lr=0.5, momentum=0.9, foreach=False),
            torch.optim.SGD(self.parameters[2:], lr=0.25, momentum=0.5, foreach=False),
        ]
        for part in (0, 1):
            self.step(part)
        self.state = {f"parameter{number}": item for number, item in enumerate(self.parameters)} | {
            f"momentum{number}": self.optimizers[number // 2].state[item]["momentum_buffer"]
            for number, item in enumerate(self.parameters)
        }
        self.state["buffer"] = self.buffer

    def _new(self, count: int) -> torch.Tensor:
        values = torch.arange(float(count)) + self.random.randrange(100)
        return values if self.runtime is None else self.runtime.new_tensor((count,), torch.float32, values=values)

    def values(self) -> Tensors:
        if self.runtime is None:
            return {name: tensor.detach().clone() for name, tensor in self.state.items()}
        return {name: self.runtime.read(tensor.detach()) for name, tensor in self.state.items()}

    def actions(self, saver: asyncckpt.Saver) -> list[Callable[[], None]]:
        actions: list[Callable[[], None]] = [self.forward, self.forward, self.train, self.train, self.train]
        actions += [lambda: self.save(saver), self.hold, self.gate.open, self.wait_staged, self.change_otherwise]
        return actions

    def forward(self) -> None:
        self.buffer.add_(1)

    def train(self) -> None:
        part = self.random.randrange(2)
        if self.random.random() < 0.1:
            self.optimizers[part].zero_grad()
        else:
            self.step(part)

    def step(self, part: int) -> None:
        own = self.parameters[2 * part : 2 * part + 2]
        for parameter in own:
            parameter.grad = torch.ones_like(parameter)
        self.gate.open()  # Else the step would wait for the chunk of the background.
        self.optimizers[part].step()
        for save in self.saves.values():
            save.open_parts.discard(part)

    def begin(self, saver: asyncckpt.Saver) -> OpenSave:
        return OpenSave(saver.save_async(self.number), self.values(), {0, 1})

    def change_otherwise(self) -> None:
        if self.random.random() < 0.6:
            return
        number = self.random.randrange(PARAMETERS_COUNT)
        name = f"{self.random.choice(['parameter', 'momentum'])}{number}"
        self.state[name].detach().mul_(3)
        for save in self.saves.values():
            if number // 2 in save.open_parts:
                save.changed.add(repr(name))

    def wrong_in(self, step: int, values: Tensors) -> list[str]:
        return differing(loaded(self.path, step, values), values)


def wrong(seed: int, path: Path, gate: gates.StepGate) -> list[str]:
    runtime = SimulatedRuntime(1, seed=seed) if seed % 3 == 2 else None
    with nullcontext() if runtime is None else runtime.installed():
        program = OptimizersProgram(seed, path, runtime, gate)
        device = asyncckpt.DeviceOptions(optimizers=program.optimizers, scratch_bytes=[0, 500, 5000][seed % 7 % 3])
        return program.wrong(
            asyncckpt.Saver(path=path, tensors=program.state, device=device, on_busy="queue", durability="none")
        )


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[gates.StepGate]:
    made = gates.install(monkeypatch, chunk_bytes=700)
    yield made
    made.open()


def bytes_min_of(seed: int) -> int:
    """From which size on steps wait for a tensor: all, or those that are long."""
    return (1, 1, 100)[seed % 5 % 3]


@pytest.mark.parametrize("seed", slow_but_for_a_share(range(SEEDS_COUNT), "programs of steps", every=6))
def test_a_save_holds_its_cut_or_is_refused(
    seed: int, tmp_path: Path, gate: gates.StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates.watch_short(monkeypatch, bytes_min=bytes_min_of(seed))
    assert wrong(seed, tmp_path, gate) == []


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_saves_of_many_programs(
    hundred: int, tmp_path: Path, gate: gates.StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        gates.watch_short(monkeypatch, bytes_min=bytes_min_of(seed))
        assert wrong(seed, tmp_path / str(seed), gate) == [], seed


def step_while_held(path: Path, gate: gates.StepGate) -> list[str]:
    """Step before the background has copied anything; returns what the checkpoint holds of behind the call."""
    program = OptimizersProgram(1, path, None, gate)
    with asyncckpt.Saver(
        path=path, tensors=program.state, device=asyncckpt.DeviceOptions(optimizers=program.optimizers)
    ) as saver:
        with gate.held():
            program.save(saver)
            gate.await_copier()
            for optimizer in program.optimizers:
                optimizer.step()
        return program.check()


@pytest.mark.parametrize("round", range(10))
def test_a_step_that_does_not_wait_is_refused(
    round: int, tmp_path: Path, gate: gates.StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepFences, "before_step", nothing)
    assert "was changed between save_async" in step_while_held(tmp_path, gate)[0]


@pytest.mark.parametrize("round", range(10))
def test_a_step_that_does_not_wait_tears_what_is_not_compared(
    round: int, tmp_path: Path, gate: gates.StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepFences, "before_step", nothing)
    monkeypatch.setattr(Watch, "check_unchanged", nothing)
    assert step_while_held(tmp_path, gate) != []


def test_a_step_that_does_not_wait_for_the_background_tears_what_that_has_begun(
    tmp_path: Path, gate: gates.StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCopies, "_wait_copied", lambda *_, **__: True)
    assert step_while_held(tmp_path, gate) != []


@pytest.mark.parametrize(
    ("owner", "name"),
    [(StepFences, "before_step"), (Watch, "check_unchanged")],
    ids=["steps do not wait", "versions are not compared"],
)
def test_what_is_left_out_is_found(
    owner: type, name: str, tmp_path: Path, gate: gates.StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda *_, **__: True)
    assert any(is_wrong(wrong, seed, tmp_path / str(seed), gate) for seed in range(60))
