"""Ranges of memory, and what the copy engine asks of pinned ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class InvalidValue(RuntimeError):
    """What CUDA reports for a copy that goes over the border of a pinned range; the device goes on."""

    def __init__(self) -> None:
        super().__init__("CUDA error: invalid argument")


def are_within(spans: NDArray[Any], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which of (address, bytes) [n, 2] lie in one of the ranges (address, bytes): bool [n]."""
    begins, ends = _begins_and_ends(spans)
    found = np.zeros(len(spans), dtype=np.bool_)
    for begin, bytes in ranges:
        found |= (begin <= begins) & (ends <= begin + bytes)
    return found


def are_touched(spans: NDArray[Any], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which of (address, bytes) [n, 2] have a byte in one of the ranges (address, bytes): bool [n]."""
    begins, ends = _begins_and_ends(spans)
    found = np.zeros(len(spans), dtype=np.bool_)
    for begin, bytes in ranges:
        found |= (begins < begin + bytes) & (begin < ends) & (begins < ends)
    return found


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (address, bytes), those that touch as one."""
    found: list[tuple[int, int]] = []
    for begin, bytes in sorted(ranges):
        if found and sum(found[-1]) == begin:
            found[-1] = (found[-1][0], found[-1][1] + bytes)
        else:
            found.append((begin, bytes))
    return found


def _begins_and_ends(spans: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    begins = spans[:, 0].astype(np.int64)
    return begins, begins + spans[:, 1].astype(np.int64)
