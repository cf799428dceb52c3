"""Megatron's pieces of tensors as the boxes that our saves and loads know, without a copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.block import overlap
from asyncckpt.model.sharded import Piece

Shape = tuple[int, ...]


def pieces_of(leaf: Any, data: torch.Tensor) -> Iterator[Piece]:
    """Yield the boxes that `data`, the tensor of a ShardedTensor, consists of; views of it.

    One box, or of a flattened range as many as it takes. Boxes without elements are left out, if the whole has any.
    UsageError when data is not what the ShardedTensor says.
    """
    prepended = leaf.prepend_axis_num
    front, inner = tuple(leaf.global_offset[:prepended]), tuple(leaf.global_offset[prepended:])
    is_empty = math.prod(leaf.global_shape) == 0
    parts = list(_parts(leaf, data))
    if is_empty and not parts:  # Of a flattened range.
        parts = [((0,) * len(inner), data.reshape(leaf.local_shape))]
    for begin, part in parts:
        if part.numel() or is_empty:
            offset = tuple(first + own for first, own in zip(inner, begin, strict=True))
            yield Piece(tensor=part[(None,) * prepended], begin=front + offset)


def clipped(piece: Piece, whole_shape: Shape) -> Piece | None:
    """Return what of a piece lies within a whole of this shape; None: nothing of it."""
    shared = overlap(piece.begin, piece.tensor.shape, (0,) * len(whole_shape), whole_shape)
    return None if shared is None else Piece(piece.tensor[tuple(map(slice, shared.shape))], piece.begin)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield (begin, shape) of the boxes that elements [start, stop) of a flattened array make up, in their order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, behind = start // row, stop // row
    if start % row:
        yield from _within_row(shape, first, start, min(stop, (first + 1) * row))
        first += 1
    if first < behind:
        yield (first, *(0,) * (len(shape) - 1)), (behind - first, *shape[1:])
    if first <= behind and stop % row:
        yield from _within_row(shape, behind, behind * row, stop)


def _within_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    row = math.prod(shape[1:])
    for begin, size in flat_boxes(shape[1:], start - index * row, stop - index * row):
        yield (index, *begin), (1, *size)


def _parts(leaf: Any, data: torch.Tensor) -> Iterator[tuple[Shape, torch.Tensor]]:
    """Yield (begin within the local piece, view of data)."""
    local_shape, part = tuple(leaf.local_shape), getattr(leaf, "flattened_range", None)
    if part is None:
        if tuple(data.shape) != local_shape:
            what = f"sharded tensor {leaf.key!r}: data has another shape than local_shape"
            raise UsageError(what, found=tuple(data.shape), expected=local_shape)
        yield (0,) * len(local_shape), data
        return
    count = part.stop - part.start
    if tuple(data.shape) != (count,) or not 0 <= part.start <= part.stop <= math.prod(local_shape):
        what = f"sharded tensor {leaf.key!r}: data is not the flattened range"
        raise UsageError(what, found=tuple(data.shape), expected=part)
    at = 0
    for begin, shape in flat_boxes(local_shape, part.start, part.stop):
        size = math.prod(shape)
        yield begin, data[at : at + size].view(shape)
        at += size
