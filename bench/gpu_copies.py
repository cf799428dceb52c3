"""The floors of `bench gpu`, and gathers of rows beside them.

A floor is one plain copy of as many bytes: within the device, to pinned memory, and back. Gathered rows are a random
part of a table, in ascending order as saves gather them: on the device to one piece, to the host each to its own place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.native import UnusableLibrary
from asyncckpt.native.cuda import CudaLibrary, DeviceFailure, load_cuda_library
from bench.gpu_device import BenchDevice

WIDTHS = (64, 128, 512, 2048)
SHARES = (0.01, 0.1, 1.0)


@dataclass(frozen=True)
class Floors:
    """Seconds of one plain copy."""

    bytes: int
    d2h: float
    h2d: float
    d2d: float


@dataclass(frozen=True)
class GatherFigures:
    """Seconds to gather rows, beside a plain copy of as many bytes. way: "device", "host", or "index_select"."""

    row_bytes: int
    share: float
    way: str
    round_index: int
    bytes: int
    seconds: float
    floor_seconds: float


def measure_floors(device: BenchDevice, bytes: int, source: torch.Tensor, pinned: torch.Tensor) -> Floors:
    """source: at least twice as many bytes of the device."""
    half = len(source) // 2
    first, second, host = source[:bytes], source[half : half + bytes], pinned[:bytes]
    return Floors(
        bytes=bytes,
        d2h=device.time(lambda: host.copy_(first, non_blocking=True)),
        h2d=device.time(lambda: first.copy_(host, non_blocking=True)),
        d2d=device.time(lambda: second.copy_(first)),
    )


def usable_library() -> tuple[CudaLibrary | None, str]:
    """(the CUDA library, "") or (None, why it cannot be used)."""
    try:
        library = load_cuda_library()
        library.check_usable(0)
    except (UnusableLibrary, DeviceFailure) as error:
        return None, str(error)
    return library, ""


def measure_gathers(
    device: BenchDevice,
    library: CudaLibrary | None,
    source: torch.Tensor,
    pinned: torch.Tensor,
    *,
    table_bytes: int,
    round_index: int,
) -> list[GatherFigures]:
    """source: at least twice table_bytes of the device, pinned: at least table_bytes."""
    half = len(source) // 2
    table, packed, host = source[:table_bytes], source[half : half + table_bytes], pinned[:table_bytes]
    figures = []
    for width in WIDTHS:
        rows_count = table_bytes // width
        for share in SHARES:
            rows = _rows(device, rows_count, max(1, int(rows_count * share)))
            bytes = len(rows) * width
            floors = measure_floors(device, bytes, source, pinned)
            ways: dict[str, tuple[Callable[[], None], float]] = {
                "index_select": (_IndexSelect(table, packed, rows, width), floors.d2d)
            }
            if library is not None:
                ways["device"] = (Gather(device, library, table, packed, rows, width, in_place=False), floors.d2d)
                ways["host"] = (Gather(device, library, table, host, rows, width, in_place=True), floors.d2h)
            for way, (work, floor) in ways.items():
                work()  # Kernels are loaded at their first use.
                seconds = device.time(work)
                figures.append(GatherFigures(width, share, way, round_index, bytes, seconds, floor))
    return figures


class Gather:
    """One call of the library's kernel. in_place: row r goes to row r of the target, else to the next one."""

    def __init__(
        self,
        device: BenchDevice,
        library: CudaLibrary,
        table: torch.Tensor,
        target: torch.Tensor,
        rows: torch.Tensor,
        width: int,
        *,
        in_place: bool,
    ) -> None:
        self._device, self._library, self._rows, self._in_place = device, library, rows, in_place
        self._columns = np.array([[table.data_ptr(), target.data_ptr(), width]], dtype=np.uint64)

    def __call__(self) -> None:
        numbers = self._rows.data_ptr()
        targets = numbers if self._in_place else None
        self._library.copy_rows(0, self._columns, numbers, targets, len(self._rows), self._device.stream_handle())


class _IndexSelect:
    """The same by torch, on the device."""

    def __init__(self, table: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor, width: int) -> None:
        words = table.view(torch.int64).view(-1, width // 8)
        self._table, self._rows = words, rows
        self._target = packed[: len(rows) * width].view(torch.int64).view(len(rows), width // 8)

    def __call__(self) -> None:
        torch.index_select(self._table, 0, self._rows, out=self._target)


def _rows(device: BenchDevice, rows_count: int, count: int) -> torch.Tensor:
    return torch.randperm(rows_count, device=device.name)[:count].sort().values
