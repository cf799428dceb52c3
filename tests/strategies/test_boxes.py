"""Pieces of tensors as boxes: they lie where they should, and share memory with the piece."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.sharded import Piece
from asyncckpt.strategies.boxes import clipped, flat_boxes, pieces_of
from asyncckpt.strategies.mapping import ShardedTensor

pytestmark = pytest.mark.any_core


def placed(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of a whole that a piece stands for."""
    for dimension, (begin, size) in enumerate(zip(piece.begin, piece.tensor.shape, strict=True)):
        whole = whole.narrow(dimension, begin, size)
    return whole


def test_a_flat_range_is_the_boxes_that_it_should_be() -> None:
    assert list(flat_boxes((4, 6), 3, 22)) == [((0, 3), (1, 3)), ((1, 0), (2, 6)), ((3, 0), (1, 4))]
    assert list(flat_boxes((4, 6), 7, 9)) == [((1, 1), (1, 2))]
    assert list(flat_boxes((4, 6), 0, 24)) == [((0, 0), (4, 6))]
    assert list(flat_boxes((4, 6), 5, 5)) == []
    assert list(flat_boxes((5,), 1, 3)) == [((1,), (2,))]
    assert list(flat_boxes((), 0, 1)) == [((), ())]


@pytest.mark.parametrize("seed", range(60))
def test_the_boxes_of_a_flat_range_cover_it_in_order(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 4)))
    count = math.prod(shape)
    start = draw.randint(0, count)
    stop = draw.randint(start, count)
    whole = torch.arange(count).reshape(shape)
    boxes = list(flat_boxes(shape, start, stop))
    found = [placed(whole, Piece(torch.empty(size), begin)).flatten().tolist() for begin, size in boxes]
    assert list(itertools.chain(*found)) == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize("seed", range(20))
def test_pieces_lie_where_their_sharded_tensor_says(seed: int) -> None:
    """Every piece of a whole, with prepended axes and flattened ranges, is a view of its data, in its place."""
    draw = random.Random(seed)
    prepended = draw.randint(0, 2)
    whole_shape = tuple(draw.randint(1, 5) for _ in range(prepended + draw.randint(1, 3)))
    whole = torch.arange(math.prod(whole_shape)).reshape(whole_shape)
    begin = [draw.randrange(size) for size in whole_shape]
    local = tuple(draw.randint(1, n - b) for n, b in zip(whole_shape[prepended:], begin[prepended:], strict=True))
    box = placed(whole, Piece(torch.empty((1,) * prepended + local), tuple(begin)))
    data = box.reshape(local).clone()
    part = None
    if draw.random() < 0.5:
        start = draw.randint(0, data.numel())
        part = slice(start, draw.randint(start, data.numel()))
        data = data.flatten()[part].clone()
    leaf = ShardedTensor("k", data, data.dtype, local, whole_shape, tuple(begin), None, 0, prepended, False, part)
    pieces = list(pieces_of(leaf, data))
    assert sum(piece.tensor.numel() for piece in pieces) == data.numel()
    for piece in pieces:
        assert torch.equal(piece.tensor, placed(whole, piece))
        piece.tensor.fill_(-1)
    assert (data == -1).all()


def test_boxes_without_elements_are_left_out_unless_the_whole_is_empty() -> None:
    empty = ShardedTensor("k", None, torch.float32, (0, 3), (4, 3), (0, 0), None)
    assert list(pieces_of(empty, torch.empty(0, 3))) == []
    whole = ShardedTensor("k", None, torch.float32, (0, 3), (0, 3), (0, 0), None)
    assert [piece.begin for piece in pieces_of(whole, torch.empty(0, 3))] == [(0, 0)]


@pytest.mark.parametrize("data", [torch.empty(2, 2), torch.empty(4)])
def test_data_of_another_shape_is_refused(data: torch.Tensor) -> None:
    leaf = ShardedTensor("k", None, torch.float32, (2, 3), (4, 3), (0, 0), None)
    with pytest.raises(UsageError, match="'k'"):
        list(pieces_of(leaf, data))
    leaf.flattened_range = slice(0, 5)
    with pytest.raises(UsageError, match="flattened range"):
        list(pieces_of(leaf, data))


def test_clipping_keeps_what_lies_within() -> None:
    piece = Piece(torch.arange(12).reshape(3, 4), (2, 1))
    cut = clipped(piece, (4, 9))
    assert cut is not None
    assert (cut.begin, cut.tensor.tolist()) == ((2, 1), [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert clipped(piece, (2, 9)) is None
    assert clipped(piece, (1, 9)) is None
    scalar = Piece(torch.tensor(1), ())
    assert clipped(scalar, ()) == scalar
