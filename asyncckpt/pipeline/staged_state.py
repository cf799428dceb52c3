"""What row filters get, the staged state of one save, and what they make of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.model.block import BlockSpec, TableFacts
from asyncckpt.model.source import ByteSource
from asyncckpt.options import CHUNK_BYTES


@dataclass(frozen=True)
class StagedColumn:
    """A column of a table as it was at the cut.

    spec: of the whole column: no part, shape (rows, *row_shape)
    rows: rows [begin, end) as a contiguous CPU tensor of the true dtype, valid until it is called again
    """

    spec: BlockSpec
    rows: Callable[[int, int], torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return dtype_by_name(self.spec.dtype, owner=self.spec.name).dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.spec.shape[1:]) * self.dtype.itemsize

    @property
    def window_rows(self) -> int:
        """How many rows are fetched at once, at most."""
        return max(1, CHUNK_BYTES // max(1, self.row_bytes))


@dataclass(frozen=True)
class StagedTable:
    """A table as it was at the cut.

    facts:   name, shard and whether it is whole; the numbers of rows are found anew
    columns: `id` first
    kept:    positions of the rows that are saved, ascending int64; None: all
    removed: ids that this save takes out of what its parents hold, int64; none in a full one
    """

    facts: TableFacts
    columns: tuple[StagedColumn, ...]
    kept: NDArray[np.int64] | None
    removed: NDArray[np.int64]


@dataclass(frozen=True)
class StagedDense:
    """A dense tensor, or a part of a large one; `tensor` gives its values as a contiguous CPU tensor."""

    spec: BlockSpec
    tensor: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class OutBlock:
    """A block to write, and where its stored bytes come from."""

    spec: BlockSpec
    source: ByteSource


@dataclass(frozen=True)
class FilteredState:
    """What is left to write, tables first. The blocks hold memory: as much as is stored by those whose size is known
    only when they are encoded (skip_zero_rows, compress).
    """

    tables: tuple[TableFacts, ...]
    blocks: tuple[OutBlock, ...]
