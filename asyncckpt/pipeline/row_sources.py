"""Chosen rows of a column, side by side."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from asyncckpt.native import I64, core
from asyncckpt.pipeline.staged_state import Rows


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
