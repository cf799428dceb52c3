"""Copy single rows: one native call on one thread, without the GIL, wherever both sides have an address.

torch's own gather and scatter share even small copies out over all cores; beside the threads of an export or of a data
loader each of them then waits for a core, which costs far more than the copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.native import I64, core

# What copies rows here works beside training and must not take its cores.
COPY_THREADS = 1


@dataclass(frozen=True)
class RowMemory:
    """Where the rows of a column lie: row r at `address + r * row_bytes`. `owner` keeps the memory alive."""

    address: int
    row_bytes: int
    owner: object

    @classmethod
    def of(cls, column: torch.Tensor) -> RowMemory:
        """The memory of a contiguous tensor `[rows, *row_shape]` on the CPU."""
        assert column.is_cpu
        assert column.is_contiguous()
        row_bytes = column.element_size() * math.prod(column.shape[1:])
        return cls(address=column.data_ptr(), row_bytes=row_bytes, owner=column)


def copy_rows(source: RowMemory, source_rows: I64, *, target: int, target_rows: I64) -> None:
    """Copy source_rows to the places target_rows behind the address target; both int64 [n]."""
    segments = np.empty((source_rows.size, 3), dtype=np.uint64)
    segments[:, 0] = source.address + source_rows * source.row_bytes
    segments[:, 1] = target + target_rows * source.row_bytes
    segments[:, 2] = source.row_bytes
    core.copy(segments, threads=COPY_THREADS)


def copy_runs(source: RowMemory, runs: I64, *, target: int) -> None:
    """Copy the rows of runs, int64 [k, 2] of (begin, end), one behind the other to the address target."""
    counts = runs[:, 1] - runs[:, 0]
    segments = np.empty((len(runs), 3), dtype=np.uint64)
    segments[:, 0] = source.address + runs[:, 0] * source.row_bytes
    segments[:, 1] = target + (np.cumsum(counts) - counts) * source.row_bytes
    segments[:, 2] = counts * source.row_bytes
    core.copy(segments, threads=COPY_THREADS)
