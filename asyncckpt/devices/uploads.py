"""Copies of one load from the host to devices, through pinned windows that are used in turn.

for ...:
    1. window      get the memory of the next turn, after everything that was copied out of it before has arrived
    2.             the caller reads bytes into it, while the previous window is being copied
    3. put...      add copies: out of the window, or of other memory
    4. launch      queue them on the side stream of each device; the first ones after the trainer's current stream
5. settle          wait for all of them
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from asyncckpt.devices.batch import Batch, settle_all
from asyncckpt.devices.contract import Event, Runtime
from asyncckpt.devices.upload_copies import RowUpload, SegmentUpload, TensorUpload, Upload, is_plain
from asyncckpt.errors import DeviceError
from asyncckpt.native import I64, U8

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
