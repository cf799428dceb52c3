"""Whether boxes make up a whole tensor: no element missing, none there twice.

Dimensions that no box cuts are left out. What is left is sorted when it is one dimension, swept along the first when
there are two, and cut into slabs along the first when there are more, each of which is the same task with a dimension
less. That is n log n for ranges, for boxes of two dimensions, and for grids of any. What takes longer is bounded.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence

from asyncckpt.errors import UnsupportedError, Words
from asyncckpt.format import limits

# (begin, end) in every dimension.
Box = tuple[tuple[int, int], ...]

_MOVED_PER_STEP = 256  # Places of a list that are moved in the time of one step.


def covers(boxes: Sequence[Box], shape: Sequence[int], *, name: str) -> bool:
    """Return whether boxes cover a shape exactly once. Boxes without elements count for nothing.

    UnsupportedError naming the tensor when that takes more than limits.COVERAGE_WORK_MAX steps.
    """
    boxes = [box for box in boxes if all(begin < end for begin, end in box)]
    if not all(shape):
        return not boxes
    if any(end > size for box in boxes for (_, end), size in zip(box, shape, strict=True)):
        return False
    if sum(math.prod(end - begin for begin, end in box) for box in boxes) != math.prod(shape):
        return False
    return _Work(name, len(boxes)).are_apart(boxes)


class _Work:
    """The steps that one check takes."""

    def __init__(self, name: str, boxes_count: int) -> None:
        self._name = name
        self._boxes_count = boxes_count
        self._steps = 0

    def are_apart(self, boxes: Sequence[Box]) -> bool:
        """Return whether no two boxes have an element in common."""
        if len(boxes) < 2:
            return True
        cut = [dim for dim in range(len(boxes[0])) if len({box[dim] for box in boxes}) > 1]
        self._add(len(boxes))
        if not cut:
            return False
        # The fewest slabs come first, so that a grid is one slab for each of its rows.
        cut.sort(key=lambda dim: len({box[dim] for box in boxes}))
        if len(cut) == 1:
            ranges = sorted(box[cut[0]] for box in boxes)
            return all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
        if len(cut) == 2:
            return self._are_apart_in_two([(box[cut[0]], box[cut[1]]) for box in boxes])
        return all(self.are_apart(slab) for slab in self._slabs([tuple(box[dim] for dim in cut) for box in boxes]))

    def _are_apart_in_two(self, boxes: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> bool:
        """Sweep along the first dimension: a new range of the second lies between two that are open, or overlaps."""
        ends = sorted((end, second) for (_, end), second in boxes)
        done = 0
        opened: list[tuple[int, int]] = []
        for (begin, _), second in sorted(boxes):
            while ends[done][0] <= begin:
                del opened[bisect_left(opened, ends[done][1])]
                done += 1
            at = bisect_left(opened, second)
            if (at and opened[at - 1][1] > second[0]) or (at < len(opened) and opened[at][0] < second[1]):
                return False
            opened.insert(at, second)
            self._add(1 + len(opened) // _MOVED_PER_STEP)
        return True

    def _slabs(self, boxes: Sequence[Box]) -> list[list[Box]]:
        """Return what lies between two neighbouring edges of the first dimension, without that; alike ones once."""
        begins = sorted(boxes)
        at = 0
        opened: list[Box] = []
        slabs: dict[frozenset[Box], list[Box]] = {}
        for low in sorted({box[0][0] for box in boxes}):
            opened = [box for box in opened if box[0][1] > low]
            while at < len(begins) and begins[at][0][0] == low:
                opened.append(begins[at])
                at += 1
            self._add(len(opened))
            rest = [box[1:] for box in opened]
            key = frozenset(rest)
            slabs[key] = rest if len(key) < len(rest) else slabs.get(key, rest)  # One with a box twice stays.
        return list(slabs.values())

    def _add(self, steps: int) -> None:
        self._steps += steps
        if self._steps > limits.COVERAGE_WORK_MAX:
            raise UnsupportedError(
                f"tensor {self._name!r} is cut up in a way that takes too long to check",
                found=Words(f"{self._boxes_count} boxes"),
                expected=f"at most {limits.COVERAGE_WORK_MAX} steps to compare them",
                hint="cut it along one or two dimensions, into fewer pieces",
            )
