"""Queued copies of one device, and the memory that they need until they are done.

Everything that a queued copy reads or writes must stay in place until the device has executed it: descriptors in pinned
memory, scratch memory, tensors that their owner may drop meanwhile. A Batch keeps all of it alive until `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.contract import Event, Kernels, Runtime, Stream
from asyncckpt.errors import DeadlineError, DeviceError
from asyncckpt.native import U64

_ALIGNMENT = 256
_PINNED_UNIT_BYTES = 1 << 20
_CUDA_OUT_OF_MEMORY, _NO_MEMORY = 2, "CUDA error: out of memory"  # In older versions torch has the text alone.

_abandoned: list[Batch] = []


class Batch:
    """The copies of one save or load on one device, queued on its side stream.

    reachable: registered host memory, (address, bytes).
    """

    def __init__(self, runtime: Runtime, device: int, *, reachable: Sequence[tuple[int, int]] = ()) -> None:
        self.runtime = runtime
        self.device = device
        self._pinned_pieces = [piece for piece in reachable if piece[1]]
        self._reachable = _joined(self._pinned_pieces)
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
        """Wait, on the side stream, for this thread's current stream of the device and for `streams`."""
        for stream in (self.runtime.current_stream(self.device), *streams):
            self.runtime.hold_back(self.stream, self.runtime.record(stream))

    def enqueue(self, work: Callable[[], None]) -> None:
        """Let `work` queue on the side stream."""
        self.runtime.enqueue(self.stream, work)

    def record(self) -> Event:
        return self.runtime.record(self.stream)

    def keep(self, *things: object) -> None:
        """Keep objects alive until the batch is done."""
        self._kept += things

    def pinned(self, array: NDArray[Any]) -> int:
        """Copy an array into pinned memory that the device can read; return its address."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin = -(-self._pinned_used // _ALIGNMENT) * _ALIGNMENT
        if self._pinned is None or begin + raw.size > self._pinned.numel():
            # A save has few and short arrays: they share one allocation while they fit.
            self._pinned = self.runtime.new_pinned(max(_PINNED_UNIT_BYTES, raw.size))
            self._kept.append(self._pinned)
            begin = 0
        self._pinned_used = begin + raw.size
        self._pinned.numpy()[begin : begin + raw.size] = raw
        return int(self._pinned.data_ptr()) + begin

    def new_pinned(self, bytes: int) -> int:
        """Return the address of new pinned memory."""
        memory = self.runtime.new_pinned(max(1, bytes))
        self._kept.append(memory)
        return int(memory.data_ptr())

    def device_memory(self, bytes: int) -> int:
        """Return the address of new memory on the device, aligned to 256 bytes. Raises MemoryError."""
        memory = self.runtime.new_memory(self.device, max(1, bytes))
        self._kept.append(memory)
        self._own.append((int(memory.data_ptr()), memory.numel()))
        return int(memory.data_ptr())

    def is_own(self, address: int, bytes: int) -> bool:
        """Return whether memory is device memory of this batch."""
        return any(begin <= address and address + bytes <= begin + size for begin, size in self._own)

    def is_reachable(self, address: int, bytes: int) -> bool:
        """Return whether kernels can write to memory: device memory of this batch, or registered host memory."""
        ranges = self._own + (self._reachable if self.kernels.reaches_host else [])
        return any(begin <= address and address + bytes <= begin + size for begin, size in ranges)

    def within_pinned(self, segments: U64) -> U64:
        """Return segments (source, target, bytes), uint64 [n, 3], cut where pinned memory begins and ends.

        The copy engine refuses host memory of which only a part is pinned, or in two pieces.
        """
        for border in sorted({place for begin, size in self._pinned_pieces for place in (begin, begin + size)}):
            for side in (0, 1):
                begins = segments[:, side]
                crosses = (begins < border) & (border < begins + segments[:, 2])
                if crosses.any():
                    heads, tails = segments.copy(), segments[crosses]
                    heads[crosses, 2] = np.uint64(border) - begins[crosses]
                    tails[:, :2] += heads[crosses, 2:]
                    tails[:, 2] -= heads[crosses, 2]
                    segments = np.concatenate([heads, tails])
        return segments

    def afterwards(self, work: Callable[[], None]) -> None:
        """Run work on the host, in the background, after the batch is done; in the order of these calls."""
        self._afterwards.append(work)

    def settle(self, event: Event) -> None:
        """Wait for the last event of the batch, run the work left to the host, and release everything.

        After an interrupt, nothing is released and it may be called again. After a DeadlineError, everything is kept
        for ever, because the device may still use it.
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
            self._release()
            raise
        self._release()

    def abandon(self) -> None:
        """Keep everything alive until the process ends."""
        _abandoned.append(self)

    def _release(self) -> None:
        self._afterwards.clear()
        self._kept.clear()
        self._pinned = None


def _joined(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (address, bytes), those that touch as one: so kernels see them, but not the copy engine."""
    found: list[tuple[int, int]] = []
    for begin, size in sorted(pieces):
        if found and sum(found[-1]) == begin:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((begin, size))
    return found


def settle_all(running: Sequence[tuple[Batch, Event]]) -> list[BaseException]:
    """Settle every batch with its last event, even if some fail; return what was raised, interrupts first.

    An interrupt does not end the wait: nothing may be freed before the devices are done.
    """
    left, interrupts, failures = list(running), list[BaseException](), list[BaseException]()
    while left:
        batch, event = left[0]
        try:
            batch.settle(event)
        except Exception as error:
            failures.append(error)
        except BaseException as error:
            interrupts.append(error)
            continue
        del left[0]
    return interrupts + failures


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of a runtime says that there is no memory: then the device goes on."""
    number = getattr(error, "number", getattr(error, "error_code", None))  # Of the CUDA library, of torch.
    return isinstance(error, torch.cuda.OutOfMemoryError) or number == _CUDA_OUT_OF_MEMORY or _NO_MEMORY in str(error)


def failed(error: BaseException, what: str) -> DeviceError:
    """Return the DeviceError for an error of a runtime."""
    return DeviceError(
        f"the device failed in {what}: {error}",
        hint="a CUDA error stays with its process: save what is on the host, and restart from the last checkpoint",
    )


@contextmanager
def failing(what: str, *, on: type[Exception] = RuntimeError) -> Iterator[None]:
    """Turn errors of a runtime into DeviceError, or into MemoryError where memory is all that is missing."""
    try:
        yield
    except on as error:
        if is_out_of_memory(error):
            raise MemoryError(f"no memory in {what}: {error}") from error
        raise failed(error, what) from error


def not_pinned(bytes: int, *, found: str) -> DeviceError:
    """Return the DeviceError for host memory that the system refuses to pin."""
    return DeviceError(
        f"{bytes} bytes of host memory could not be pinned",
        found=found,
        hint="set DeviceOptions(pinned_memory_limit=...) lower; copies from the device are slower then",
    )
