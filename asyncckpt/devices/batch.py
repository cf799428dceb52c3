"""Queued copies of one device, and what they need until they are done.

Everything that a queued copy reads or writes has to stay where it is until the device has come past it: descriptors in
pinned memory, scratch memory, tensors that their owner may drop meanwhile. A Batch holds all of it until `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.contract import Event, Kernels, Runtime, Stream
from asyncckpt.errors import DeadlineError, DeviceError

_ALIGNMENT = 256
_PINNED_UNIT_BYTES = 1 << 20

_abandoned: list[Batch] = []


class Batch:
    """The copies of one save or load on one device, queued on its side stream. Implements contract.Holder.

    reachable: host memory (address, bytes) that is registered.
    """

    def __init__(self, runtime: Runtime, device: int, *, reachable: Sequence[tuple[int, int]] = ()) -> None:
        self.runtime = runtime
        self.device = device
        self._reachable = list(reachable)
        self._own: list[tuple[int, int]] = []
        self._kept: list[object] = []
        self._pinned: torch.Tensor | None = None
        self._pinned_used = 0
        self._afterwards: list[Callable[[], None]] = []

    @property
    def stream(self) -> Stream:
        return self.runtime.side_stream(self.device)

    @property
    def kernels(self) -> Kernels:
        return self.runtime.kernels(self.device)

    def follow(self, streams: Sequence[Stream] = ()) -> None:
        """Begin behind all that is queued on this thread's current stream of the device, and on `streams`."""
        for stream in (self.runtime.current_stream(self.device), *streams):
            self.runtime.hold_back(self.stream, self.runtime.record(stream))

    def enqueue(self, work: Callable[[], None]) -> None:
        """Queue what `work` queues on the side stream."""
        self.runtime.enqueue(self.stream, work)

    def record(self) -> Event:
        return self.runtime.record(self.stream)

    def keep(self, *things: object) -> None:
        """Hold things until the batch is done."""
        self._kept += things

    def pinned(self, array: NDArray[Any]) -> int:
        """As contract.Holder."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin = -(-self._pinned_used // _ALIGNMENT) * _ALIGNMENT
        if self._pinned is None or begin + raw.size > self._pinned.numel():
            # Lists of a save are few and short: they share one piece of memory as long as they fit.
            self._pinned = self.runtime.new_pinned(max(_PINNED_UNIT_BYTES, raw.size))
            self._kept.append(self._pinned)
            begin = 0
        self._pinned_used = begin + raw.size
        self._pinned.numpy()[begin : begin + raw.size] = raw
        return int(self._pinned.data_ptr()) + begin

    def new_pinned(self, bytes: int) -> int:
        """Address of fresh pinned memory."""
        memory = self.runtime.new_pinned(max(1, bytes))
        self._kept.append(memory)
        return int(memory.data_ptr())

    def device_memory(self, bytes: int) -> int:
        """As contract.Holder. MemoryError."""
        memory = self.runtime.new_memory(self.device, max(1, bytes))
        self._kept.append(memory)
        self._own.append((int(memory.data_ptr()), memory.numel()))
        return int(memory.data_ptr())

    def is_reachable(self, address: int, bytes: int) -> bool:
        """Whether kernels can write to this memory: it is the device's, from this batch, or registered host memory."""
        ranges = self._own + (self._reachable if self.kernels.reaches_host else [])
        return any(begin <= address and address + bytes <= begin + size for begin, size in ranges)

    def afterwards(self, work: Callable[[], None]) -> None:
        """Do work on the host, in the background, when all of the batch is done; in the order of these calls."""
        self._afterwards.append(work)

    def settle(self, event: Event) -> None:
        """Wait for the last event of the batch, do what the host was left to do, and let everything go.

        Interrupted, it lets nothing go, and may be called again. DeadlineError: everything is held for ever, because
        the device may still use it.
        """
        try:
            event.wait()
            while self._afterwards:
                self._afterwards[0]()
                del self._afterwards[0]
        except DeadlineError:
            self.abandon()
            raise
        except Exception:
            self._let_go()
            raise
        self._let_go()

    def abandon(self) -> None:
        """Hold everything until the process ends."""
        _abandoned.append(self)

    def _let_go(self) -> None:
        self._afterwards.clear()
        self._kept.clear()
        self._pinned = None


def failed(error: BaseException, what: str) -> DeviceError:
    """What a runtime's own error becomes."""
    return DeviceError(
        f"the device failed in {what}: {error}",
        hint="a CUDA error stays with its process: save what is on the host, and start anew from the last checkpoint",
    )
