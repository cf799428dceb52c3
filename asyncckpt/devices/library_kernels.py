"""Kernels of the CUDA library: long segments by the copy engine, short ones and rows by kernels, many per launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from asyncckpt.devices.batch import failed
from asyncckpt.devices.contract import I64, U64, Holder, Runtime
from asyncckpt.devices.sizes import LARGE_BYTES
from asyncckpt.native.cuda import CudaLibrary, DeviceFailure


class LibraryKernels:
    """Implements contract.Kernels."""

    name = "cuda"
    reaches_host = True

    def __init__(self, runtime: Runtime, device: int, library: CudaLibrary) -> None:
        self._runtime = runtime
        self._device = device
        self._library = library

    def copy(self, segments: U64, holder: Holder) -> None:
        stream = self._runtime.handle(holder.stream)
        is_large = segments[:, 2] >= LARGE_BYTES
        large, small = np.ascontiguousarray(segments[is_large]), np.ascontiguousarray(segments[~is_large])
        with _failing():
            if len(small):
                size = self._library.batch_table_bytes(len(small))
                table, device_table = holder.new_pinned(size), holder.device_memory(size)
                self._library.copy_batch(self._device, small, table, stream, device_table=device_table)
            if len(large):
                self._library.copy(self._device, large, stream)

    def transfer(self, segments: U64, holder: Holder, *, to_host: bool) -> None:
        with _failing():
            self._library.copy(self._device, segments, self._runtime.handle(holder.stream))

    def copy_rows(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None, holder: Holder) -> None:
        rows = target_rows if source_rows is None else source_rows
        assert rows is not None
        with _failing():
            self._library.copy_rows(
                self._device,
                columns,
                self._on_device(source_rows, holder),
                self._on_device(target_rows, holder),
                len(rows),
                self._runtime.handle(holder.stream),
            )

    def _on_device(self, rows: I64 | None, holder: Holder) -> int | None:
        """The address of row numbers on the device: every row of every column is looked up there."""
        if rows is None or not len(rows):
            return None
        address = holder.device_memory(rows.nbytes)
        segments = np.array([[holder.pinned(rows), address, rows.nbytes]], dtype=np.uint64)
        self._library.copy(self._device, segments, self._runtime.handle(holder.stream))
        return address


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except DeviceFailure as error:
        raise failed(error, "queueing a copy") from error
