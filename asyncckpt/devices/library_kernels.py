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
                table = np.zeros(self._library.batch_table_bytes(len(small)), dtype=np.uint8)
                self._library.copy_batch(self._device, small, holder.pinned(table), stream)
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
                None if source_rows is None else holder.pinned(source_rows),
                None if target_rows is None else holder.pinned(target_rows),
                len(rows),
                self._runtime.handle(holder.stream),
            )


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except DeviceFailure as error:
        raise failed(error, "queueing a copy") from error
