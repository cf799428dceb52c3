"""The bytes of filtered blocks, made when they are asked for: chosen rows side by side, encoded rows, or held bytes.

Whoever writes asks for CHUNK_BYTES in all, copies them, and goes on; so what was handed out is kept until that much
more was asked for, and no longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.native import core
from asyncckpt.options import CHUNK_BYTES

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

# Rows [begin, end) of a column as a contiguous CPU tensor, valid until its next call.
Rows = Callable[[int, int], torch.Tensor]


class RecentWindows:
    """Keeps the memory alive that sources of one save have handed out and that may not be copied yet."""

    def __init__(self) -> None:
        self._kept: deque[tuple[object, int]] = deque()
        self._bytes = 0

    def keep(self, owner: object, bytes: int) -> None:
        """`bytes` of owner's memory are handed out."""
        self._kept.append((owner, bytes))
        self._bytes += bytes
        while self._bytes - self._kept[0][1] > CHUNK_BYTES:
            self._bytes -= self._kept.popleft()[1]


class RowsSource:
    """Rows of known size: `fetch(begin, end)` gives rows [begin, end) of them, uint8 contiguous."""

    def __init__(self, fetch: Callable[[int, int], U8], *, row_bytes: int, recent: RecentWindows) -> None:
        self._fetch = fetch
        self._row_bytes = row_bytes
        self._recent = recent

    def pieces(self, begin: int, end: int) -> U64:
        first = begin // self._row_bytes
        raw = self._fetch(first, -(-end // self._row_bytes))
        self._recent.keep(raw, end - begin)
        return _piece(raw, begin - first * self._row_bytes, end - begin)


class HeldSource:
    """Bytes that were made beforehand, because their number had to be known."""

    def __init__(self, raw: U8) -> None:
        self._raw = raw

    def pieces(self, begin: int, end: int) -> U64:
        return _piece(self._raw, begin, end - begin)


class LastTensor:
    """Fetches dense tensors and remembers the last one: the blocks of a tensor are written one behind the other."""

    def __init__(self) -> None:
        self._number = -1
        self._tensor: torch.Tensor | None = None

    def get(self, number: int, fetch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `fetch` gives for tensor `number`."""
        if self._tensor is None or number != self._number:
            self._tensor = None  # First let go of the one before.
            self._number, self._tensor = number, fetch()
        return self._tensor


def gather(rows: Rows, positions: I64, *, window_rows: int) -> torch.Tensor:
    """Rows at ascending positions side by side, in new memory; the column is fetched by window_rows at most."""
    gathered: torch.Tensor | None = None
    for begin, end in stretches(positions, window_rows):
        first = int(positions[begin])
        window = rows(first, int(positions[end - 1]) + 1)
        if gathered is None:
            gathered = torch.empty((len(positions), *window.shape[1:]), dtype=window.dtype)
        row_bytes = gathered.nbytes // len(positions)
        if row_bytes:
            target = gathered.data_ptr() + begin * row_bytes
            columns = np.array([[window.data_ptr(), target, row_bytes]], dtype=np.uint64)
            core.copy_rows(columns, np.ascontiguousarray(positions[begin:end] - first), None)
    return rows(0, 0).clone() if gathered is None else gathered


def stretches(positions: I64, window_rows: int) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of ascending positions, each within window_rows of the first one."""
    begin = 0
    while begin < len(positions):
        end = int(np.searchsorted(positions, positions[begin] + window_rows))
        yield begin, end
        begin = end


def _piece(raw: U8, begin: int, bytes: int) -> U64:
    return np.array([[raw.ctypes.data + begin, bytes]], dtype=np.uint64)
