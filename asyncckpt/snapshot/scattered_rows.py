"""Rows of a block that go to rows of a table, wherever these are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.devices.uploads import Uploads
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.encodings import decode
from asyncckpt.model.block import BlockSpec
from asyncckpt.native import core
from asyncckpt.native.contract import I64, U8


@dataclass(frozen=True)
class RowScatter:
    """A block of a column and where its rows go.

    target: `[..., *row shape]`, to whose dtype values are converted. rows: the target's row for every wanted row, int64
    [n], CPU. mine: positions of the wanted rows in the block, ascending int64 [n]; None: all.
    """

    number: int
    target: torch.Tensor
    rows: torch.Tensor
    mine: I64 | None

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return (self.target,)

    def wanted(self, spec: BlockSpec) -> tuple[int, int]:
        if spec.encoding or self.mine is None or not len(self.mine):
            return 0, spec.bytes
        row_bytes = spec.bytes // max(1, spec.shape[0])
        return int(self.mine[0]) * row_bytes, (int(self.mine[-1]) + 1) * row_bytes

    def windows(self, spec: BlockSpec, within: tuple[int, int], *, bytes_max: int, gapless: bool) -> Iterator[_Rows]:
        """Return ranges of rows."""
        count = spec.shape[0]
        if spec.encoding:
            yield _Rows(begin=0, bytes=spec.bytes, scatter=self, spec=spec, first_row=0, end_row=count)
            return
        row_bytes = spec.bytes // max(1, count)
        step = max(1, bytes_max // max(1, row_bytes))
        low, high = (at // row_bytes for at in within) if row_bytes else (0, count)
        for begin in range(low, high, step):
            end = min(begin + step, high)
            if gapless or self._wants(begin, end):
                size = (end - begin) * row_bytes
                yield _Rows(begin * row_bytes, size, scatter=self, spec=spec, first_row=begin, end_row=end)

    def _wants(self, begin: int, end: int) -> bool:
        if self.mine is None:
            return True
        low, high = np.searchsorted(self.mine, [begin, end])
        return bool(low < high)


@dataclass(frozen=True)
class _Rows:
    """Rows [first_row, end_row) of a block."""

    begin: int
    bytes: int
    scatter: RowScatter
    spec: BlockSpec
    first_row: int
    end_row: int

    def put(self, memory: U8, uploads: Uploads) -> None:
        item = self.scatter
        if item.mine is None:
            positions, rows = None, item.rows[self.first_row : self.end_row]
        else:
            low, high = (int(at) for at in np.searchsorted(item.mine, [self.first_row, self.end_row]))
            positions, rows = item.mine[low:high] - self.first_row, item.rows[low:high]
        if not len(rows):
            return
        values = self._values(memory).to(item.target.dtype)
        if uploads.device_of(item.target) is not None:
            uploads.put_rows(item.target, np.ascontiguousarray(rows.numpy()), values.contiguous(), positions)
            return
        if item.target.is_cpu and item.target.is_contiguous():
            row_bytes = item.target[:1].nbytes
            columns = np.array([[values.data_ptr(), item.target.data_ptr(), row_bytes]], dtype=np.uint64)
            core.copy_rows(columns, positions, np.ascontiguousarray(rows.numpy()))
            return
        if positions is not None:
            values = values[torch.from_numpy(positions)]
        item.target[rows.to(item.target.device)] = values.to(item.target.device)

    def _values(self, memory: U8) -> torch.Tensor:
        """Return the rows as the array they are, contiguous on the CPU; they may share the window's memory."""
        if self.spec.encoding:
            return decode(memory, self.spec)
        dtype = dtype_by_name(self.spec.dtype, owner=self.spec.name).dtype
        return torch.from_numpy(memory).view(dtype).reshape(self.end_row - self.first_row, *self.spec.shape[1:])
