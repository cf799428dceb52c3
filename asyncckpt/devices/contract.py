"""What the library asks of devices, so that everything above can be tested without one.

Streams and events mean what CUDA means by them: work on one stream goes in the order in which it was queued, work on
two streams in any order, unless one waits for an event of the other.

    Runtime   the few calls of a device's runtime: streams, events, memory. CudaRuntime goes through torch.cuda
    Kernels   copies by address, on one device: those of the CUDA library, or torch's own operations
    Batch     queued copies, and all that has to live until they are done (batch.py)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray

from asyncckpt.native import I64, U64

Stream = Any
"""A stream of a runtime; only that runtime looks into it."""


class Event(Protocol):
    """A point on a stream."""

    def is_done(self) -> bool:
        """Whether the device has come there. DeviceError when it failed."""
        ...

    def wait(self) -> None:
        """Block this thread, not the interpreter, until the device has come there. DeviceError when it failed,
        DeadlineError after DEVICE_DEADLINE_S.
        """
        ...


class Kernels(Protocol):
    """Copies by address on one device. Calls queue work on the holder's stream, which is current. DeviceError."""

    @property
    def name(self) -> str:
        """Which these are, "cuda" or "torch"."""
        ...

    @property
    def reaches_host(self) -> bool:
        """Whether they read and write registered host memory."""
        ...

    def copy(self, segments: U64, holder: Holder) -> None:
        """Copy segments (source, target, bytes), uint64 [n, 3], all within reach, in any order; they do not overlap."""
        ...

    def transfer(self, segments: U64, holder: Holder, *, to_host: bool) -> None:
        """Copy segments between the device and the host, one by one, to the host or from it.

        The call may wait for the device where the host's memory is not registered.
        """
        ...

    def copy_rows(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None, holder: Holder) -> None:
        """Copy row source_rows[i] of every column (source, target, row bytes) to row target_rows[i]; None: row i.

        All memory is within reach. At least one of the two is given. Target rows are distinct.
        """
        ...


@runtime_checkable
class ComparesRows(Kernels, Protocol):
    """Kernels that find out on the device which rows have changed."""

    def print_rows(self, columns: U64, rows_count: int, target: int, holder: Holder) -> None:
        """Write a print of each row of all columns (address, row bytes) to uint64 [rows_count] at `target`."""
        ...

    def copy_marked(self, columns: U64, marks: int, rows_count: int, holder: Holder) -> None:
        """Copy row r of every column (source, target, row bytes) to row r of its target where marks[r] is not 0.

        marks: address of uint8 [rows_count] on the device. All memory is within reach.
        """
        ...


class Holder(Protocol):
    """What keeps memory alive until queued work is done; a Batch, as kernels see it."""

    @property
    def stream(self) -> Stream: ...
    def pinned(self, array: NDArray[Any]) -> int:
        """Copy an array into pinned memory that the device can read; return its address."""
        ...

    def new_pinned(self, bytes: int) -> int:
        """Address of fresh pinned memory."""
        ...

    def device_memory(self, bytes: int) -> int:
        """Address of fresh memory on the device, aligned to 256 bytes."""
        ...


class Runtime(Protocol):
    """A kind of devices and their runtime. Methods may be called from any thread. DeviceError."""

    @property
    def name(self) -> str: ...
    def device_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the device that a tensor's storage is on; None: it is on none of this runtime's."""
        ...

    def devices_in_use(self) -> list[int]:
        """The numbers of the devices on which this process may have queued work."""
        ...

    def side_stream(self, device: int) -> Stream:
        """The stream of our own on a device, always the same one."""
        ...

    def current_stream(self, device: int) -> Stream:
        """The stream on which this thread queues work for a device."""
        ...

    def device_of_stream(self, stream: Stream) -> int:
        """The number of the device of a stream."""
        ...

    def is_capturing(self) -> bool:
        """Whether this thread's work is being recorded into a graph instead of being done."""
        ...

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        """Queue what `work` queues on a stream: it is called with that one current, at once or later."""
        ...

    def handle(self, stream: Stream) -> int:
        """The runtime's own handle of a stream, for libraries; 0 where it has none."""
        ...

    def record(self, stream: Stream) -> Event: ...
    def hold_back(self, stream: Stream, event: Event) -> None:
        """What is queued on a stream from now on waits for an event; the host does not."""
        ...

    def new_pinned(self, bytes: int) -> torch.Tensor:
        """Fresh host memory that devices read and write, uint8 [bytes]."""
        ...

    def new_memory(self, device: int, bytes: int) -> torch.Tensor:
        """Fresh memory of a device for use on its side stream, uint8 [bytes]. MemoryError when there is none."""
        ...

    def view(self, address: int, bytes: int, device: int | None) -> torch.Tensor:
        """Memory at an address as uint8 [bytes]; device None: of the host. The caller keeps it alive."""
        ...

    def register(self, address: int, bytes: int) -> None:
        """Pin host memory: whole pages, touched. DeviceError when the system refuses."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...

    def kernels(self, device: int) -> Kernels:
        """The kernels for a device, always the same ones."""
        ...
