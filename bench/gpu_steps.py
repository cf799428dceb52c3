"""Saves whose copies hide behind forward and backward (`optimizers=`), and the host's part of a call, on a device.

The trainer's forward takes longer than the copies to the host; its parameters are changed by `optimizer.step()` alone.
Beside the time lost: what the stream waits at the save, and what the next step takes longer than a usual one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import asyncckpt
from bench.gpu_device import BenchDevice
from bench.gpu_saves import WAIT_S, SaveCase, drop, make_state
from bench.host_part import COUNTS, PARAMETERS, state_of, times_of

WARM_STEPS, STEPS_BEFORE, STEPS_AFTER = 4, 1, 3
REPEATS = 3


@dataclass(frozen=True)
class StepFigures:
    """One save. All in seconds; step: what the next step takes longer than without a save."""

    round_index: int
    bytes: int
    host_seconds: float
    fence_seconds: float
    step_seconds: float
    lost_seconds: float


@dataclass(frozen=True)
class HostFigures:
    """The medians of some calls for a state that has not changed, in seconds."""

    state: str
    count: int
    round_index: int
    seconds: float
    processor_seconds: float


class Trainer:
    """Matrix products, then a step of an optimizer over all parameters."""

    def __init__(self, device: BenchDevice, case: SaveCase, *, size: int, products: int) -> None:
        self._device = device
        dtype = torch.bfloat16 if device.is_cuda else torch.float32
        self._a, self._b = (torch.ones(size, size, dtype=dtype, device=device.name) for _ in range(2))
        self._c, self._products = torch.empty_like(self._a), products
        self.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in make_state(device, case).items()}
        for parameter in self.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=1e-3)

    def run(self, save: Callable[[], object]) -> tuple[float, float, float, float]:
        """Seconds of (the whole loop, the stream at the save, the step behind it, the host in the call)."""
        self._device.synchronize()
        for _ in range(WARM_STEPS):
            self._forward()
            self.optimizer.step()
        marks = [self._device.mark()]
        for _ in range(STEPS_BEFORE):
            self._forward()
            self.optimizer.step()
        marks.append(self._device.mark())
        called = time.perf_counter()
        save()
        host = time.perf_counter() - called
        marks.append(self._device.mark())
        self._forward()
        marks.append(self._device.mark())
        self.optimizer.step()
        marks.append(self._device.mark())
        for _ in range(STEPS_AFTER):
            self._forward()
            self.optimizer.step()
        end = self._device.mark()
        whole = self._device.seconds(marks[0], end)
        return whole, self._device.seconds(marks[1], marks[2]), self._device.seconds(marks[3], marks[4]), host

    def _forward(self) -> None:
        for _ in range(self._products):
            torch.mm(self._a, self._b, out=self._c)


def measure_steps(
    device: BenchDevice, case: SaveCase, folder: Path, *, rounds: int, smoke: bool = False
) -> list[StepFigures]:
    """A loop without a save, one with it, and one without, some times in each round."""
    trainer = Trainer(device, case, size=64 if smoke else 8192, products=1 if smoke else 24)
    options = asyncckpt.DeviceOptions(optimizers=[trainer.optimizer])
    figures = []
    with asyncckpt.Saver(
        path=folder / "steps", tensors=trainer.parameters, device=options, filter_func=drop, keep=1
    ) as saver:
        saver.save_async().result(WAIT_S)
        for index in range(rounds * REPEATS):
            before, _, usual, _ = trainer.run(lambda: None)
            whole, fence, step, host = trainer.run(saver.save_async)
            saver.wait_idle(WAIT_S)
            behind, _, usual_behind, _ = trainer.run(lambda: None)
            step -= (usual + usual_behind) / 2
            figures.append(StepFigures(index, case.bytes, host, fence, step, whole - (before + behind) / 2))
    return figures


def measure_host(device: BenchDevice, folder: Path, *, rounds: int, smoke: bool = False) -> list[HostFigures]:
    """As `bench host-part`, with tensors of the device."""
    counts, parameters = ((1, 50), 20) if smoke else (COUNTS, PARAMETERS)
    states: list[tuple[str, int | None]] = [(f"{count:,} tensors", count) for count in counts]
    states.append((f"module of {parameters:,} parameters, AdamW", None))
    figures = []
    for index in range(rounds):
        for place, (shown, count) in enumerate(states):
            with state_of(count, parameters, device.name) as state:
                figures.append(
                    HostFigures(shown, count or parameters, index, **times_of(state, folder / f"host{index}-{place}"))
                )
    return figures
