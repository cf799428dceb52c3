"""The host level of a table in pinned memory, and a CUDA device that gathers rows from there itself.

Otherwise the host gathers the rows of a batch, column by column, and sends them. Here a single kernel gathers the rows
of all columns over the bus, given their row numbers. So the device reads host rows after the call has returned. That is
safe because of what the levels do anyway:

1. A cached row is not written on the host before it was written back, and that waits until the device has passed the
   read.
2. A row that is removed while it is read may be assigned to another id and written: what was read is in a cache row
   that is unused by then, or is written again after the read.
3. The memory of a column goes back when its last tensor is gone, and not before the device has finished all queued
   reads (`unpin`).

Without a usable CUDA library for the device the host gathers, and nothing is pinned.
"""

from __future__ import annotations

import math
import os
import weakref
from typing import Protocol

import numpy as np
import torch

from asyncckpt.errors import DeviceError, UnsupportedError, UsageError, Words
from asyncckpt.native import I64, U8, Memory, UnusableLibrary, core, paged
from asyncckpt.native.cuda import CudaLibrary, DeviceFailure, load_cuda_library
from asyncckpt.signals import uninterrupted
from asyncckpt.tables.row_device import CudaRowDevice, RowDevice, RowMemory, Values

_lost: list[Memory] = []


class Reader(Protocol):
    """A device that reads memory of the host by itself."""

    def pin(self, address: int, bytes: int) -> None:
        """Let the device read whole pages of the host, in memory already. Raises DeviceError if the system refuses."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin` when no queued work reads the memory any more. Raises DeviceError if the device failed."""
        ...


class PinnedHost(RowDevice):
    """Columns in pinned memory of the host, which a device reads too.

    Each is a mapping of its own, as large as the column: torch's pinned memory comes in powers of two bytes, and stays
    pinned when it is freed.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__(torch.device("cpu"))
        self._reader = reader

    def new_column(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """Like RowDevice.new_column, but backed by memory at once. Raises MemoryError, DeviceError."""
        bytes = math.prod(shape) * dtype.itemsize
        if not bytes:
            return super().new_column(shape, dtype=dtype)
        with torch.inference_mode(mode=False):
            return torch.from_numpy(self._pinned(bytes)).view(dtype).view(shape)

    def _pinned(self, bytes: int) -> U8:
        """Return new memory, uint8 [bytes], which goes back with the array; tensors over it keep it alive."""
        memory, whole = core.map_memory(bytes), paged(bytes)
        memory.touch(0, whole)  # On all cores; pinning would do it on one.
        array = memory.view()[:bytes]
        with uninterrupted:
            self._reader.pin(memory.address, whole)
            weakref.finalize(array, _give_back, memory, self._reader, os.getpid()).atexit = False
        return array


def _give_back(memory: Memory, reader: Reader, owner_pid: int) -> None:
    try:
        if os.getpid() == owner_pid:  # A forked child has neither this memory nor the device.
            reader.unpin(memory.address)
    except DeviceError:  # The device is lost, but might still read: the memory stays until the process ends.
        _lost.append(memory)
    else:
        memory.close()


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

    def pin(self, address: int, bytes: int) -> None:
        try:
            self._library.host_register(self.device.index, address, bytes)
        except DeviceFailure as error:
            raise DeviceError(
                f"{bytes} bytes for a column of a table could not be pinned",
                found=Words(error),
                hint="leave pin_host_memory out, or let the process lock more memory",
            ) from error

    def unpin(self, address: int) -> None:
        try:
            if self._last is not None:  # It has followed all other streams.
                with self._library.beside_captures():
                    self._last.synchronize()
            self._library.host_unregister(self.device.index, address)
        except (DeviceFailure, RuntimeError) as error:
            raise DeviceError(f"{self.device} failed before it had read rows of the host: {error}") from error


def pinned_levels(table: str, device: torch.device) -> tuple[RowDevice, RowDevice]:
    """Return the places of a cache on a device and of the host level below it, which is pinned if the device reads it.

    Raises UnsupportedError without CUDA, UsageError for a device that needs no pinned memory.
    """
    what = f"pin_host_memory of table {table!r}"
    if not torch.cuda.is_available():
        raise UnsupportedError(f"{what} needs CUDA", found=Words("no CUDA device"), hint="leave it out")
    if device.type != "cuda":
        raise UsageError(f"{what} is for a cache on a CUDA device", found=Words(device), expected="device='cuda'")
    library = _library(device)
    if library is None:
        return CudaRowDevice(device), RowDevice(torch.device("cpu"))
    cache = HostReadingDevice(device, library)
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
