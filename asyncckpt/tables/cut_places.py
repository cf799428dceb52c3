"""Where the rows of a cut stand: which storage rows belong to it, and in which window each of them is."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from asyncckpt.model.row_runs import window
from asyncckpt.native import I64


class CutPlaces:
    """The rows of a cut by place: place p is its p-th row, window i the places `[i, i + 1) * window_rows`.

    Making one costs nothing; sums over the runs are taken when they are first needed.
    """

    def __init__(self, runs: I64, *, rows_count: int, window_rows: int) -> None:
        self.rows_count = rows_count
        self.window_rows = window_rows
        self.windows_count = -(-rows_count // window_rows)
        self._runs = runs

    @property
    def storage_end(self) -> int:
        """One more than the last storage row of the cut."""
        return int(self._runs[-1, 1]) if len(self._runs) else 0

    def bounds(self, index: int) -> tuple[int, int]:
        """The places `[begin, end)` of a window."""
        begin = index * self.window_rows
        return begin, min(begin + self.window_rows, self.rows_count)

    def runs_of(self, index: int) -> I64:
        """The storage rows of a window as ascending runs, int64 [k, 2]."""
        return window(self._runs, *self.bounds(index))

    def of(self, rows: I64) -> I64:
        """The place of each storage row, int64 [n]; -1 for a row that does not belong to the cut."""
        if not self.rows_count:
            return np.full(rows.size, -1, dtype=np.int64)
        begins, ends, before = self._borders
        run = np.searchsorted(begins, rows, side="right") - 1
        # A row before the first run has run -1, which would be read as the last one.
        inside = (run >= 0) & (rows < ends[run])
        places: I64 = np.where(inside, rows - begins[run] + before[run], -1)
        return places

    @cached_property
    def _borders(self) -> tuple[I64, I64, I64]:
        begins, ends = np.ascontiguousarray(self._runs[:, 0]), np.ascontiguousarray(self._runs[:, 1])
        lengths = ends - begins
        return begins, ends, np.cumsum(lengths) - lengths
