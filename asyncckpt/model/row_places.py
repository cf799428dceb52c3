"""The places of a table's rows in its image, which stays usable while rows are inserted and removed.

The image of n rows has places 0 to n - 1 without holes; the storage has a hole for every removed id. Place p holds row
p. If row p is unused, p is a hole, and holds one of the rows from n on, a tail. So an insert or a removal changes the
places of a few rows, whereas a densely packed image would shift all rows after it.

An arena remembers what it holds of tables after a snapshot, so that the next one copies only what was written since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from asyncckpt.model.row_runs import I64, gaps, rows_of
from asyncckpt.model.table import CutVersion

NO_ROWS: I64 = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """The places of a table's rows: `tails[i]` (a row of at least rows_count) is at place `holes[i]`, ascending."""

    rows_count: int
    holes: I64
    tails: I64

    @staticmethod
    def of(runs: I64, rows_count: int, previous: RowPlaces | None = None) -> RowPlaces:
        """Place the rows of runs. With `previous`, tails keep their places if they can."""
        if len(runs) == 1 and int(runs[0, 0]) == 0:
            return RowPlaces(rows_count, NO_ROWS, NO_ROWS)
        holes = rows_of(gaps(runs[runs[:, 0] < rows_count], rows_count))
        tails = rows_of(np.maximum(runs[runs[:, 1] > rows_count], rows_count))
        assert len(holes) == len(tails)
        if previous is None or not len(holes) or not len(previous.holes):
            return RowPlaces(rows_count, holes, tails)
        stays = np.isin(previous.holes, holes) & np.isin(previous.tails, tails)
        kept_holes, kept_tails = previous.holes[stays], previous.tails[stays]
        all_holes = np.concatenate([kept_holes, np.setdiff1d(holes, kept_holes, assume_unique=True)])
        all_tails = np.concatenate([kept_tails, np.setdiff1d(tails, kept_tails, assume_unique=True)])
        order = np.argsort(all_holes)
        return RowPlaces(rows_count, all_holes[order], all_tails[order])

    def of_rows(self, rows: I64) -> I64:
        """Return the place of each used row, int64 [n]."""
        if not len(self.tails):
            return rows
        ascending, holes = self._by_tail
        places: I64 = rows.copy()
        behind = rows >= self.rows_count
        places[behind] = holes[np.searchsorted(ascending, rows[behind])]
        return places

    def moved_since(self, previous: RowPlaces) -> I64:
        """Return rows whose place may have changed, or that are new tails.

        New rows in [0, rows_count) are not among them: they were written, so they are marked.
        """
        if not len(self.tails) and not len(previous.tails):
            return NO_ROWS
        at = np.minimum(np.searchsorted(previous.holes, self.holes), max(0, len(previous.holes) - 1))
        is_fresh = np.ones(len(self.holes), dtype=np.bool_)
        if len(previous.holes):
            is_fresh = (previous.holes[at] != self.holes) | (previous.tails[at] != self.tails)
        back = previous.tails[previous.tails < self.rows_count]
        moved: I64 = np.concatenate([self.tails[is_fresh], np.setdiff1d(back, self.holes, assume_unique=True)])
        return moved

    @cached_property
    def _by_tail(self) -> tuple[I64, I64]:
        order = np.argsort(self.tails)
        return self.tails[order], self.holes[order]


@dataclass(frozen=True)
class TableContents:
    """All rows of a table as they were at the cut `version` (None: it has no marks), each at its place.

    fingerprints: by device, the fingerprints of all rows there, if they were computed.
    """

    version: CutVersion | None
    places: RowPlaces
    fingerprints: Mapping[int, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ArenaContents:
    """The tables by name. `layout` says where they are; contents of another layout cannot be used."""

    layout: object
    tables: Mapping[str, TableContents]
