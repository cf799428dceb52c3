"""Where the bytes of a block come from when no arena holds them.

The writer of blocks asks every source for what the next chunk needs of it, copies all of that, and releases each
source. So memory that a source makes for a chunk lives as long as the copy takes, and no longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray


class ByteSource(Protocol):
    """The bytes of one block, in pieces that can be read by address. Ranges are asked for in ascending order."""

    def pieces(self, begin: int, end: int) -> NDArray[np.uint64]:
        """Return (address, bytes) of the byte range [begin, end), uint64 [k, 2]; valid until `release`."""
        ...

    def release(self) -> None:
        """Free what holds the pieces that were given: all have been copied."""
        ...


@runtime_checkable
class RestartingSource(ByteSource, Protocol):
    """A source whose first range need not begin at its start."""

    def restart(self, at: int) -> int:
        """Return the last place up to `at` where the first range may begin; what is before it is not checked."""
        ...


class SpanSource:
    """Contiguous memory; `owner` keeps it alive."""

    def __init__(self, address: int, owner: object) -> None:
        self._address = address
        self._owner = owner

    def pieces(self, begin: int, end: int) -> NDArray[np.uint64]:
        return np.array([[self._address + begin, end - begin]], dtype=np.uint64)

    def release(self) -> None:
        """Nothing was made for the pieces."""


class RowsSource:
    """Rows that are made when they are asked for: `fetch(begin, end)` returns rows [begin, end), contiguous uint8."""

    def __init__(self, fetch: Callable[[int, int], NDArray[np.uint8]], *, row_bytes: int) -> None:
        self._fetch = fetch
        self._row_bytes = row_bytes
        self._held: NDArray[np.uint8] | None = None

    def pieces(self, begin: int, end: int) -> NDArray[np.uint64]:
        first = begin // self._row_bytes
        self._held = self._fetch(first, -(-end // self._row_bytes))
        return np.array([[self._held.ctypes.data + begin - first * self._row_bytes, end - begin]], dtype=np.uint64)

    def release(self) -> None:
        self._held = None


class MadeBytes:
    """`size` bytes that are made one array after the other, for byte ranges that ascend without gaps.

    What makes them goes with the last of them: it holds a window, and there may be thousands of sources.
    """

    def __init__(self, made: Iterator[NDArray[np.uint8]], size: int) -> None:
        self._arrays = made
        self._size = size
        self._held: deque[tuple[int, NDArray[np.uint8]]] = deque()  # (first byte, bytes)
        self._made = 0
        self._given = 0

    def pieces(self, begin: int, end: int) -> NDArray[np.uint64]:
        while self._made < end:
            found = next(self._arrays)
            self._held.append((self._made, found))
            self._made += len(found)
        self._given = end
        spans = [
            (raw.ctypes.data + max(0, begin - at), min(end, at + len(raw)) - max(begin, at)) for at, raw in self._held
        ]
        return np.array(spans, dtype=np.uint64).reshape(-1, 2)

    def release(self) -> None:
        while self._held and self._held[0][0] + len(self._held[0][1]) <= self._given:
            self._held.popleft()
        if self._given == self._size:
            self._arrays = iter(())


class DeviceRows(RowsSource):
    """Rows of a tensor on a device, of at least one dimension.

    What several of these are asked for next is fetched together, and supplied before they are asked for `pieces`.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(self._supplied, row_bytes=tensor.numel() * tensor.element_size() // len(tensor))
        self._tensor = tensor
        self._values: torch.Tensor | None = None

    def device_slice(self, begin: int, end: int) -> torch.Tensor:
        """Return the rows on the device in which the bytes [begin, end) lie."""
        return self._tensor[begin // self._row_bytes : -(-end // self._row_bytes)]

    def supply(self, values: torch.Tensor) -> None:
        """Take the values of `device_slice(begin, end)`, contiguous on the CPU; `pieces(begin, end)` comes next."""
        self._values = values

    def _supplied(self, first: int, last: int) -> NDArray[np.uint8]:
        values, self._values = self._values, None
        assert values is not None
        return as_bytes(values)


def one_behind_the_other(pieces: NDArray[np.uint64], target: int) -> NDArray[np.uint64]:
    """Return (source, target, bytes) of pieces that land so from an address on, uint64 [n, 3]."""
    segments = np.empty((len(pieces), 3), dtype=np.uint64)
    segments[:, 0] = pieces[:, 0]
    segments[:, 1] = np.cumsum(pieces[:, 1]) - pieces[:, 1] + np.uint64(target)
    segments[:, 2] = pieces[:, 1]
    return segments


def byte_view(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, uint8 [n]; shares its memory."""
    # A contiguous tensor of one number, or of none, may have any strides, with which torch cannot view it as bytes.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


def as_bytes(values: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of contiguous CPU memory; no copy."""
    raw: NDArray[np.uint8] = byte_view(values).numpy()
    return raw
