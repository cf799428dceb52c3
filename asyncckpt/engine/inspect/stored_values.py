"""Read parts of stored blocks as arrays, a range of rows or rows here and there, and tell how far numbers are apart.

Only what is asked for is read, so it is not checked against the digest of its block. A block whose encoding does not
store every row by itself is small (ENCODED_BYTES_MAX): it is decoded as a whole, and kept until another one is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.encodings import decode, stored_as
from asyncckpt.model.block import BlockSpec
from asyncckpt.native import I64
from asyncckpt.shard.reader import ChainReader

WINDOW_BYTES = 4 << 20  # Of what is read at once; a single row may be larger.


class StoredValues:
    """The blocks of an open checkpoint, by rows. A block without dimensions has one row."""

    def __init__(self, reader: ChainReader) -> None:
        self._reader = reader
        self._decoded: tuple[int, torch.Tensor] | None = None

    def spec(self, number: int) -> BlockSpec:
        return self._reader.block(number).placed.spec

    def digest(self, number: int) -> bytes:
        return self._reader.block(number).digest

    def window_rows(self, number: int) -> int:
        """Return how many rows of a block fill a window, at least one."""
        spec = self.spec(number)
        return max(1, WINDOW_BYTES * rows_count(spec) // max(1, spec.bytes))

    def range(self, number: int, begin: int, end: int) -> torch.Tensor:
        """Return the rows [begin, end) of a block, [end - begin, *row shape]."""
        return self._read(number, [(begin, end)])

    def rows(self, number: int, rows: I64) -> torch.Tensor:
        """Return rows of a block, distinct, in the order of `rows`, int64 [n > 0]."""
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        begins = np.flatnonzero(np.diff(ascending, prepend=ascending[0] - 2) != 1)
        ends = np.append(begins[1:], len(rows)) - 1
        runs = zip(ascending[begins].tolist(), (ascending[ends] + 1).tolist(), strict=True)
        values = self._read(number, list(runs))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return taken(values, back)

    def _read(self, number: int, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
        spec = self.spec(number)
        if not spec.shape or not _is_rowwise(spec):
            whole = self._whole(number)
            return torch.cat([whole[begin:end] for begin, end in runs]) if len(runs) > 1 else whole[slice(*runs[0])]
        row_bytes = spec.bytes // max(1, spec.shape[0])
        count = sum(end - begin for begin, end in runs)
        raw = np.empty(count * row_bytes, dtype=np.uint8)
        address = int(raw.ctypes.data)
        for begin, end in runs:
            self._reader.add(number, address, begin=begin * row_bytes, bytes=(end - begin) * row_bytes)
            address += (end - begin) * row_bytes
        self._reader.run()
        return decode(raw, spec.with_rows(count))

    def _whole(self, number: int) -> torch.Tensor:
        if self._decoded is None or self._decoded[0] != number:
            spec = self.spec(number)
            self._decoded = number, self._reader.array(number).reshape(spec.shape or (1,))
        return self._decoded[1]


def rows_count(spec: BlockSpec) -> int:
    return spec.shape[0] if spec.shape else 1


def taken(values: torch.Tensor, rows: I64) -> torch.Tensor:
    """Return rows of an array, whatever its dtype is."""
    bits = bits_of(values)[torch.from_numpy(rows)]
    return bits.view(values.dtype).reshape(len(rows), *values.shape[1:])


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of every row, uint8 [rows, bytes]."""
    if not values.numel():
        return torch.empty(len(values), 0, dtype=torch.uint8, device="cpu")
    return values.contiguous().view(torch.uint8).reshape(len(values), -1)


def _is_rowwise(spec: BlockSpec) -> bool:
    if not spec.encoding:
        return True
    return stored_as(dtype_by_name(spec.dtype, owner=spec.name).dtype, spec.shape, spec.encoding) is not None


class NumbersCompared:
    """Sums over pairs of arrays, in float64; of complex numbers over both of their parts.

    What torch cannot convert to float64 is compared by its bits alone: max_abs and cosine are None then.
    """

    def __init__(self) -> None:
        self._max_abs: float | None = 0.0
        self._products = torch.zeros(3, dtype=torch.float64, device="cpu")

    def add(self, first: torch.Tensor, second: torch.Tensor) -> Any:
        """Take two arrays of the same shape and dtype into account; return the largest absolute difference in each row,
        float64 [rows], inf for one of nan; 0 where it is not known.
        """
        if self._max_abs is None or not first.numel():
            return 0.0
        try:
            a, b = _float64(first), _float64(second)
        except (RuntimeError, NotImplementedError, TypeError):
            self._max_abs = None
            return 0.0
        same = (a == b) | (a.isnan() & b.isnan())
        apart = torch.where(same, 0.0, (a - b).abs())
        farthest = apart.max().item()
        self._max_abs = max(self._max_abs, farthest) if farthest == farthest else math.nan
        self._products += torch.stack([a @ b, a @ a, b @ b])
        rows = apart.nan_to_num(nan=math.inf, posinf=math.inf).reshape(len(first) if first.dim() else 1, -1)
        return rows.amax(dim=1).numpy()

    @property
    def max_abs(self) -> float | None:
        """The largest absolute difference; nan where a number became nan or ceased to be it."""
        return self._max_abs

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between all numbers as two vectors; None where one of them is zero."""
        both, first, second = self._products.tolist()
        if self._max_abs is None or not first or not second:
            return None
        return both / math.sqrt(first) / math.sqrt(second) if first == first and second == second else math.nan


def _float64(values: torch.Tensor) -> torch.Tensor:
    if values.is_complex():
        values = torch.view_as_real(values.to(torch.complex128))
    return values.reshape(-1).to(torch.float64)
