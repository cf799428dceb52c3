"""Lay the rows of a cache level over those of the storage, on their way out; the live table is only read.

A multi-level table keeps the newest values of some rows in its cache level. `Overlay` says which rows of the cut these
are; after rows of the storage are copied, the cached ones are put over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.devices.current_runtime import runtime
from asyncckpt.devices.fetch import to_host
from asyncckpt.devices.host_copies import HostCopies
from asyncckpt.model.row_runs import positions, window
from asyncckpt.model.table import OverlaidCut, TableCut, is_overlaid
from asyncckpt.native import I64
from asyncckpt.snapshot.capture import Copies
from asyncckpt.snapshot.table_capture import lay_rows


@dataclass(frozen=True)
class Overlay:
    """Rows of a cut that its cache level holds: row positions[i] of the cut is row cache_rows[i] of cached columns.

    int64 [m] each, in no particular order.
    """

    cut: OverlaidCut
    positions: I64
    cache_rows: I64

    @staticmethod
    def of(cut: TableCut) -> Overlay | None:
        """Return the overlay of a cut before its fence; None for a table of one level, or with an empty cache."""
        if is_overlaid(cut):
            cache_map = cut.cache_map.numpy()
            cache_rows = np.flatnonzero(cache_map >= 0)
            if len(cache_rows):
                return Overlay(cut=cut, positions=positions(cut.runs, cache_map[cache_rows]), cache_rows=cache_rows)
        return None

    def within(self, begin: int, end: int) -> tuple[I64, I64]:
        """Return (positions counted from begin, cache rows) of the rows [begin, end) of the cut."""
        inside = (self.positions >= begin) & (self.positions < end)
        return self.positions[inside] - begin, self.cache_rows[inside]

    def lay_over(
        self, column: str, target: torch.Tensor, copies: Copies, *, begin: int, is_filled: bool = False
    ) -> None:
        """Put the cached rows over target, contiguous `[n, *row_shape]` on the CPU: rows [begin, begin + n).

        After what is listed in `copies`, where either level is on a device. is_filled: the storage's rows are there.
        """
        cached = self.cut.cached_column(column)
        if cached is None:
            return
        places, cache_rows = self.within(begin, begin + len(target))
        if len(places):
            columns = [(cached, target.data_ptr(), target.nbytes // len(target))]
            below = None if is_filled else copies.device_of(self.cut.column(column))
            lay_rows(columns, cache_rows, places, copies, below=below)


def rows_of_cut(cut: TableCut, overlay: Overlay | None, column: str, begin: int, end: int) -> torch.Tensor:
    """Return a copy of rows [begin, end) of a column of a cut before its fence, on the CPU."""
    storage = cut.column(column)
    pieces = [to_host(storage[first:last]) for first, last in window(cut.runs, begin, end).tolist()]
    rows = torch.cat(pieces) if pieces else to_host(storage[:0]).clone()
    if overlay is not None:
        copies = HostCopies(runtime())
        overlay.lay_over(column, rows, copies, begin=begin, is_filled=True)
        copies.launch().settle()
    return rows
