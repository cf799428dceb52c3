"""Boxes make up a whole, against a count of every element."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import UnsupportedError
from asyncckpt.format import limits
from asyncckpt.format.coverage import Box, covers

pytestmark = pytest.mark.any_core

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that make it up, found by cutting again and again."""
    shape = draw(SHAPES)
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 8))):
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
    assert covers(boxes, shape, name="w")
    if math.prod(shape):
        assert not covers(boxes[1:], shape, name="w")
        assert not covers([*boxes, boxes[0]], shape, name="w")


@given(cut_up(), st.data())
def test_moved_edges_are_found(made: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = made
    number = data.draw(st.integers(0, len(boxes) - 1))
    changed = tuple(
        data.draw(st.tuples(st.integers(0, size), st.integers(0, size)).filter(lambda edge: edge[0] <= edge[1]))
        for size in shape
    )
    boxes = [*boxes[:number], changed, *boxes[number + 1 :]]
    assert covers(boxes, shape, name="w") == counted(boxes, shape)


def test_many_ranges_of_rows() -> None:
    """One slab a range: no pairs are compared."""
    boxes: list[Box] = [((row, row + 1), (0, 8)) for row in range(20_000)]
    assert covers(boxes, (20_000, 8), name="w")
    assert not covers(boxes[:-1], (20_000, 8), name="w")


def stairs(count: int) -> list[Box]:
    """Columns of which each is cut a step further down: slabs of rows have all of them in common."""
    return [
        box
        for step in range(count)
        for box in (((0, step + 1), (step, step + 1)), ((step + 1, count + 1), (step, step + 1)))
    ]


def grid(*counts: int) -> list[Box]:
    """A box for every place of a grid."""
    return [tuple((at, at + 1) for at in place) for place in itertools.product(*map(range, counts))]


@pytest.mark.parametrize("turned", [False, True])
def test_many_boxes_of_two_dimensions_take_steps_in_proportion(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 of them took 22 seconds when slabs were compared, and a manifest may list millions."""
    monkeypatch.setattr(limits, "COVERAGE_WORK_MAX", 100_000)
    count = 4_000
    boxes, shape = stairs(count), (count + 1, count)
    if turned:
        boxes, shape = [box[::-1] for box in boxes], shape[::-1]
    assert covers(boxes, shape, name="w")
    assert not covers([*boxes[1:], boxes[5]], shape, name="w")


def test_a_grid_of_three_dimensions_takes_steps_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COVERAGE_WORK_MAX", 50_000)
    boxes = grid(4, 30, 40)
    assert covers(boxes, (4, 30, 40), name="w")
    moved = (*boxes[7][:2], (boxes[7][2][0] + 1, boxes[7][2][1] + 1))
    assert not covers([*boxes[:7], moved, *boxes[8:]], (4, 30, 40), name="w")


def test_what_takes_too_long_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COVERAGE_WORK_MAX", 1_000)
    with pytest.raises(UnsupportedError, match=r"tensor .a.w. is cut up .* too long to check.*2000 boxes"):
        covers(stairs(1_000), (1_001, 1_000), name="a.w")


def test_boxes_beyond_the_whole_do_not_cover_it() -> None:
    assert not covers([((0, 1), (0, 2)), ((2, 3), (0, 2))], (2, 2), name="w")
