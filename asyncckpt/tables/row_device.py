"""Where the columns of a level lie, and how values come there and back without making training wait.

On the host all is done at once. On a CUDA device work is queued, on the stream that is current where a table is called:

1. `follow`, at the begin of every use: who comes on another stream than the use before him queues his work behind all
   that was queued there. So a prefetch on a stream of its own neither overtakes the updates of a step nor is overtaken
   by the next one, and a cut shows the work of both. The host does not wait.
2. `to_device`, `bring`: values go by way of pinned memory. The host does not wait; torch keeps pinned memory that was
   freed until the copies from it are done.
3. `begin_to_host`: values are on their way into pinned memory. `wait` of what it returns is the one place where the
   host waits, and only for what was queued before.

Other kinds of devices do with torch's own blocking copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from asyncckpt.errors import DeviceError
from asyncckpt.native import I64, core
from asyncckpt.tables.row_copy import RowMemory, copy_rows

Values = Mapping[str, torch.Tensor]


class Landing(Protocol):
    """Values on their way to the host."""

    def wait(self) -> Values:
        """Return them on the CPU as soon as they are there."""
        ...


class RowDevice:
    """Columns on the host, or on a device whose copies are left to torch. Callers hold the table's lock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_host(self) -> bool:
        """Whether the host reads and writes columns by itself."""
        return self.device.type == "cpu"

    def follow(self) -> None:
        """Let what this thread queues from now on come behind the uses before."""

    def new_column(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a column.

        Not zeroed: on the host, pages that no row has reached yet cost nothing. Never an inference tensor, also when a
        lookup under torch.inference_mode() makes the table grow: the optimizer could not update that later.
        """
        with torch.inference_mode(mode=False):
            column = torch.empty(shape, dtype=dtype, device=self.device)
        if self.is_host:
            # Rows are read and written at random: with small pages most of that is looking up where the page is.
            core.advise_huge(column.data_ptr(), column.nbytes)
        return column

    def index(self, rows: I64) -> torch.Tensor:
        """Rows as an index into columns, int64 [n] on the device; the array must not change any more."""
        return self.to_device(torch.from_numpy(rows))

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Values of any device on this one; the same tensor where they are there already."""
        return values.to(self.device)

    def take_rows(self, sources: Values, source_rows: I64, targets: Values, target_rows: I64) -> None:
        """Copy rows of columns of the host to columns here, as move_rows."""
        if self.is_host:
            for name, source in sources.items():
                target = RowMemory.of(targets[name]).address
                copy_rows(RowMemory.of(source), source_rows, target=target, target_rows=target_rows)
            return
        index = self.index(target_rows)
        for name, source in sources.items():
            targets[name].index_copy_(0, index, self.bring(source, source_rows))

    def bring(self, source: torch.Tensor, rows: I64) -> torch.Tensor:
        """Rows, int64 [n], of a column of the host on the device: `[n, *row_shape]`."""
        staged = torch.empty((rows.size, *source.shape[1:]), dtype=source.dtype, device="cpu")
        return self.to_device(gathered(source, rows, staged))

    def begin_to_host(self, values: Values) -> Landing:
        """Begin to bring values of the device to the host."""
        return _Landed({name: value.cpu() for name, value in values.items()})

    def let_go(self, column: torch.Tensor) -> None:
        """A column is about to be freed, while work on it may be queued."""

    def stop_reading(self) -> None:
        """Wait until nothing that is queued reads columns of the host, of which one is about to be freed."""


class CudaRowDevice(RowDevice):
    """Columns on a CUDA device, which has a number. cuda: torch.cuda, or what stands for it in a test."""

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._last: Any = None

    def follow(self) -> None:
        stream = self._cuda.current_stream(self.device)
        last, self._last = self._last, stream
        # Whatever was queued there by now, also updates of rows by training that the table was not told of.
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
        return _CudaLanding(landed, self._cuda.current_stream(self.device).record_event())

    def let_go(self, column: torch.Tensor) -> None:
        # It was allocated on the stream of that time, and goes back to it; this one may still use it.
        column.record_stream(self._cuda.current_stream(self.device))


def row_device(device: torch.device) -> RowDevice:
    """The way to columns on a device, whose number is known (checked_device)."""
    return CudaRowDevice(device) if device.type == "cuda" else RowDevice(device)


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values of any device on another one, in the order of the current stream there; the host does not wait.

    It does for pinned memory, which is its owner's and may change when this has returned.
    """
    if device.type != "cuda" or not values.is_cpu or values.is_pinned():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def move_rows(sources: Values, source_rows: I64, targets: Values, target_rows: I64, *, place: RowDevice) -> None:
    """Copy source_rows (int64 [n]) of columns of the host to target_rows (distinct) of those of the same names.

    Columns are contiguous `[rows, *row_shape]`; the targets lie at `place`. The host waits for no device, and source
    rows may change when this has returned, but for those that a device reads by itself (pinned_host.py).
    """
    if source_rows.size:
        with torch.no_grad():
            place.take_rows(sources, source_rows, targets, target_rows)


def gathered(source: torch.Tensor, rows: I64, target: torch.Tensor) -> torch.Tensor:
    """The target, `[n, *row_shape]` on the host, with rows of a column of the host."""
    in_order = np.arange(rows.size, dtype=np.int64)
    copy_rows(RowMemory.of(source), rows, target=target.data_ptr(), target_rows=in_order)
    return target


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Fresh pinned memory. torch rounds its bytes up to a power of two, and keeps what is freed for the next one."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


class _Landed:
    """Values that are there."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def wait(self) -> Values:
        return self._values


class _CudaLanding:
    """Values that are there after an event."""

    def __init__(self, values: Values, event: Any) -> None:
        self._values, self._event = values, event

    def wait(self) -> Values:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            what = f"a device failed before rows that left its cache had come to the host: {error}"
            raise DeviceError(
                what, hint="these rows are lost with the process: start anew from a checkpoint"
            ) from error
        return self._values
