"""The cache level as it was at the cut, laid over windows of the rows behind it: a cached row wins."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import torch

from asyncckpt.model.table import ID_COLUMN, CacheCopy
from asyncckpt.native import I64
from asyncckpt.tables.cut_places import CutPlaces
from asyncckpt.tables.row_copy import RowMemory, copy_rows


class CacheOverlay:
    """Rows of a CacheCopy by their place in the cut. ids: the id of every cache row, int64 [>= used cache rows].

    `id` is laid over too, so that a row that was cached at the cut needs nothing of what its storage row holds later.
    """

    def __init__(self, copy: CacheCopy, *, ids: I64, places: CutPlaces) -> None:
        self._map = copy.map
        self._places = places
        self._columns = {name: RowMemory.of(column) for name, column in copy.columns.items()}
        self._columns[ID_COLUMN] = RowMemory.of(torch.from_numpy(ids))
        self._guard = threading.Lock()
        self._by_place: tuple[I64, I64] | None = None

    def lay_over(self, index: int, targets: Mapping[str, int]) -> None:
        """Copy the cached rows of a window to their places behind the address of each column."""
        places, cache_rows = self._sorted()
        begin, end = self._places.bounds(index)
        low, high = np.searchsorted(places, [begin, end])
        if low == high:
            return
        for name, target in targets.items():
            copy_rows(self._columns[name], cache_rows[low:high], target=target, target_rows=places[low:high] - begin)

    def _sorted(self) -> tuple[I64, I64]:
        """Places, ascending, and the cache row of each. Sorted at the first export, not in the stall."""
        with self._guard:
            if self._by_place is None:
                cache_rows = np.flatnonzero(self._map >= 0)
                places = self._places.of(self._map[cache_rows])
                order = np.argsort(places)
                self._by_place = places[order], cache_rows[order]
            return self._by_place
