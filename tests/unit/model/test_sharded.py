from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.sharded import Piece, Sharded, sharded


def test_one_box() -> None:
    tensor = torch.ones(2, 3)
    leaf = sharded(tensor, [4, 0], [6, 3])
    assert (leaf.whole_shape, leaf.dtype, leaf.is_writer) == ((6, 3), torch.float32, True)
    assert leaf.pieces[0].tensor is tensor
    assert leaf.pieces[0].begin == (4, 0)


def test_a_rank_may_hold_nothing_or_several_boxes() -> None:
    assert Sharded(whole_shape=(4,), dtype=torch.int64, pieces=()).pieces == ()
    pieces = tuple(Piece(tensor=torch.ones(1), begin=(begin,)) for begin in (0, 3))
    assert len(Sharded(whole_shape=(4,), dtype=torch.float32, pieces=pieces).pieces) == 2


@pytest.mark.parametrize("begin", [(-1, 0), (5, 0), (0, 1), (0,), (0, 0, 0)])
def test_a_box_outside_the_whole_is_refused(begin: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="is not within the whole"):
        sharded(torch.ones(2, 3), begin, (6, 3))


def test_a_piece_of_another_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match=r"another dtype.*float32.*int64"):
        Sharded(whole_shape=(4,), dtype=torch.int64, pieces=(Piece(tensor=torch.ones(1), begin=(0,)),))


@pytest.mark.parametrize(
    "arguments", [(24_000, torch.ones(2), (0, 0)), ((4,), "float32", ()), ((4,), torch.float32, (torch.ones(4),))]
)
def test_what_is_no_description_is_refused_by_name(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="of a Sharded must be"):
        Sharded(*arguments)
