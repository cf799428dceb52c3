"""Copies of one load from the host to devices, through pinned windows that are used in turn.

for ...:
    1. window      get the memory of the next turn, after everything that was copied out of it before has arrived
    2.             the caller reads bytes into it, while the previous window is being copied
    3. put...      add copies: out of the window, or of other memory
    4. launch      queue them on the side stream of each device; the first ones after the trainer's current stream
5. settle          wait for all of them

Each kind of copy may need scratch memory of the device, which all copies of a batch share, one after another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from asyncckpt.devices.batch import Batch, settle_all
from asyncckpt.devices.contract import ENGINE_COPIES_MAX, LARGE_BYTES, Event, Runtime
from asyncckpt.devices.slots import runs_of, slots_of
from asyncckpt.errors import DeviceError
from asyncckpt.native import I64, U8, U64

GAP_BYTES_MAX = 64 << 10
"""A smaller gap between two segments is copied with them: starting another transfer takes longer."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Upload(Protocol):
    """Copies from host memory to one device.

    Bytes go up by the copy engine, in long pieces to scratch memory, and kernels spread them on the device: kernels
    that read the host's memory themselves are slower, and do so only where there is no scratch memory.
    """

    @property
    def scratch_bytes(self) -> int:
        """How much scratch memory of the device the copy takes."""
        ...

    @property
    def scratch_bytes_min(self) -> int:
        """How much of it the copy cannot do without: all or nothing."""
        ...

    def run(self, batch: Batch, scratch: int | None) -> None:
        """Queue the copy on the current side stream. scratch: the address of the memory, aligned to 256; None: none."""
        ...


class SegmentUpload:
    """Segments (source, target, bytes), uint64 [n, 3], of which no two targets overlap.

    window: (address, bytes) of host memory that may also be read between segments. Short segments of it go up together
    with their neighbours, all others one by one.
    """

    scratch_bytes_min = 0

    def __init__(self, segments: U64, *, window: tuple[int, int]) -> None:
        sources, sizes = segments[:, 0].astype(np.int64), segments[:, 2].astype(np.int64)
        begin, size = window
        is_packed = (sources >= begin) & (sources + sizes <= begin + size) & (sizes < LARGE_BYTES)
        self._window = window
        self._alone = np.ascontiguousarray(segments[~is_packed])
        self._packed = segments[is_packed][np.argsort(sources[is_packed], kind="stable")]
        packed = self._packed.view(np.int64)
        # Not more runs than a stream has room for, so a few long gaps go up with the rest.
        gap_bytes_max = max(GAP_BYTES_MAX, size // ENGINE_COPIES_MAX)
        self._runs = runs_of(packed[:, 0], packed[:, 2], gap_bytes_max=gap_bytes_max)
        self._slots, self.scratch_bytes = slots_of(self._runs.ends - self._runs.begins, self._runs.begins)

    def run(self, batch: Batch, scratch: int | None) -> None:
        if len(self._alone):
            batch.kernels.transfer(self._alone, batch, to_host=False)
        if not len(self._packed):
            return
        if scratch is None:
            if batch.is_reachable(*self._window):
                batch.kernels.copy(self._packed, batch)
            else:
                batch.kernels.transfer(self._packed, batch, to_host=False)
            return
        begins, ends, of = self._runs
        slots = self._slots + scratch
        batch.kernels.transfer(np.stack([begins, slots, ends - begins], axis=1).view(np.uint64), batch, to_host=False)
        within = self._packed.copy()
        within.view(np.int64)[:, 0] += (slots - begins)[of]
        batch.kernels.copy(within, batch)


class TensorUpload:
    """Copies a host tensor of any strides to a device tensor; at least one of them is not plain memory.

    Copies the bytes from the first to the last of the values to the device, which picks the values.
    """

    def __init__(self, target: torch.Tensor, values: torch.Tensor) -> None:
        self._target, self._values = target, values
        self.scratch_bytes = self.scratch_bytes_min = _span_bytes(values)

    def run(self, batch: Batch, scratch: int | None) -> None:
        assert scratch is not None
        _bring(self._values.data_ptr(), scratch, self.scratch_bytes, batch)
        memory = batch.runtime.view(scratch, self.scratch_bytes, batch.device).view(self._values.dtype)
        values = memory.as_strided(self._values.shape, self._values.stride(), 0)
        target, values = _as_bits(self._target, values)
        target.copy_(values, non_blocking=True)


class RowUpload:
    """Copies row positions[i] (None: row i) of contiguous host values to row rows[i] of a target on the device.

    positions, rows: int64 [n]; rows are distinct.
    """

    def __init__(
        self, target: torch.Tensor, rows: I64, values: torch.Tensor, positions: I64 | None, batch: Batch
    ) -> None:
        self._target, self._rows, self._values, self._positions = target, rows, values, positions
        self._is_plain = is_plain(target)
        is_read_in_place = self._is_plain and batch.is_reachable(values.data_ptr(), values.nbytes)
        self.scratch_bytes = values.nbytes
        self.scratch_bytes_min = 0 if is_read_in_place else values.nbytes

    def run(self, batch: Batch, scratch: int | None) -> None:
        source = self._values.data_ptr()
        if scratch is not None:
            _bring(source, scratch, self.scratch_bytes, batch)
            source = scratch
        if self._is_plain:
            row_bytes = self._values.nbytes // len(self._values)
            columns = np.array([[source, self._target.data_ptr(), row_bytes]], dtype=np.uint64)
            batch.kernels.copy_rows(columns, self._positions, self._rows, batch)
            return
        memory = batch.runtime.view(source, self.scratch_bytes, batch.device)
        target, values = _as_bits(self._target, memory.view(self._values.dtype).view(self._values.shape))
        if self._positions is not None:
            values = values.index_select(0, _on_device(self._positions, batch))
        target.index_copy_(0, _on_device(self._rows, batch), values)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory holds its values in order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _span_bytes(values: torch.Tensor) -> int:
    """Return the bytes from the first to the last byte of a non-empty tensor."""
    steps = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    assert math.prod(values.shape) > 0
    return (steps + 1) * values.element_size()


def _bring(source: int, target: int, bytes: int, batch: Batch) -> None:
    batch.kernels.transfer(np.array([[source, target, bytes]], dtype=np.uint64), batch, to_host=False)


def _on_device(rows: I64, batch: Batch) -> torch.Tensor:
    """Return row numbers on the device, int64 [n]."""
    address = batch.device_memory(rows.nbytes)
    _bring(batch.pinned(rows), address, rows.nbytes, batch)
    return batch.runtime.view(address, rows.nbytes, batch.device).view(torch.int64)


def _as_bits(target: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as integers of their size if that is equivalent: devices lack some operations for some dtypes."""
    bits = _BITS.get(target.element_size())
    if bits is None or target.is_conj() or target.is_neg():
        return target, values
    return target.view(bits), values.view(bits)


WINDOWS_COUNT = 2

_log = logging.getLogger("asyncckpt")


@dataclass
class _Window:
    """Memory of one turn, and the copies out of it. pinned_bytes: 0 if the system has no pinned memory left."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    pinned_bytes: int = 0
    running: list[tuple[Batch, Event]] = field(default_factory=list)

    @property
    def range(self) -> tuple[int, int]:
        return int(self.memory.data_ptr()), self.memory.numel()


@dataclass
class _Listed:
    """Added copies to one device. `others` need the batch that they will be part of."""

    segments: list[tuple[int, int, int]] = field(default_factory=list)
    others: list[Callable[[Batch], Upload]] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)


class Uploads:
    """The copies of one load, on one thread.

    Leaving it as a context manager waits for everything that was launched, even after an error, so that memory may be
    freed. Targets and values are kept alive until then. Raises DeviceError.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._windows = [_Window() for _ in range(WINDOWS_COUNT)]
        self._turn = 0
        self._listed: dict[int, _Listed] = {}
        self._followed: set[int] = set()

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Return the device of a target; None: the host, or a device to which torch copies at once."""
        return self._runtime.device_of(tensor)

    def window(self, bytes: int) -> U8:
        """Return the memory of the next turn, uint8 [bytes], with undefined content. May wait for the device."""
        assert not self._listed
        self._turn = (self._turn + 1) % len(self._windows)
        window = self._windows[self._turn]
        _settle([window])
        if window.memory.numel() < bytes:
            window.memory, window.pinned_bytes = self._new_memory(bytes)
        raw: U8 = window.memory.numpy()
        return raw[:bytes]

    def _new_memory(self, bytes: int) -> tuple[torch.Tensor, int]:
        try:
            return self._runtime.new_pinned(bytes), bytes
        except (DeviceError, MemoryError) as error:
            _log.warning("asyncckpt: no pinned memory, so a load is slower: %s", error)
            return torch.empty(bytes, dtype=torch.uint8, device="cpu"), 0

    def put_bytes(self, target: torch.Tensor, begin: int, memory: U8) -> None:
        """Copy bytes to a contiguous tensor on a device, from its byte `begin` on."""
        if memory.size:
            listed = self._on(target)
            listed.segments.append((memory.ctypes.data, target.data_ptr() + begin, memory.size))
            listed.kept += (target, memory)

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values on the CPU to any tensor of their shape: on the host now, on devices with the launch.

        Converts them to another dtype. values: neither conjugated nor negated.
        """
        if self.device_of(target) is None:
            target.copy_(values)
        elif target.numel():
            values = values.to(target.dtype)
            listed = self._on(target)
            listed.kept += (target, values)
            if values.is_contiguous() and is_plain(target):
                listed.segments.append((values.data_ptr(), target.data_ptr(), values.nbytes))
            else:
                listed.others.append(lambda batch: TensorUpload(target, values))

    def put_rows(self, target: torch.Tensor, rows: I64, values: torch.Tensor, positions: I64 | None) -> None:
        """Copy row positions[i] (None: row i) of contiguous values on the CPU to row rows[i] of a target on a device.

        values: `[m, *row shape]` of the target's dtype. rows: int64 [n], distinct.
        """
        if len(rows) and values.nbytes:
            listed = self._on(target)
            listed.kept += (target, values)
            listed.others.append(lambda batch: RowUpload(target, rows, values, positions, batch))

    def _on(self, target: torch.Tensor) -> _Listed:
        device = self.device_of(target)
        assert device is not None
        return self._listed.setdefault(device, _Listed())

    def launch(self) -> None:
        """Queue all added copies. Raises DeviceError, also if a device has no memory for them."""
        listed, self._listed = self._listed, {}
        for device, item in listed.items():
            self._launch(device, item, self._windows[self._turn])

    def _launch(self, device: int, item: _Listed, window: _Window) -> None:
        batch = Batch(self._runtime, device, reachable=[(window.range[0], window.pinned_bytes)])
        batch.keep(*item.kept)
        try:
            if device not in self._followed:  # Later copies follow on the side stream.
                batch.follow()
                self._followed.add(device)
            batch.enqueue(lambda: _run(item, batch, window.range))
        except MemoryError as error:
            raise DeviceError(
                f"device {device} has no memory for the copies of a load within it: {error}",
                hint="free some of it before the load; torch.cuda.empty_cache() may do",
            ) from error
        finally:  # Even after a failure: copies may be queued already.
            window.running.append((batch, batch.record()))

    def settle(self) -> None:
        """Wait for everything that was launched. Raises DeviceError if a device failed."""
        _settle(self._windows)

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.settle()
        except Exception as later:
            if error is None:
                raise
            _log.warning("asyncckpt: copies of a load that has failed did not arrive: %s", later)


def _run(item: _Listed, batch: Batch, window: tuple[int, int]) -> None:
    """Queue all copies on the current side stream. Raises MemoryError."""
    uploads: list[Upload] = [make(batch) for make in item.others]
    if item.segments:
        uploads.insert(0, SegmentUpload(np.array(item.segments, dtype=np.uint64), window=window))
    scratch, scratch_bytes = _scratch_of(uploads, batch)
    for upload in uploads:
        upload.run(batch, scratch if upload.scratch_bytes <= scratch_bytes else None)


def _scratch_of(uploads: list[Upload], batch: Batch) -> tuple[int, int]:
    """Return scratch memory (address, bytes) for all copies, or at least for those that need some. MemoryError."""
    wanted = max((upload.scratch_bytes for upload in uploads), default=0)
    needed = max((upload.scratch_bytes_min for upload in uploads), default=0)
    if not wanted:
        return 0, 0
    try:
        return batch.device_memory(wanted), wanted
    except MemoryError:
        return (batch.device_memory(needed), needed) if needed else (0, 0)


def _settle(windows: list[_Window]) -> None:
    """Wait for all copies out of windows, even if some fail; then raise the first failure."""
    running = [one for window in windows for one in window.running]
    errors = settle_all(running) if running else []
    for window in windows:
        window.running.clear()
    if errors:
        raise errors[0]
