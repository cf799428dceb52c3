"""Where the columns of a level are stored, and how values get there and back without making training wait.

On the host, everything is done at once. On a CUDA device, work is queued on the caller's current stream:

1. `follow`, at the beginning of every call: if the previous call used another stream, wait on this stream for all that
   was queued there. So a prefetch on a stream of its own neither overtakes the updates of a step nor is overtaken by
   the next one, and a cut sees the work of both. The host does not wait.
2. `to_device`, `bring`: copy values through pinned memory. The host does not wait; torch keeps freed pinned memory
   until the copies from it are done.
3. `begin_to_host`: copy values to pinned memory. `wait` of its result is the one place where the host waits, and only
   for what was queued before.

Other kinds of devices use torch's own blocking copies.

Rows of host memory are gathered and scattered by one native call on one thread, without the GIL. torch's own gather and
scatter split even small copies over all cores. Beside the threads of an export or of a data loader each part then waits
for a core, which costs far more than the copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import DeviceError
from asyncckpt.native import I64, core

# These copies run beside training and must not take its cores.
COPY_THREADS = 1


@dataclass(frozen=True)
class RowMemory:
    """The memory of a column: row r is at `address + r * row_bytes`. `owner` keeps it alive."""

    address: int
    row_bytes: int
    owner: object

    @classmethod
    def of(cls, column: torch.Tensor) -> RowMemory:
        """Return the memory of a contiguous tensor `[rows, *row_shape]` on the CPU."""
        assert column.is_cpu
        assert column.is_contiguous()
        row_bytes = column.element_size() * math.prod(column.shape[1:])
        return cls(address=column.data_ptr(), row_bytes=row_bytes, owner=column)


def copy_rows(source: RowMemory, source_rows: I64, *, target: int, target_rows: I64) -> None:
    """Copy source_rows to target_rows, both int64 [n], of the memory at `target`."""
    segments = np.empty((source_rows.size, 3), dtype=np.uint64)
    segments[:, 0] = source.address + source_rows * source.row_bytes
    segments[:, 1] = target + target_rows * source.row_bytes
    segments[:, 2] = source.row_bytes
    core.copy(segments, threads=COPY_THREADS)


def copy_runs(source: RowMemory, runs: I64, *, target: int) -> None:
    """Copy the rows of runs, int64 [k, 2] of (begin, end), one after another to the address `target`."""
    counts = runs[:, 1] - runs[:, 0]
    segments = np.empty((len(runs), 3), dtype=np.uint64)
    segments[:, 0] = source.address + runs[:, 0] * source.row_bytes
    segments[:, 1] = target + (np.cumsum(counts) - counts) * source.row_bytes
    segments[:, 2] = counts * source.row_bytes
    core.copy(segments, threads=COPY_THREADS)


Values = Mapping[str, torch.Tensor]


class Landing:
    """Values on their way to the host: they arrive with `event`, None if they have arrived."""

    def __init__(self, values: Values, event: Any = None) -> None:
        self._values, self._event = values, event

    def wait(self) -> Values:
        """Wait for the values and return them, on the CPU."""
        try:
            if self._event is not None:
                self._event.synchronize()
        except RuntimeError as error:
            what = f"a device failed before rows evicted from its cache had reached the host: {error}"
            hint = "these rows are lost with the process: restart from a checkpoint"
            raise DeviceError(what, hint=hint) from error
        return self._values


class RowDevice:
    """Columns on the host, or on a device whose copies are left to torch. Callers hold the table's lock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Whether the host reads and writes the columns directly.
        self.is_host = device.type == "cpu"

    def follow(self) -> None:
        """Order what this thread queues from now on after the calls before."""

    def new_column(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a column.

        Not zeroed: on the host, pages that no row has reached cost nothing. Never an inference tensor, even if a lookup
        under torch.inference_mode() makes the table grow: an optimizer could not update that later.
        """
        with torch.inference_mode(mode=False):
            column = torch.empty(shape, dtype=dtype, device=self.device)
        if self.is_host:
            # Rows are accessed at random: with small pages, TLB misses would take most of the time.
            core.advise_huge(column.data_ptr(), column.nbytes)
        return column

    def index(self, rows: I64) -> torch.Tensor:
        """Return rows as an index into columns, int64 [n] on the device; the array must not change afterwards."""
        return self.to_device(torch.from_numpy(rows))

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of any device on this one; the same tensor if they are there already."""
        return values.to(self.device)

    def take_rows(self, sources: Values, source_rows: I64, targets: Values, target_rows: I64) -> int:
        """Copy source_rows (int64 [n]) of columns of the host to target_rows (distinct) of those of the same names.

        Columns are contiguous `[rows, *row_shape]`; the targets are at this place. Returns how many writes torch has
        counted for each target.
        """
        if self.is_host:
            for name, source in sources.items():
                target = RowMemory.of(targets[name]).address
                copy_rows(RowMemory.of(source), source_rows, target=target, target_rows=target_rows)
            return 0
        index = self.index(target_rows)
        for name, source in sources.items():
            targets[name].index_copy_(0, index, self.bring(source, source_rows))
        return 1

    def bring(self, source: torch.Tensor, rows: I64) -> torch.Tensor:
        """Return rows, int64 [n], of a column of the host on the device: `[n, *row_shape]`."""
        staged = torch.empty((rows.size, *source.shape[1:]), dtype=source.dtype, device="cpu")
        return self.to_device(gathered(source, rows, staged))

    def begin_to_host(self, values: Values) -> Landing:
        """Begin to copy values of the device to the host."""
        return Landing({name: value.cpu() for name, value in values.items()})

    def let_go(self, column: torch.Tensor) -> None:
        """Prepare for freeing a column on which work may still be queued."""


class CudaRowDevice(RowDevice):
    """Columns on a CUDA device with an index. cuda: torch.cuda, or its replacement in a test."""

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._last: Any = None

    def follow(self) -> None:
        stream = self._cuda.current_stream(self.device)
        last, self._last = self._last, stream
        # For all that was queued there by now, including updates of rows that the table cannot see.
        if last is not None and last != stream:
            stream.wait_stream(last)

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        return sent(values, self.device)

    def bring(self, source: torch.Tensor, rows: I64) -> torch.Tensor:
        staged = pinned((rows.size, *source.shape[1:]), source.dtype)
        return gathered(source, rows, staged).to(self.device, non_blocking=True)

    def begin_to_host(self, values: Values) -> Landing:
        landed = {}
        for name, value in values.items():
            landed[name] = pinned(tuple(value.shape), value.dtype)
            landed[name].copy_(value, non_blocking=True)
        return Landing(landed, self._cuda.current_stream(self.device).record_event())

    def let_go(self, column: torch.Tensor) -> None:
        # It returns to the stream on which it was allocated, while this stream may still use it.
        column.record_stream(self._cuda.current_stream(self.device))


def row_device(device: torch.device) -> RowDevice:
    """Return the place of columns on a device that has an index if it is CUDA (checked_device)."""
    return CudaRowDevice(device) if device.type == "cuda" else RowDevice(device)


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return values of any device on another one, in the order of the current stream there, without a wait of the host.

    Waits for pinned memory, which its owner may change when this has returned.
    """
    if device.type != "cuda" or not values.is_cpu or values.is_pinned():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def selected(values: Values, positions: I64) -> dict[str, torch.Tensor]:
    """Return the values at some positions, int64 [n], each on its device, without a wait of the host."""
    index = torch.from_numpy(positions)
    return {name: value.index_select(0, sent(index, value.device)) for name, value in values.items()}


def spread(values: torch.Tensor, positions: I64, *, count: int) -> torch.Tensor:
    """Return `count` rows on the device of values: these at their positions, int64 [n], distinct, and zeros."""
    if np.array_equal(positions, np.arange(count)):
        return values
    with torch.no_grad():
        zeros = values.new_zeros((count, *values.shape[1:]))
        return zeros.index_copy_(0, sent(torch.from_numpy(positions), values.device), values)


def gathered(source: torch.Tensor, rows: I64, target: torch.Tensor) -> torch.Tensor:
    """Gather rows of a column of the host into target, `[n, *row_shape]` on the host, and return it."""
    in_order = np.arange(rows.size, dtype=np.int64)
    copy_rows(RowMemory.of(source), rows, target=target.data_ptr(), target_rows=in_order)
    return target


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return new pinned memory. torch rounds its size up to a power of two bytes and caches freed memory."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
