"""A trainer on simulated devices and the host, and beside it what his tensors must hold.

Every change is queued on a stream, and done at once to a twin of the tensor on the host. So the twins at the call of a
save are the cut, whatever order the devices run in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import asyncckpt
from tests.simulated_device import SimulatedRuntime

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float64)
LARGE_ELEMENTS = 80_000
Stream = Any
View = Callable[[torch.Tensor], torch.Tensor]

# How a leaf of the state is seen in its memory, a matrix.
VIEWS: dict[str, View] = {
    "plain": lambda base: base,
    "transposed": lambda base: base.t(),
    "sliced": lambda base: base[:, 1:],
    "conjugated": lambda base: base.t().conj(),
    "plain conjugated": lambda base: base.conj(),
    "negated": lambda base: base.conj().imag,
    "one number": lambda base: base[0, 0],
    "rows": lambda base: base[1:],
}


@dataclass
class Leaf:
    """One tensor. stream: on which it is changed, None for one of the host."""

    device: int | None
    stream: Stream
    view: View
    live: torch.Tensor
    twin: torch.Tensor


@dataclass
class DeviceTrainer:
    """The state and its twins. `state` is what a Saver gets.

    main: the current stream of every device. known: streams that the Saver is told of. strange: streams that it is not.
    """

    runtime: SimulatedRuntime
    random: random.Random
    leaves: dict[str, Leaf] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    main: list[Stream] = field(default_factory=list)
    known: list[Stream] = field(default_factory=list)
    strange: list[Stream] = field(default_factory=list)
    number: int = 0

    @staticmethod
    def new(runtime: SimulatedRuntime, seed: int, *, leaves_count: int = 12) -> DeviceTrainer:
        """A trainer with random tensors on random devices."""
        trainer = DeviceTrainer(runtime, random.Random(seed))
        for device in range(runtime.devices_count):
            own = trainer.random.random() < 0.5
            trainer.main.append(runtime.new_stream(device, "main") if own else runtime.current_stream(device))
            trainer.known.append(runtime.new_stream(device, "known"))
            trainer.strange.append(runtime.new_stream(device, "strange"))
        for number in range(leaves_count):
            trainer.add(f"leaf{number}")
        return trainer

    @contextmanager
    def training(self) -> Iterator[None]:
        """With the main streams current."""
        with self.runtime.on_all(self.main):
            yield

    def add(self, name: str) -> None:
        """A random tensor under a name, instead of one that was there."""
        device = self.random.randrange(-1, self.runtime.devices_count)
        kind = self.random.choice(list(VIEWS))
        dtype = torch.complex64 if kind.endswith("conjugated") or kind == "negated" else self.random.choice(DTYPES)
        shape = self.random.choice([(1, 2), (3, 5), (2, 17), (40, 7), (13, 130)])
        if self.random.random() < 0.08:
            shape = (4, LARGE_ELEMENTS // 4)
        if kind == "plain" and self.random.random() < 0.1:
            shape = (0, 3)
        self._put(name, None if device < 0 else device, dtype, shape, VIEWS[kind])

    def replace(self, name: str) -> None:
        """Drop a tensor, and put a new one like it there, which may well get its memory."""
        leaf = self.leaves.pop(name)
        del self.state[name]
        shape, dtype, view, device, stream = leaf.live.shape, leaf.live.dtype, leaf.view, leaf.device, leaf.stream
        del leaf
        self._put(name, device, dtype, tuple(shape), view, stream=stream)

    def change(self, name: str) -> None:
        """Queue a change of a tensor, on its stream."""
        leaf = self.leaves[name]
        self.number += 1
        value = self.number % 251
        rows = slice(self.random.randrange(2), None) if self.random.random() < 0.5 else slice(None)
        for tensor, context in ((leaf.live, self._on(leaf.stream)), (leaf.twin, done_at_once())):
            with context:
                tensor[rows].fill_(value % 2 if tensor.dtype == torch.bool else value)
                if tensor.dtype.is_complex:
                    tensor.mul_(1 + 2j)

    def change_all(self, *, strange: bool = True) -> None:
        """Change every tensor. strange: also those that are changed on streams that the Saver is not told of."""
        for name, leaf in self.leaves.items():
            if strange or leaf.stream not in self.strange:
                self.change(name)

    def join_strange(self) -> None:
        """Let the main streams come behind the strange ones, which a save does not follow by itself."""
        for stream in self.strange:
            self.runtime.hold_back(self.main[stream.device], self.runtime.record(stream))

    def fence_strange(self, future: asyncckpt.SaveFuture) -> None:
        """Let the strange streams come behind what a save has to copy."""
        for stream in self.strange:
            future.fence(stream)

    def cut(self) -> dict[str, torch.Tensor]:
        """What a save that is called now must hold."""
        with done_at_once():
            return {name: plain(leaf.view(leaf.twin)) for name, leaf in self.leaves.items()}

    def targets(self) -> dict[str, torch.Tensor]:
        """What a checkpoint is loaded into, on the host."""
        return {name: torch.zeros_like(values) for name, values in self.cut().items()}

    def _put(
        self,
        name: str,
        device: int | None,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        view: View,
        *,
        stream: Stream = None,
    ) -> None:
        self.number += 1
        with done_at_once():
            values = (torch.arange(torch.Size(shape).numel()) * 7 + self.number) % 100
            twin = values.to(dtype).reshape(shape)
        if device is None:
            leaf = Leaf(None, None, view, twin.clone(), twin)
        else:
            choices = (self.main[device], self.main[device], self.known[device], self.strange[device])
            stream = stream or self.random.choice(choices)
            with self._on(stream):
                live = self.runtime.new_tensor(shape, dtype, device, values=twin)
            leaf = Leaf(device, stream, view, live, twin)
        self.leaves[name] = leaf
        self.state[name] = view(leaf.live)

    def _on(self, stream: Stream) -> Any:
        return nullcontext() if stream is None else self.runtime.on(stream)


def done_at_once() -> Any:
    """For operations on tensors of the host alone: they need not be looked at."""
    return _disable_current_modes()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the values in memory of their own."""
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def loaded(path: Path, step: int, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a step holds, in targets like what is expected."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    asyncckpt.Loader(path, tensors=targets, step=step).load()
    return targets


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not the same, bit by bit."""
    assert found.keys() == expected.keys()
    return [name for name in expected if not _are_same(found[name], expected[name])]


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor).reshape(-1).view(torch.uint8)
