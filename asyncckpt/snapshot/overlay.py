"""Lay the rows of a cache level over those of the storage, on their way out; the live table is only read.

A multi-level table keeps the newest values of some rows in its cache level. `Overlay` says which rows of the cut these
are; whoever has copied rows of the storage then puts the cached ones over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.model.abilities import is_overlaid
from asyncckpt.model.row_runs import I64, positions, window
from asyncckpt.model.table import OverlaidCut, TableCut
from asyncckpt.native import core

SEGMENTS_MAX = 1 << 16  # Of one native copy; the list of segments is fresh memory each time, which is slow.


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
        """The overlay of a cut before its fence; None for a table of one level, or with an empty cache."""
        if is_overlaid(cut):
            cache_map = cut.cache_map.numpy()
            cache_rows = np.flatnonzero(cache_map >= 0)
            if len(cache_rows):
                return Overlay(cut=cut, positions=positions(cut.runs, cache_map[cache_rows]), cache_rows=cache_rows)
        return None

    def within(self, begin: int, end: int) -> tuple[I64, I64]:
        """(positions counted from begin, cache rows) of the rows [begin, end) of the cut."""
        inside = (self.positions >= begin) & (self.positions < end)
        return self.positions[inside] - begin, self.cache_rows[inside]

    def lay_over(self, column: str, target: torch.Tensor, *, begin: int) -> None:
        """Put the cached rows over target, contiguous `[n, *row_shape]` on the CPU: rows [begin, begin + n)."""
        cached = self.cut.cached_column(column)
        if cached is None:
            return
        places, cache_rows = self.within(begin, begin + len(target))
        row_bytes = cached.nbytes // max(1, len(cached))
        if not (cached.is_cpu and cached.is_contiguous()):
            rows = cached.index_select(0, torch.from_numpy(cache_rows).to(cached.device))
            target.index_copy_(0, torch.from_numpy(places), rows.cpu())
            return
        for first in range(0, len(places), SEGMENTS_MAX):
            part = slice(first, first + SEGMENTS_MAX)
            segments = np.empty((len(places[part]), 3), dtype=np.uint64)
            segments[:, 0] = cached.data_ptr() + cache_rows[part] * row_bytes
            segments[:, 1] = target.data_ptr() + places[part] * row_bytes
            segments[:, 2] = row_bytes
            core.copy(segments)


def rows_of_cut(cut: TableCut, overlay: Overlay | None, column: str, begin: int, end: int) -> torch.Tensor:
    """Rows [begin, end) of a column of a cut before its fence, `[end - begin, *row_shape]` on the CPU: a copy."""
    storage = cut.column(column)
    pieces = [storage[first:last] for first, last in window(cut.runs, begin, end).tolist()]
    rows = torch.cat(pieces) if pieces else storage[:0].clone()
    rows = rows.detach().cpu().contiguous()
    if overlay is not None:
        overlay.lay_over(column, rows, begin=begin)
    return rows
