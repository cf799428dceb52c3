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
    """A tensor that is not plain CPU memory: rows are brought over a window at a time.

    `fetch(begin, end)` returns rows [begin, end) as a contiguous CPU tensor.
    """

    def __init__(self, fetch: Callable[[int, int], torch.Tensor], *, rows_count: int, row_bytes: int) -> None:
        self._fetch = fetch
        self._rows_count = rows_count
        self._row_bytes = row_bytes
        self._kept: list[torch.Tensor] = []

    def pieces(self, begin: int, end: int) -> U64:
        size = self._row_bytes
        first, last = begin // size, min(self._rows_count, -(-end // size))
        fetched = self._fetch(first, last)
        # Chunks fill while others drain, but every copy out of a window ends before the next window is asked for.
        self._kept = [fetched]
        return np.array([[fetched.data_ptr() + begin - first * size, end - begin]], dtype=np.uint64)


def tensor_source(tensor: torch.Tensor) -> ByteSource:
    """The source of one dense tensor."""
    tensor = tensor.detach()
    is_plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if is_plain and device_of(tensor) is None:
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
