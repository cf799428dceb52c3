"""What row filters get, the staged state of one save, and what they make of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.model.block import BlockSpec, TableFacts
from asyncckpt.model.source import ByteSource
from asyncckpt.native import I64, core
from asyncckpt.options import CHUNK_BYTES

# Rows [begin, end) as a contiguous CPU tensor, which stays as it is while anybody holds it.
Rows = Callable[[int, int], torch.Tensor]


class BlockData(Protocol):
    """The values of a block, wherever they are."""

    def whole(self) -> torch.Tensor:
        """Return all of them, on the CPU."""
        ...

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """As `Rows`; a number without shape is one row."""
        ...

    def source(self) -> ByteSource:
        """Return all of its bytes, as they are."""
        ...


@dataclass(frozen=True)
class StagedBlock:
    """A block as it was at the cut, or as the user's filter function left it.

    number: in the plan; None in a table's region. replaced: the filter function gave other values
    """

    spec: BlockSpec
    data: BlockData
    number: int | None = None
    replaced: bool = False


@dataclass(frozen=True)
class StagedColumn:
    """A column of a table. spec: the whole column's, shape (rows, *row_shape). blocks: in the order of their rows"""

    spec: BlockSpec
    blocks: tuple[StagedBlock, ...]

    @property
    def dtype(self) -> torch.dtype:
        return dtype_by_name(self.spec.dtype, owner=self.spec.name).dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.spec.shape[1:]) * self.dtype.itemsize

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """As `Rows`."""
        found = []
        for block in self.blocks:
            first = block.spec.row_begin
            low, high = max(begin, first), min(end, first + block.spec.shape[0])
            if low < high:
                found.append(block.data.rows(low - first, high - first))
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else self.blocks[0].data.rows(0, 0)

    def chosen_rows(self, positions: I64 | None, begin: int, end: int) -> torch.Tensor:
        """Return rows [begin, end) of those at ascending positions (None: all rows), side by side.

        At most CHUNK_BYTES of the column are fetched at once.
        """
        if positions is None or begin == end:
            return self.rows(begin, end)
        chosen = positions[begin:end]
        window_rows = max(1, CHUNK_BYTES // max(1, self.row_bytes))
        gathered = torch.empty((len(chosen), *self.spec.shape[1:]), dtype=self.dtype, device="cpu")
        row_bytes = gathered.nbytes // len(chosen)
        first = 0
        while first < len(chosen) and row_bytes:
            low = int(chosen[first])
            last = int(np.searchsorted(chosen, low + window_rows))
            window = self.rows(low, int(chosen[last - 1]) + 1)
            columns = np.array(
                [[window.data_ptr(), gathered.data_ptr() + first * row_bytes, row_bytes]], dtype=np.uint64
            )
            core.copy_rows(columns, np.ascontiguousarray(chosen[first:last] - low), None)
            first = last
        return gathered


@dataclass(frozen=True)
class StagedTable:
    """A table as it was at the cut.

    facts:   name, shard and whether it is whole; the numbers of rows are found again
    columns: `id` first
    kept:    positions of the rows that are saved, ascending; None: all
    removed: ids that this save takes out of what its parents hold; none in a full one
    """

    facts: TableFacts
    columns: tuple[StagedColumn, ...]
    kept: I64 | None
    removed: I64


@dataclass(frozen=True)
class OutBlock:
    """A block to write, and where its stored bytes come from. replaced: the user's filter function gave its values."""

    spec: BlockSpec
    source: ByteSource
    replaced: bool = False


@dataclass(frozen=True)
class FilteredState:
    """What is left to write, tables first. The blocks hold memory: as much as is stored by those whose size is known
    only when they are encoded (skip_zero_rows, compress).
    """

    tables: tuple[TableFacts, ...]
    blocks: tuple[OutBlock, ...]
