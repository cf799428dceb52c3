"""Copies of one load from the host to devices, by way of pinned windows that are used in turn.

for ...:
    1. window      the memory of the next turn, once everything that was copied out of it before has arrived
    2.             the caller reads bytes into it, while the window before is on its way
    3. put...      lists copies: out of the window, or of other memory
    4. launch      queues them on the side stream of each device; the first ones behind the trainer's current stream
5. settle          waits for all of them
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import torch

from asyncckpt.devices.batch import Batch
from asyncckpt.devices.contract import Event, Runtime
from asyncckpt.devices.upward import RowUpload, SegmentUpload, TensorUpload, Upload, run_uploads
from asyncckpt.errors import DeviceError
from asyncckpt.native import I64, U8

WINDOWS_COUNT = 2

_log = logging.getLogger("asyncckpt")


@dataclass
class _Window:
    """Memory of one turn, and what was copied out of it. pinned_bytes: 0 when the system has no pinned memory left."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    pinned_bytes: int = 0
    running: list[tuple[Batch, Event]] = field(default_factory=list)

    @property
    def range(self) -> tuple[int, int]:
        return int(self.memory.data_ptr()), self.memory.numel()


@dataclass
class _Listed:
    """Copies to one device. `others` need the batch that they will be part of."""

    segments: list[tuple[int, int, int]] = field(default_factory=list)
    others: list[Callable[[Batch], Upload]] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)


class Uploads:
    """The copies of one load, on one thread. runtime None: there are no devices, and all targets are the host's.

    Leaving it as a context manager waits for all that was launched, whatever happened: nothing of it is on its way
    any more, and memory may go. Targets and values are kept until then. DeviceError.
    """

    def __init__(self, runtime: Runtime | None) -> None:
        self._runtime = runtime
        self._windows = [_Window() for _ in range(WINDOWS_COUNT)]
        self._turn = 0
        self._listed: dict[int, _Listed] = {}
        self._followed: set[int] = set()

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """The device of a target; None: of the host, or one that torch copies to at once."""
        return None if self._runtime is None else self._runtime.device_of(tensor)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether the host writes a tensor's memory itself."""
        return tensor.is_cpu and self.device_of(tensor) is None

    def window(self, bytes: int) -> U8:
        """The memory of the next turn, uint8 [bytes], whose content is over. May wait for the device."""
        assert not self._listed
        self._turn = (self._turn + 1) % len(self._windows)
        window = self._windows[self._turn]
        _settle([window])
        if window.memory.numel() < bytes:
            window.memory, window.pinned_bytes = self._new_memory(bytes)
        raw: U8 = window.memory.numpy()
        return raw[:bytes]

    def _new_memory(self, bytes: int) -> tuple[torch.Tensor, int]:
        assert self._runtime is not None
        try:
            return self._runtime.new_pinned(bytes), bytes
        except DeviceError as error:
            _log.warning("asyncckpt: no pinned memory for a load, which is slower so: %s", error)
            return torch.empty(bytes, dtype=torch.uint8, device="cpu"), 0

    def put_bytes(self, target: torch.Tensor, begin: int, memory: U8) -> None:
        """Copy bytes to a contiguous tensor on a device, from its byte `begin` on."""
        if memory.size:
            listed = self._on(target)
            listed.segments.append((memory.ctypes.data, target.data_ptr() + begin, memory.size))
            listed.kept += (target, memory)

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values on the CPU to any tensor of their shape and dtype: one of the host now, others with the launch.

        values: neither conjugated nor negated.
        """
        if self.device_of(target) is None:
            target.copy_(values)
        elif target.numel():
            listed = self._on(target)
            listed.kept += (target, values)
            if values.is_contiguous() and _is_plain(target):
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
        """Queue all that was put. DeviceError, also when a device has no memory left for what they need on it."""
        listed, self._listed = self._listed, {}
        for device, item in listed.items():
            self._launch(device, item, self._windows[self._turn])

    def _launch(self, device: int, item: _Listed, window: _Window) -> None:
        assert self._runtime is not None
        batch = Batch(self._runtime, device, reachable=[(window.range[0], window.pinned_bytes)])
        batch.keep(*item.kept)
        try:
            if device not in self._followed:  # What is queued on the side stream later comes later in any case.
                batch.follow()
                self._followed.add(device)
            batch.enqueue(lambda: _run(item, batch, window.range))
        except MemoryError as error:
            raise DeviceError(
                f"device {device} has no memory for what a load copies within it: {error}",
                hint="free some of it before the load; torch.cuda.empty_cache() may do",
            ) from error
        finally:  # Also of what was queued before a failure.
            window.running.append((batch, batch.record()))

    def settle(self) -> None:
        """Wait until all that was launched has arrived. DeviceError when a device failed."""
        _settle(self._windows)

    def __enter__(self) -> Uploads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.settle()
        except Exception as later:
            if error is None:
                raise
            _log.warning("asyncckpt: copies of a load that has failed did not arrive: %s", later)


def _run(item: _Listed, batch: Batch, window: tuple[int, int]) -> None:
    uploads = [make(batch) for make in item.others]
    if item.segments:
        uploads.insert(0, SegmentUpload(np.array(item.segments, dtype=np.uint64), batch, window=window))
    run_uploads(uploads, batch)


def _settle(windows: list[_Window]) -> None:
    """Wait for what is copied out of windows. All of it, whatever fails; then raise the first failure."""
    failed: BaseException | None = None
    for window in windows:
        while window.running:
            batch, event = window.running[0]
            try:
                batch.settle(event)
            except Exception as error:
                failed = failed or error
            except BaseException as error:  # An interrupt: nothing may go before the device is through.
                failed = failed or error
                continue
            del window.running[0]
    if failed is not None:
        raise failed


def _is_plain(target: torch.Tensor) -> bool:
    return target.is_contiguous() and not target.is_conj() and not target.is_neg()
