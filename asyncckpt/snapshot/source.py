"""Where the bytes of a block come from when no arena holds them: live memory, or what a filter returned.

A blocking save and a filtered save write through chunk buffers; they ask a source for the addresses of a byte range.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.chosen import device_of
from asyncckpt.devices.fetch import to_host
from asyncckpt.model.row_runs import I64, spans, window
from asyncckpt.model.source import ByteSource
from asyncckpt.model.table import TableCut
from asyncckpt.snapshot.overlay import Overlay, rows_of_cut

U64 = NDArray[np.uint64]


class SpanSource:
    """Contiguous memory; `owner` keeps it alive."""

    def __init__(self, address: int, owner: object) -> None:
        self._address = address
        self._owner = owner

    def pieces(self, begin: int, end: int) -> U64:
        return np.array([[self._address + begin, end - begin]], dtype=np.uint64)


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


class WindowSource:
    """A tensor that is not plain CPU memory: rows are brought over a window at a time. Implements PassingSource.

    `fetch(begin, end)` returns rows [begin, end) as a contiguous CPU tensor.
    """

    def __init__(self, fetch: Callable[[int, int], torch.Tensor], *, rows_count: int, row_bytes: int) -> None:
        self._fetch = fetch
        self._rows_count = rows_count
        self._row_bytes = row_bytes
        self._kept: torch.Tensor | None = None

    def pieces(self, begin: int, end: int) -> U64:
        first, last = self._rows(begin, end)
        # Chunks fill while others drain, but every copy out of a window ends before the next window is asked for.
        self._kept = self._fetch(first, last)
        return np.array([[self._kept.data_ptr() + begin - first * self._row_bytes, end - begin]], dtype=np.uint64)

    def let_go(self) -> None:
        self._kept = None

    def _rows(self, begin: int, end: int) -> tuple[int, int]:
        return begin // self._row_bytes, min(self._rows_count, -(-end // self._row_bytes))


class DeviceSource(WindowSource):
    """A tensor on a device, of at least one dimension, rows of which can be brought over with others'.

    Implements FetchedSource.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        row_bytes = tensor.numel() * tensor.element_size() // len(tensor)
        super().__init__(self._given, rows_count=len(tensor), row_bytes=row_bytes)
        self._tensor = tensor
        self._values: torch.Tensor | None = None

    def lying(self, begin: int, end: int) -> torch.Tensor:
        first, last = self._rows(begin, end)
        return self._tensor[first:last]

    def give(self, values: torch.Tensor) -> None:
        self._values = values

    def _given(self, first: int, last: int) -> torch.Tensor:
        values, self._values = self._values, None
        return to_host(self._tensor[first:last]) if values is None else values


def tensor_source(tensor: torch.Tensor) -> ByteSource:
    """The source of one dense tensor."""
    tensor = tensor.detach()
    is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if device_of(tensor) is not None and tensor.numel() and (is_plain or tensor.dim()):
        # Of plain memory, just the bytes that are asked for: a single row may be all of it.
        return DeviceSource(tensor.reshape(-1).view(torch.uint8) if is_plain else tensor)
    if is_plain and tensor.is_cpu:
        return SpanSource(tensor.data_ptr(), tensor)
    if tensor.dim() == 0 or tensor.numel() == 0:
        kept = to_host(tensor)
        return SpanSource(kept.data_ptr(), kept)
    return WindowSource(
        lambda begin, end: to_host(tensor[begin:end]),
        rows_count=tensor.shape[0],
        row_bytes=tensor.nbytes // tensor.shape[0],
    )


def column_source(cut: TableCut, overlay: Overlay | None, column: str, *, begin: int, end: int) -> ByteSource:
    """The source of rows [begin, end) of a column of a cut before its fence."""
    storage = cut.column(column)
    row_bytes = max(1, storage.nbytes // max(1, len(storage)))
    if overlay is None and storage.is_cpu and storage.is_contiguous() and device_of(storage) is None:
        return RunsSource(storage, window(cut.runs, begin, end), row_bytes=row_bytes)
    return WindowSource(
        lambda first, last: rows_of_cut(cut, overlay, column, begin + first, begin + last),
        rows_count=end - begin,
        row_bytes=row_bytes,
    )
