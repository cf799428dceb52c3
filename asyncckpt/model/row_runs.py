"""Arithmetic on row runs: ascending ranges of storage rows whose concatenation is the rows of a column.

A table without holes is one run; every removed id splits one in two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


def window(runs: I64, begin: int, end: int) -> I64:
    """Return the runs of logical rows [begin, end), int64 [k, 2]."""
    ends = np.cumsum(runs[:, 1] - runs[:, 0])
    starts = ends - (runs[:, 1] - runs[:, 0])
    first = int(np.searchsorted(ends, begin, side="right"))
    last = int(np.searchsorted(starts, end, side="left"))
    part: I64 = runs[first:last].copy()
    if len(part):
        part[0, 0] += max(0, begin - int(starts[first]))
        part[-1, 1] -= max(0, int(ends[last - 1]) - end)
    return part


def rows_of(runs: I64) -> I64:
    """Return every row of the runs, ascending, int64 [n]."""
    counts = runs[:, 1] - runs[:, 0]
    before = np.cumsum(counts) - counts
    rows: I64 = np.repeat(runs[:, 0] - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)
    return rows


def gaps(runs: I64, end: int) -> I64:
    """Return the rows of [0, end) that the runs leave out, as ascending runs, int64 [k, 2]."""
    borders = np.concatenate([[0], np.minimum(runs, end).ravel(), [end]]).reshape(-1, 2)
    found: I64 = borders[borders[:, 0] < borders[:, 1]]
    return found


def spans(runs: I64, *, address: int, row_bytes: int) -> NDArray[np.uint64]:
    """Return (address, bytes) of every run in a column's storage, uint64 [k, 2]."""
    result = np.empty((len(runs), 2), dtype=np.uint64)
    result[:, 0] = address + runs[:, 0] * row_bytes
    result[:, 1] = (runs[:, 1] - runs[:, 0]) * row_bytes
    return result


def positions(runs: I64, rows: I64) -> I64:
    """Return the place of each storage row, int64 [n], among the rows of the runs, which contain all of them."""
    if not len(rows):
        return np.empty(0, dtype=np.int64)
    index = np.searchsorted(runs[:, 0], rows, side="right") - 1
    lengths = runs[:, 1] - runs[:, 0]
    before = np.cumsum(lengths) - lengths
    found: I64 = rows - runs[index, 0] + before[index]
    return found
