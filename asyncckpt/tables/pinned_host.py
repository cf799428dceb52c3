"""The host level of a table in pinned memory, and a CUDA device that gathers rows from there itself.

Otherwise the host gathers the rows of a batch, column by column, and sends them. Here a single kernel gathers the rows
of all columns over the bus, given their row numbers. So the device reads host rows after the call has returned. That is
safe because of what the levels do anyway:

1. A cached row is not written on the host before it was written back, and that waits until the device has passed the
   read.
2. A row that is removed while it is read may be assigned to another id and written: what was read is in a cache row
   that is unused by then, or is written again after the read.
3. A column that moves is not freed before the device has finished all queued reads (`let_go`).

Without a usable CUDA library for the device, the host gathers.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from asyncckpt.errors import DeviceError, UnsupportedError, UsageError
from asyncckpt.native import I64, UnusableLibrary
from asyncckpt.native.cuda import CudaLibrary, DeviceFailure, load_cuda_library
from asyncckpt.tables.row_copy import RowMemory
from asyncckpt.tables.row_device import CudaRowDevice, RowDevice, Values, pinned


class PinnedHost(RowDevice):
    """Columns in pinned memory of the host, which the device `reader` reads too."""

    def __init__(self, reader: RowDevice) -> None:
        super().__init__(torch.device("cpu"))
        self._reader = reader

    def new_column(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """Like RowDevice.new_column, but backed by memory at once; torch rounds it up to a power of two bytes."""
        with torch.inference_mode(mode=False):
            return pinned(shape, dtype)

    def let_go(self, column: torch.Tensor) -> None:
        self._reader.stop_reading()


class HostReadingDevice(CudaRowDevice):
    """A CUDA device that reads columns of a PinnedHost, and must be given no other columns of the host."""

    def __init__(self, device: torch.device, library: CudaLibrary) -> None:
        super().__init__(device)
        self._library = library

    def take_rows(self, sources: Values, source_rows: I64, targets: Values, target_rows: I64) -> int:
        columns = []
        for name, source in sources.items():
            memory = RowMemory.of(source)
            columns.append((memory.address, targets[name].data_ptr(), memory.row_bytes))
        # Both are freed when this returns; the next allocation on this stream may get them, after the launch.
        places = self.index(source_rows), self.index(target_rows)
        try:
            self._library.copy_rows(
                self.device.index,
                np.array(columns, dtype=np.uint64),
                places[0].data_ptr(),
                places[1].data_ptr(),
                source_rows.size,
                self._cuda.current_stream(self.device).cuda_stream,
            )
        except DeviceFailure as error:
            raise DeviceError(f"{self.device} failed to take rows from the host: {error}") from error
        return 0

    def stop_reading(self) -> None:
        # The allocator of pinned memory does not know of launches. The last stream has followed all others.
        if self._last is not None:
            self._last.synchronize()


def pinned_levels(table: str, device: torch.device) -> tuple[RowDevice, RowDevice]:
    """Return the places of a cache on a device and of the pinned host level below it.

    Raises UnsupportedError without CUDA, UsageError for a device that needs no pinned memory.
    """
    what = f"pin_host_memory of table {table!r}"
    if not torch.cuda.is_available():
        raise UnsupportedError(f"{what} needs CUDA", found="no CUDA device", hint="leave it out")
    if device.type != "cuda":
        raise UsageError(f"{what} is for a cache on a CUDA device", found=str(device), expected="device='cuda'")
    library = _library(device)
    cache = CudaRowDevice(device) if library is None else HostReadingDevice(device, library)
    return cache, PinnedHost(cache)


def _library(device: torch.device) -> CudaLibrary | None:
    if os.environ.get("ASYNCCKPT_CUDA") == "0":
        return None
    try:
        library = load_cuda_library()
        library.check_usable(device.index)
    except (UnusableLibrary, DeviceFailure):
        return None
    return library
