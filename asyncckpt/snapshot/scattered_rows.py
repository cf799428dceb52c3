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

    def windows(self, spec: BlockSpec, *, bytes_max: int, whole: bool) -> Iterator[_Rows]:
        """Return ranges of rows. Without `whole`, those that hold none of the wanted rows are left out."""
        count = spec.shape[0]
        row_bytes = spec.bytes // max(1, count)  # Of a block that is not encoded.
        step = max(1, count if spec.encoding else bytes_max // max(1, row_bytes))
        for begin in range(0, count, step):
            end = min(begin + step, count)
            if whole or spec.encoding or self._wants(begin, end):
                first = 0 if spec.encoding else begin * row_bytes
                size = spec.bytes if spec.encoding else (end - begin) * row_bytes
                yield _Rows(begin=first, bytes=size, scatter=self, spec=spec, first_row=begin, end_row=end)

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
