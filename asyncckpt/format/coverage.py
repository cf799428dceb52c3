"""Whether boxes make up a whole tensor: no element missing, none there twice."""

from __future__ import annotations

from collections.abc import Sequence

# (begin, end) in every dimension.
Box = tuple[tuple[int, int], ...]


def covers(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes, all within `shape`, cover it exactly once. Boxes without elements count for nothing.

    Slab by slab along the first dimension: between two neighbouring begins or ends the same boxes are there, and they
    have to cover the other dimensions. For ranges of rows, however many, that is one box a slab.
    """
    boxes = [box for box in boxes if all(begin < end for begin, end in box)]
    if not all(shape):
        return not boxes
    if not shape:
        return len(boxes) == 1
    known: dict[frozenset[Box], bool] = {}
    edges = sorted({edge for box in boxes for edge in box[0]})
    if not edges or edges[0] != 0 or edges[-1] != shape[0]:
        return False
    begins = sorted(boxes, key=lambda box: box[0])
    at = 0
    open_boxes: list[Box] = []
    for low in edges[:-1]:
        open_boxes = [box for box in open_boxes if box[0][1] > low]
        while at < len(begins) and begins[at][0][0] == low:
            open_boxes.append(begins[at])
            at += 1
        rest = [box[1:] for box in open_boxes]
        key = frozenset(rest)
        if len(key) != len(rest):
            return False
        if key not in known:
            known[key] = len(rest) == 1 if len(shape) == 1 else covers(rest, shape[1:])
        if not known[key]:
            return False
    return True
