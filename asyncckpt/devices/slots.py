"""Slots of scratch memory, one after another, each aligned like the memory that it stands for.

So copies between a slot and that memory can use wide loads and stores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncckpt.native import I64

SLOT_BYTES = 256
"""Slots begin at multiples of this, plus the address of their piece modulo this."""


class Runs(NamedTuple):
    """Ranges [begins, ends) of memory, int64 [n], that hold pieces; `of` [pieces] is the run of each piece."""

    begins: I64
    ends: I64
    of: I64


def runs_of(begins: I64, sizes: I64, *, gap_bytes_max: int = 0, alone: NDArray[np.bool_] | None = None) -> Runs:
    """Return the runs of pieces in ascending order, including gaps of at most gap_bytes_max. Pieces may overlap.

    alone: which pieces, bool [pieces], are runs of their own; these do not overlap.
    """
    ends = np.maximum.accumulate(begins + sizes)
    is_first = np.ones(len(begins), dtype=np.bool_)
    is_first[1:] = begins[1:] - ends[:-1] > gap_bytes_max
    if alone is not None:
        is_first[1:] |= alone[1:] | alone[:-1]
    is_last = np.append(is_first[1:], np.ones(len(begins[:1]), dtype=np.bool_))
    return Runs(begins[is_first], ends[is_last], np.cumsum(is_first) - 1)


def slots_of(sizes: I64, begins: I64 | None = None) -> tuple[I64, int]:
    """Return where each slot begins, int64 [n], and the bytes of all. begins: addresses to be aligned like."""
    shifts = 0 if begins is None else begins % SLOT_BYTES
    room = -(-(shifts + sizes) // SLOT_BYTES) * SLOT_BYTES
    return np.cumsum(room) - room + shifts, int(room.sum())
