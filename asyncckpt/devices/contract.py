"""The interface of devices, so that everything above can be tested without one.

Streams and events are those of CUDA: work on one stream runs in the order in which it was queued, work on two streams
in any order, unless one waits for an event of the other.

    Runtime   the few calls of a device's runtime: streams, events, memory. CudaRuntime goes through torch.cuda
    Kernels   copies by address on one device: those of the CUDA library, or torch's own operations
    Batch     queued copies, and everything that must stay alive until they are done (batch.py)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from asyncckpt.native import I64, U64

if TYPE_CHECKING:
    from asyncckpt.devices.batch import Batch

Stream = Any
"""A stream of a runtime; only that runtime looks into it."""

ENGINE_COPIES_MAX = 256  # Of one list: a stream holds some 1,024 operations, and then the host waits for room.
LARGE_BYTES = 1 << 20  # A segment of at least this size is a copy of its own, which takes the host some microseconds.
PACK_BYTES = 64 << 20  # Device memory in which short segments are packed if kernels cannot write to the host.


class Event(Protocol):
    """A point on a stream."""

    def is_done(self) -> bool:
        """Return whether the device has reached it. Raises DeviceError if the device failed."""
        ...

    def wait(self) -> None:
        """Block this thread, not the interpreter, until the device has reached it.

        Raises DeviceError if the device failed, DeadlineError after DEVICE_DEADLINE_S.
        """
        ...


class Kernels(Protocol):
    """Copies by address on one device, queued on the stream of a batch, which is current.

    They raise DeviceError; MemoryError when there is no memory for what they need, and then the device goes on.
    """

    @property
    def name(self) -> str:
        """ "cuda" or "torch"."""
        ...

    @property
    def reaches_host(self) -> bool:
        """Whether the kernels read and write registered host memory."""
        ...

    def copy(self, segments: U64, batch: Batch) -> None:
        """Copy segments (source, target, bytes), uint64 [n, 3], in any order. Kernels reach them; none overlap."""
        ...

    def transfer(self, segments: U64, batch: Batch, *, to_host: bool) -> None:
        """Copy segments one by one between the device and the host, to the host or from it.

        Host memory may be registered in part. The call may wait for the device where it is not.
        """
        ...

    def copy_rows(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None, batch: Batch) -> None:
        """Copy row source_rows[i] of every column (source, target, row bytes) to row target_rows[i]; None: row i.

        Kernels reach all of the memory. At least one of the two is given. Target rows are distinct.
        """
        ...


@runtime_checkable
class ComparesRows(Kernels, Protocol):
    """Kernels that find changed rows on the device."""

    def fingerprint_rows(self, columns: U64, rows_count: int, target: int, batch: Batch) -> None:
        """Write fingerprints of rows over all columns (address, row bytes) to uint64 [rows_count] at `target`."""
        ...

    def copy_marked(self, columns: U64, marks: int, rows_count: int, batch: Batch) -> None:
        """Copy row r of every column (source, target, row bytes) to row r of its target where marks[r] is not 0.

        marks: address of uint8 [rows_count] on the device. Kernels reach all of the memory.
        """
        ...


class Runtime(Protocol):
    """The runtime of a kind of devices. Any thread may call the methods; they raise DeviceError."""

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the device of a tensor's storage; None if it is not on one of this runtime."""
        ...

    def devices_in_use(self) -> list[int]:
        """Return the indices of the devices on which this process may have queued work."""
        ...

    def side_stream(self, device: int) -> Stream:
        """Return this library's own stream on a device, always the same one."""
        ...

    def current_stream(self, device: int) -> Stream:
        """Return the stream on which this thread queues work for a device."""
        ...

    def device_of_stream(self, stream: Stream) -> int:
        """Return the index of the device of a stream."""
        ...

    def is_capturing(self) -> bool:
        """Return whether this thread's work is being captured into a graph."""
        ...

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        """Call `work`, now or later, with a stream as the current one, so that it queues there. Raises MemoryError."""
        ...

    def handle(self, stream: Stream) -> int:
        """Return the runtime's handle of a stream, for libraries; 0 if it has none."""
        ...

    def record(self, stream: Stream) -> Event: ...
    def hold_back(self, stream: Stream, event: Event) -> None:
        """Make what is queued on a stream from now on wait for an event; the host does not wait."""
        ...

    def new_pinned(self, bytes: int) -> torch.Tensor:
        """Return new host memory that devices can read and write, uint8 [bytes]. Raises MemoryError."""
        ...

    def new_memory(self, device: int, bytes: int) -> torch.Tensor:
        """Return new memory of a device for its side stream, uint8 [bytes]. Raises MemoryError."""
        ...

    def view(self, address: int, bytes: int, device: int | None) -> torch.Tensor:
        """Return the memory at an address as uint8 [bytes], of the host for None; the caller keeps it alive."""
        ...

    def register(self, address: int, bytes: int) -> None:
        """Pin host memory: whole pages, already touched. Raises DeviceError if the system refuses."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...

    def kernels(self, device: int) -> Kernels:
        """Return the kernels for a device, always the same object."""
        ...
