"""Where two boxes of one tensor meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Overlap:
    """The elements that two boxes share: where they begin in either, and how many they are in every dimension."""

    first_begin: tuple[int, ...]
    second_begin: tuple[int, ...]
    shape: tuple[int, ...]


def overlap(
    begin: Sequence[int], shape: Sequence[int], other_begin: Sequence[int], other_shape: Sequence[int]
) -> Overlap | None:
    """What the box of `shape` at `begin` shares with another one; None: nothing. Both are of one tensor."""
    firsts, seconds, sizes = [], [], []
    for low, size, other_low, other_size in zip(begin, shape, other_begin, other_shape, strict=True):
        first = max(low, other_low)
        count = min(low + size, other_low + other_size) - first
        if count <= 0:
            return None
        firsts.append(first - low)
        seconds.append(first - other_low)
        sizes.append(count)
    return Overlap(first_begin=tuple(firsts), second_begin=tuple(seconds), shape=tuple(sizes))
