"""Boxes make up a whole, against a count of every element."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.format.coverage import Box, covers

pytestmark = pytest.mark.once

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that make it up, found by cutting again and again."""
    shape = draw(SHAPES)
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, (begin, end) in enumerate(box) if end - begin > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        begin, end = box[dim]
        at = draw(st.integers(begin + 1, end - 1))
        boxes += [(*box[:dim], (begin, at), *box[dim + 1 :]), (*box[:dim], (at, end), *box[dim + 1 :])]
    return shape, draw(st.permutations(boxes))


def counted(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """What `covers` should say, element by element."""
    counts = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        counts[tuple(slice(begin, end) for begin, end in box)] += 1
    return bool((counts == 1).all())


@given(cut_up())
def test_what_was_cut_up_is_whole(made: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = made
    assert covers(boxes, shape)
    if math.prod(shape):
        assert not covers(boxes[1:], shape)
        assert not covers([*boxes, boxes[0]], shape)


@given(cut_up(), st.data())
def test_moved_edges_are_found(made: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = made
    number = data.draw(st.integers(0, len(boxes) - 1))
    changed = tuple(
        data.draw(st.tuples(st.integers(0, size), st.integers(0, size)).filter(lambda edge: edge[0] <= edge[1]))
        for size in shape
    )
    boxes = [*boxes[:number], changed, *boxes[number + 1 :]]
    assert covers(boxes, shape) == counted(boxes, shape)


def test_many_ranges_of_rows() -> None:
    """One slab a range: no pairs are compared."""
    boxes: list[Box] = [((row, row + 1), (0, 8)) for row in range(20_000)]
    assert covers(boxes, (20_000, 8))
    assert not covers(boxes[:-1], (20_000, 8))
