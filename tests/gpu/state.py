"""A state on the device whose every bit at every step is known, so that a torn or late copy shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

import asyncckpt
from tests.gpu.device import DEVICE
from tests.worlds.bits import bits

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.int16)
LARGE_FLOATS = 3 << 20  # 12 MiB: long enough on its way to the host for a change to overtake it.
MIDDLING_FLOATS = 100_000  # More than what goes in batches (devices/contract.py).


class CountingState:
    """Tensors that all count steps: `advance` adds one to each, on the current stream."""

    def __init__(self, seed: int, *, small_count: int = 120, device: str = DEVICE) -> None:
        generator = torch.Generator().manual_seed(seed)

        def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.randint(0, 60, shape, generator=generator).to(dtype)

        sizes = torch.randint(1, 3000, (small_count,), generator=generator).tolist()
        self._begin = {
            "large": numbers(torch.float32, LARGE_FLOATS),
            "middling": numbers(torch.float32, MIDDLING_FLOATS),
            "matrix": numbers(torch.float32, 65, 33),
            "complex": torch.complex(numbers(torch.float32, 501), numbers(torch.float32, 501)),
            "scalar": numbers(torch.float64),
            "empty": torch.empty(0, 5),
            **{f"small.{index}": numbers(DTYPES[index % len(DTYPES)], size) for index, size in enumerate(sizes)},
        }
        self.live = {name: tensor.to(device, copy=True) for name, tensor in self._begin.items()}
        self.steps = 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is saved: the live tensors, and views of them that are not plain memory."""
        return views(self.live)

    def advance(self) -> None:
        for tensor in self.live.values():
            tensor.add_(1)
        self.steps += 1

    def expected(self, steps: int | None = None) -> dict[str, torch.Tensor]:
        """What `tensors` holds after so many steps (None: now), on the host."""
        steps = self.steps if steps is None else steps
        return views({name: tensor + steps for name, tensor in self._begin.items()})


def views(live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        **live,
        "transposed": live["matrix"].t(),
        "every third": live["matrix"][:, ::3],
        "shifted": live["middling"][3:-5],
        "conjugated": live["complex"].conj(),
        "imaginary": live["complex"].conj().imag,
    }


def blank(tensors: Mapping[str, torch.Tensor], device: str = DEVICE) -> dict[str, torch.Tensor]:
    """Targets of the same names, contiguous."""
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in tensors.items()}


def differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not the same, bit for bit."""
    return [name for name in expected if bits(found[name]) != bits(expected[name])]


def assert_holds(
    path: Path, expected: Mapping[str, torch.Tensor], *, step: int | None = None, device: str = DEVICE
) -> None:
    """A checkpoint must hold exactly the expected values, loaded into tensors of a device."""
    found = blank(expected, device)
    asyncckpt.Loader(path, tensors=found, step=step).load()
    wrong = differences(found, expected)
    assert not wrong, f"step {step}: {len(wrong)} of {len(expected)} tensors are others than at the cut: {wrong[:5]}"
