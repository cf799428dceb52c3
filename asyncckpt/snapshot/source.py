"""Sources over live memory, for a save that goes without an arena, and over what a filter returned."""

from __future__ import annotations

import numpy as np
import torch

from asyncckpt.devices.current_runtime import device_of
from asyncckpt.devices.fetch import to_host
from asyncckpt.model.row_runs import spans, window
from asyncckpt.model.source import ByteSource, RowsSource, SpanSource, as_bytes
from asyncckpt.model.table import TableCut
from asyncckpt.native import I64, U8, U64
from asyncckpt.snapshot.overlay import Overlay, rows_of_cut


class RunsSource:
    """Rows of a column's contiguous CPU storage."""

    def __init__(self, tensor: torch.Tensor, runs: I64, *, row_bytes: int) -> None:
        self._tensor = tensor
        self._runs = runs
        self._row_bytes = row_bytes

    def pieces(self, begin: int, end: int) -> U64:
        size = self._row_bytes
        first, last = begin // size, -(-end // size)
        found = spans(window(self._runs, first, last), address=self._tensor.data_ptr(), row_bytes=size)
        if len(found):
            found[0] += np.array([begin - first * size, -(begin - first * size)], dtype=np.int64).view(np.uint64)
            found[-1, 1] -= np.uint64(last * size - end)
        return found

    def release(self) -> None:
        """Nothing was made for the pieces."""


class DeviceRows(RowsSource):
    """A tensor on a device, of at least one dimension. Implements DeviceSource."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(self._supplied, row_bytes=tensor.numel() * tensor.element_size() // len(tensor))
        self._tensor = tensor
        self._values: torch.Tensor | None = None

    def device_slice(self, begin: int, end: int) -> torch.Tensor:
        return self._tensor[begin // self._row_bytes : -(-end // self._row_bytes)]

    def supply(self, values: torch.Tensor) -> None:
        self._values = values

    def _supplied(self, first: int, last: int) -> U8:
        values, self._values = self._values, None
        return as_bytes(to_host(self._tensor[first:last]) if values is None else values)


def tensor_source(tensor: torch.Tensor) -> ByteSource:
    """The source of one dense tensor."""
    tensor = tensor.detach()
    is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if device_of(tensor) is not None and tensor.numel() and (is_plain or tensor.dim()):
        # Of plain memory, just the bytes that are asked for: a single row may be all of it.
        return DeviceRows(tensor.reshape(-1).view(torch.uint8) if is_plain else tensor)
    if is_plain and tensor.is_cpu:
        return SpanSource(tensor.data_ptr(), tensor)
    if tensor.dim() == 0 or tensor.numel() == 0:
        kept = to_host(tensor)
        return SpanSource(kept.data_ptr(), kept)
    return RowsSource(lambda begin, end: as_bytes(to_host(tensor[begin:end])), row_bytes=tensor.nbytes // len(tensor))


def column_source(cut: TableCut, overlay: Overlay | None, column: str, *, begin: int, end: int) -> ByteSource:
    """The source of rows [begin, end) of a column of a cut before its fence."""
    storage = cut.column(column)
    row_bytes = max(1, storage.nbytes // max(1, len(storage)))
    if overlay is None and storage.is_cpu and storage.is_contiguous() and device_of(storage) is None:
        return RunsSource(storage, window(cut.runs, begin, end), row_bytes=row_bytes)
    return RowsSource(
        lambda first, last: as_bytes(rows_of_cut(cut, overlay, column, begin + first, begin + last)),
        row_bytes=row_bytes,
    )
