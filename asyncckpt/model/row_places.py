"""Where the rows of a table stand in its image, so that an image stays usable while rows come and go.

The image of n rows has places 0 to n - 1 and no holes; the storage has holes, since a removed id leaves one. Place p
holds row p. Where row p is not in use, p is a hole, and one of the rows behind n, a tail, stands there instead. So a
removal or an insert changes the places of a few rows, where a closely packed image would shift all rows behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asyncckpt.model.row_runs import I64, gaps, rows_of

NO_ROWS: I64 = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """The places of a table's rows: `tails[i]` (a row of at least rows_count) stands at `holes[i]`, ascending."""

    rows_count: int
    holes: I64
    tails: I64

    @staticmethod
    def of(runs: I64, rows_count: int, previous: RowPlaces | None = None) -> RowPlaces:
        """Place the rows of runs. With previous, tails that can stay where they stood do so."""
        if len(runs) == 1 and int(runs[0, 0]) == 0:
            return RowPlaces(rows_count, NO_ROWS, NO_ROWS)
        holes = rows_of(gaps(runs[runs[:, 0] < rows_count], rows_count))
        tails = rows_of(np.maximum(runs[runs[:, 1] > rows_count], rows_count))
        assert len(holes) == len(tails)
        if previous is None or not len(holes) or not len(previous.holes):
            return RowPlaces(rows_count, holes, tails)
        stays = _among(previous.holes, holes) & _among(previous.tails, tails)
        kept_holes, kept_tails = previous.holes[stays], previous.tails[stays]
        free = ~_among(holes, kept_holes)
        left = ~_among(tails, np.sort(kept_tails))
        all_holes = np.concatenate([kept_holes, holes[free]])
        all_tails = np.concatenate([kept_tails, tails[left]])
        order = np.argsort(all_holes)
        return RowPlaces(rows_count, all_holes[order], all_tails[order])

    def of_rows(self, rows: I64) -> I64:
        """The place of each row in use, int64 [n]."""
        if not len(self.tails):
            return rows
        ascending, holes = self._by_tail
        places: I64 = rows.copy()
        behind = rows >= self.rows_count
        places[behind] = holes[np.searchsorted(ascending, rows[behind])]
        return places

    def moved_since(self, previous: RowPlaces) -> I64:
        """Rows that may stand elsewhere than they stood, or not have been there; rows in [0, rows_count) that are new
        are not among them: they were written, which marks tell.
        """
        if not len(self.tails) and not len(previous.tails):
            return NO_ROWS
        at = np.minimum(np.searchsorted(previous.holes, self.holes), max(0, len(previous.holes) - 1))
        is_fresh = np.ones(len(self.holes), dtype=np.bool_)
        if len(previous.holes):
            is_fresh = (previous.holes[at] != self.holes) | (previous.tails[at] != self.tails)
        back = previous.tails[previous.tails < self.rows_count]
        moved: I64 = np.concatenate([self.tails[is_fresh], back[~_among(back, self.holes)]])
        return moved

    @cached_property
    def _by_tail(self) -> tuple[I64, I64]:
        order = np.argsort(self.tails)
        return self.tails[order], self.holes[order]


def _among(values: I64, ascending: I64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of values are in an ascending array: bool [n]."""
    if not len(ascending):
        return np.zeros(len(values), dtype=np.bool_)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = ascending[at] == values
    return found
