"""Cold loads into tensors of a device, beside the floors: a raw read of as many bytes, and one copy up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

import asyncckpt
from bench.clocks import cached_share, drop_page_cache
from bench.gpu_copies import measure_floors
from bench.gpu_device import BenchDevice
from bench.gpu_saves import SaveCase, make_state
from bench.peers.raw_floor import kernels

THREADS_COUNT = 8


@dataclass(frozen=True)
class DeviceLoadFigures:
    """One load of `bytes`. All in seconds; read: O_DIRECT into touched memory, as many threads as the load has."""

    round_index: int
    bytes: int
    seconds: float
    read_seconds: float
    up_seconds: float
    cached_share: float
    exact: bool


def measure_loads(
    device: BenchDevice, case: SaveCase, source: torch.Tensor, pinned: torch.Tensor, folder: Path, *, rounds: int
) -> list[DeviceLoadFigures]:
    """source and pinned as in measure_floors, for the bytes of the case."""
    state = make_state(device, case)
    with asyncckpt.Saver(path=folder / "load", tensors=state) as saver:
        saver.save(1)
    raw, address, bytes = kernels(), 0, case.bytes // 4096 * 4096
    address = raw.map(bytes, THREADS_COUNT)
    image = folder / "image"
    raw.write(image, address, bytes)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    figures = []
    for index in range(rounds):
        for tensor in target.values():
            tensor.zero_()
        device.synchronize()
        drop_page_cache(folder / "load")
        cached = cached_share(folder / "load")
        begun = time.perf_counter()
        asyncckpt.Loader(folder / "load", tensors=target, parallel=THREADS_COUNT).load()
        seconds = time.perf_counter() - begun
        begun = time.perf_counter()
        raw.read(image, address, bytes, THREADS_COUNT)
        read = time.perf_counter() - begun
        up = measure_floors(device, case.bytes, source, pinned).h2d
        exact = all(torch.equal(tensor, state[name]) for name, tensor in target.items())
        figures.append(DeviceLoadFigures(index, case.bytes, seconds, read, up, cached, exact))
    return figures
