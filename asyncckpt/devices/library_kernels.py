"""The kernels of the CUDA library. Kernels copy many short segments or rows at once, the copy engine long segments."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from asyncckpt.devices.batch import Batch, failing, not_pinned
from asyncckpt.devices.contract import ENGINE_COPIES_MAX, LARGE_BYTES, Runtime
from asyncckpt.errors import Words
from asyncckpt.native import I64, U64
from asyncckpt.native.cuda import CudaLibrary, DeviceFailure

_queueing = partial(failing, "queueing a copy", on=DeviceFailure)


class LibraryKernels:
    """Implements contract.ComparesRows."""

    name = "cuda"
    reaches_host = True

    def __init__(self, runtime: Runtime, device: int, library: CudaLibrary) -> None:
        self._runtime = runtime
        self._device = device
        self._library = library

    def copy(self, segments: U64, batch: Batch) -> None:
        stream = self._runtime.handle(batch.stream)
        is_large = _are_for_engine(segments, batch)
        large, small = np.ascontiguousarray(segments[is_large]), np.ascontiguousarray(segments[~is_large])
        with _queueing():
            if len(small):
                size = self._library.batch_table_bytes(len(small))
                table = batch.new_pinned(size)
                self._library.copy_batch(self._device, small, table, stream, device_table=_near_table(size, batch))
            if len(large):
                self._library.copy(self._device, batch.within_pinned(large), stream)

    def transfer(self, segments: U64, batch: Batch, *, to_host: bool) -> None:
        with _queueing():
            self._library.copy(self._device, batch.within_pinned(segments), self._runtime.handle(batch.stream))

    def copy_rows(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None, batch: Batch) -> None:
        rows = target_rows if source_rows is None else source_rows
        assert rows is not None
        with _queueing():
            sources = self._on_device(source_rows, batch)
            self._library.copy_rows(
                self._device,
                columns,
                sources,
                sources if target_rows is source_rows else self._on_device(target_rows, batch),
                len(rows),
                self._runtime.handle(batch.stream),
            )

    def new_stream(self) -> int:
        """Return the handle of a stream that nobody else has."""
        with failing("making a stream", on=DeviceFailure):
            return self._library.new_stream(self._device)

    def beside_captures(self) -> AbstractContextManager[None]:
        """Let this thread wait and allocate while another one captures a graph."""
        return self._library.beside_captures()

    def register(self, address: int, bytes: int) -> None:
        """See Runtime.register."""
        try:
            self._library.host_register(self._device, address, bytes)
        except DeviceFailure as error:
            raise not_pinned(bytes, found=Words(error)) from error

    def unregister(self, address: int) -> None:
        """See Runtime.unregister."""
        with _queueing():
            self._library.host_unregister(self._device, address)

    def fingerprint_rows(self, columns: U64, rows_count: int, target: int, batch: Batch) -> None:
        with _queueing():
            self._library.fingerprints(self._device, columns, rows_count, target, self._runtime.handle(batch.stream))

    def copy_marked(self, columns: U64, marks: int, rows_count: int, batch: Batch) -> None:
        with _queueing():
            self._library.copy_marked_rows(
                self._device, columns, marks, 0, rows_count, self._runtime.handle(batch.stream)
            )

    def _on_device(self, rows: I64 | None, batch: Batch) -> int | None:
        """Return the address of row numbers on the device, where every row of every column needs them."""
        if rows is None or not len(rows):
            return None
        try:
            address = batch.device_memory(rows.nbytes)
        except MemoryError:  # Slower: read over the bus.
            return batch.pinned(rows)
        segments = np.array([[batch.pinned(rows), address, rows.nbytes]], dtype=np.uint64)
        self._library.copy(self._device, segments, self._runtime.handle(batch.stream))
        return address


def _are_for_engine(segments: U64, batch: Batch) -> NDArray[np.bool_]:
    """Return which segments the copy engine copies, bool [n]: the longest ones, none of those within the device."""
    sizes = segments[:, 2]
    is_large: NDArray[np.bool_] = sizes >= LARGE_BYTES
    begin, end = int(segments[:, 1].min(initial=1 << 63)), int((segments[:, 1] + sizes).max(initial=0))
    if batch.is_own(begin, end - begin):
        return np.zeros(len(segments), dtype=np.bool_)
    if np.count_nonzero(is_large) > ENGINE_COPIES_MAX:
        is_large[np.argsort(sizes, kind="stable")[:-ENGINE_COPIES_MAX]] = False
    return is_large


def _near_table(bytes: int, batch: Batch) -> int:
    """Return device memory for a table of segments; 0 without any: then it is read over the bus."""
    try:
        return batch.device_memory(bytes)
    except MemoryError:
        return 0
