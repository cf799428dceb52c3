"""The CUDA library over a simulated device: its calls are checked and queued, as CUDA queues them.

What the arguments say is taken at the call, as a launch does; what they point to is read when the operation runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncckpt.devices.cuda_runtime import host_view
from asyncckpt.native import core
from asyncckpt.native.cuda import DeviceFailure

if TYPE_CHECKING:
    from tests.simulated_device.runtime import SimulatedRuntime

U64 = NDArray[np.uint64]


class Library(Protocol):
    """What LibraryKernels calls of asyncckpt.native.cuda.CudaLibrary."""

    def batch_table_bytes(self, count: int) -> int: ...
    def copy(self, device: int, segments: U64, stream: int) -> None: ...
    def copy_batch(self, device: int, segments: U64, table: int, stream: int, **more: Any) -> None: ...
    def copy_rows(
        self, device: int, columns: U64, source_rows: int | None, target_rows: int | None, count: int, stream: int
    ) -> None: ...
    def fingerprints(self, device: int, columns: U64, rows_count: int, prints: int, stream: int) -> None: ...
    def copy_marked_rows(
        self, device: int, columns: U64, marks: int, above: int, rows_count: int, stream: int
    ) -> None: ...


class PlainLibrary:
    """The same copies by the core, on the host: many seeds in little time."""

    def batch_table_bytes(self, count: int) -> int:
        return 32 * count

    def copy(self, device: int, segments: U64, stream: int) -> None:
        core.copy(segments, threads=1)

    def copy_batch(self, device: int, segments: U64, table: int, stream: int, **more: Any) -> None:
        core.copy(segments, threads=1)

    def copy_rows(
        self, device: int, columns: U64, source_rows: int | None, target_rows: int | None, count: int, stream: int
    ) -> None:
        core.copy_rows(columns, _rows_at(source_rows, count), _rows_at(target_rows, count), threads=1)

    def fingerprints(self, device: int, columns: U64, rows_count: int, prints: int, stream: int) -> None:
        found = core.fingerprints(np.ascontiguousarray(columns), rows_count)
        host_view(prints, 8 * rows_count).numpy()[:] = found.view(np.uint8)

    def copy_marked_rows(self, device: int, columns: U64, marks: int, above: int, rows_count: int, stream: int) -> None:
        rows = np.flatnonzero(host_view(marks, rows_count).numpy() > above)
        core.copy_rows(columns, rows, rows, threads=1)


class QueuedLibrary:
    """A Library whose calls take effect when their turn has come on their stream."""

    def __init__(self, runtime: SimulatedRuntime, library: Library) -> None:
        self._runtime, self._library = runtime, library

    def batch_table_bytes(self, count: int) -> int:
        return self._library.batch_table_bytes(count)

    def copy(self, device: int, segments: U64, stream: int) -> None:
        """Copies of CUDA take any host memory, but wait for the device where it is not pinned."""
        segments = segments.copy()
        spans = np.concatenate([segments[:, [0, 2]], segments[:, [1, 2]]])
        on_host = spans[~self._runtime.is_on_device(spans, device)]
        try:
            is_pinned = self._runtime.is_pinned_for_engine(on_host)
        except RuntimeError as error:
            raise DeviceFailure(str(error), name="cudaErrorInvalidValue", number=1, item=0) from error
        for number in range(len(segments)):  # Each is an operation of its own.
            one = segments[number : number + 1]
            self._queue(device, stream, "copy", partial(self._library.copy, device, one, stream))
        if not is_pinned:
            self._runtime.record(self._runtime.stream_of(stream)).wait()

    def copy_batch(self, device: int, segments: U64, table: int, stream: int, **more: Any) -> None:
        segments = segments.copy()
        spans = np.concatenate([segments[:, [0, 2]], segments[:, [1, 2]]])
        table_bytes = self._library.batch_table_bytes(len(segments))
        self._check_pinned(table, table_bytes)
        # The launch reads its table when it runs, so nobody may use that memory for something else until then.
        canary = host_view(table, table_bytes).numpy()
        canary[:] = np.frombuffer(self._runtime.schedule.random.randbytes(table_bytes), dtype=np.uint8)
        expected = canary.tobytes()

        def run() -> None:
            if canary.tobytes() != expected:
                raise self._runtime.schedule.fault("the table of a launch was overwritten before it ran")
            self._library.copy_batch(device, segments, table, stream, **more)

        self._queue(device, stream, "copy_batch", run, spans)

    def copy_rows(
        self, device: int, columns: U64, source_rows: int | None, target_rows: int | None, count: int, stream: int
    ) -> None:
        columns = columns.copy()
        for address in (source_rows, target_rows):
            if address is not None:
                self._runtime.check_reachable(np.array([[address, 8 * count]]), device, "a list of rows")

        def run() -> None:
            spans = []
            for side, address in enumerate((source_rows, target_rows)):
                end = count if address is None else int(_rows_at(address, count).max(initial=-1)) + 1
                spans.append(np.stack([columns[:, side], columns[:, 2] * np.uint64(end)], axis=1))
            self._runtime.check_reachable(np.concatenate(spans), device, "copy_rows")
            self._library.copy_rows(device, columns, source_rows, target_rows, count, stream)

        self._queue(device, stream, "copy_rows", run)

    def fingerprints(self, device: int, columns: U64, rows_count: int, prints: int, stream: int) -> None:
        columns = columns.copy()
        sources = np.stack([columns[:, 0], columns[:, 1] * np.uint64(rows_count)], axis=1)
        spans = np.concatenate([sources, np.array([[prints, 8 * rows_count]], dtype=np.uint64)])
        work = partial(self._library.fingerprints, device, columns, rows_count, prints, stream)
        self._queue(device, stream, "fingerprints", work, spans)

    def copy_marked_rows(self, device: int, columns: U64, marks: int, above: int, rows_count: int, stream: int) -> None:
        columns = columns.copy()
        spans = [np.array([[marks, rows_count]], dtype=np.uint64)]
        for side in (0, 1):
            spans.append(np.stack([columns[:, side], columns[:, 2] * np.uint64(rows_count)], axis=1))
        work = partial(self._library.copy_marked_rows, device, columns, marks, above, rows_count, stream)
        self._queue(device, stream, "copy_marked_rows", work, np.concatenate(spans))

    def _queue(self, device: int, stream: int, name: str, work: Callable[[], object], spans: U64 | None = None) -> None:
        """spans: what a kernel touches, (address, bytes) [n, 2]; None: that is looked at elsewhere."""
        runtime = self._runtime
        try:
            runtime.call(device)
        except RuntimeError as error:
            raise DeviceFailure(str(error), name="cudaErrorIllegalAddress", number=700, item=0) from error

        def checked() -> None:  # Both when it is launched and when it runs: memory may be gone by then.
            if spans is not None:
                runtime.check_reachable(spans, device, name)
            work()

        if spans is not None:
            runtime.check_reachable(spans, device, name)
        runtime.queue(runtime.stream_of(stream), checked, name=name)

    def _check_pinned(self, address: int, bytes: int) -> None:
        if not self._runtime.is_pinned(np.array([[address, bytes]])):
            raise self._runtime.schedule.fault(f"memory at {address:#x} is not pinned")


def _rows_at(address: int | None, count: int) -> Any:
    return None if address is None else host_view(address, 8 * count).numpy().view(np.int64)


def library_on_cpu(devices_count: int) -> Library:
    """The CUDA library compiled for the CPU."""
    import ctypes

    from asyncckpt.native.cuda import load_cuda_library
    from tests.cuda_on_cpu import cuda_on_cpu_library

    path = cuda_on_cpu_library()
    ctypes.CDLL(str(path)).cuda_on_cpu_set_devices(devices_count)
    library: Library = load_cuda_library(path)
    return library
