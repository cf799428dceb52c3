"""What a save costs a training loop on a device: the host's time in the call, and the device's time.

The loop is matrix products and updates of the state, queued far ahead of the device. Of one save
    host      how long the call blocks the training thread
    fence     from just before the save to just behind it on the trainer's stream: what the stream waits there
    lost      the loop's time with the save less that without, so also what copies beside training cost it

Steps before the measured ones warm the device up, without a pause: a cool one is faster by more than a save costs. The
loop without a save is run before and behind, and their mean counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

import asyncckpt
from bench.gpu_device import BenchDevice

UPDATED_COUNT = 8  # Tensors of the state that every step changes.
WAIT_S = 300


@dataclass(frozen=True)
class SaveCase:
    """A state of `count` tensors of float32."""

    name: str
    count: int
    tensor_bytes: int

    @property
    def bytes(self) -> int:
        return self.count * self.tensor_bytes


@dataclass(frozen=True)
class LoopFigures:
    """One save in the loop. All in seconds."""

    case: str
    way: str
    round_index: int
    bytes: int
    host_seconds: float
    fence_seconds: float
    lost_seconds: float
    done_seconds: float


class Saves(Protocol):
    """A way to save a state, again and again."""

    def save(self) -> None:
        """The call that the training thread makes; afterwards the state may be changed."""
        ...

    def finish(self) -> None:
        """Wait until the save has ended."""
        ...

    def close(self) -> None: ...


class TrainingLoop:
    """Steps on the current stream of a device."""

    def __init__(self, device: BenchDevice, *, size: int, products: int, steps_before: int, steps_after: int) -> None:
        self._device = device
        dtype = torch.bfloat16 if device.is_cuda else torch.float32
        # Of ones: random values let a device lower its clocks, by more than what is measured here.
        self._a, self._b = (torch.ones(size, size, dtype=dtype, device=device.name) for _ in range(2))
        self._c = torch.empty_like(self._a)
        self._products = products
        self._steps = (steps_before, steps_after)

    def run(self, state: Sequence[torch.Tensor], save: Callable[[], None]) -> tuple[float, float, float]:
        """(seconds of the whole loop, seconds at the fence, seconds of the host in `save`)."""
        self._device.synchronize()
        for _ in range(sum(self._steps) // 2):
            self._step(state)
        begin = self._device.mark()
        for _ in range(self._steps[0]):
            self._step(state)
        before = self._device.mark()
        called = time.perf_counter()
        save()
        host = time.perf_counter() - called
        behind = self._device.mark()
        for _ in range(self._steps[1]):
            self._step(state)
        whole = self._device.seconds(begin, self._device.mark())
        return whole, self._device.seconds(before, behind), host

    def _step(self, state: Sequence[torch.Tensor]) -> None:
        for _ in range(self._products):
            torch.mm(self._a, self._b, out=self._c)
        for tensor in state[:UPDATED_COUNT]:
            tensor.add_(1)


def make_state(device: BenchDevice, case: SaveCase) -> dict[str, torch.Tensor]:
    elements = case.tensor_bytes // 4
    return {
        f"t{number}": torch.full((elements,), float(number % 97), device=device.name) for number in range(case.count)
    }


def measure(
    device: BenchDevice,
    loop: TrainingLoop,
    case: SaveCase,
    state: dict[str, torch.Tensor],
    way: str,
    saves: Saves,
    *,
    round_index: int,
) -> LoopFigures:
    """A loop without a save, one with it, and one without."""
    tensors = list(state.values())
    before = loop.run(tensors, _nothing)[0]
    begun = time.perf_counter()
    whole, fence, host = loop.run(tensors, saves.save)
    saves.finish()
    done = time.perf_counter() - begun
    without = (before + loop.run(tensors, _nothing)[0]) / 2
    return LoopFigures(
        case=case.name,
        way=way,
        round_index=round_index,
        bytes=case.bytes,
        host_seconds=host,
        fence_seconds=fence,
        lost_seconds=whole - without,
        done_seconds=done,
    )


def _nothing() -> None:
    """Save nothing."""


class OurSaves:
    """A Saver. is_written: else a filter drops all blocks behind the copies, and no disk is measured."""

    def __init__(self, state: dict[str, torch.Tensor], path: Path, *, scratch_bytes: int, is_written: bool) -> None:
        self._saver = asyncckpt.Saver(
            path=path,
            tensors=state,
            device=asyncckpt.DeviceOptions(scratch_bytes=scratch_bytes),
            filter_func=keep if is_written else drop,
            keep=1,
        )
        self._saver.prepare()
        self._future: asyncckpt.SaveFuture | None = None

    def save(self) -> None:
        self._future = self._saver.save_async()

    def finish(self) -> None:
        assert self._future is not None
        self._future.result(WAIT_S)

    def close(self) -> None:
        self._saver.close()


def keep(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
    return blocks


def drop(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
    return []
