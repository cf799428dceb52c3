"""A tensor that is spread over ranks, as one rank sees it: its whole shape, and this rank's boxes.

A box is `begin` and the shape of a tensor: elements [begin[d], begin[d] + shape[d]) of every dimension d of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncckpt.arguments import check_type
from asyncckpt.errors import UsageError


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor in this rank's memory: `begin` is its first element in every dimension."""

    tensor: torch.Tensor
    begin: tuple[int, ...]


@dataclass(frozen=True)
class Sharded:
    """A leaf of a state that stands for one tensor over all ranks.

    whole_shape  the shape of the tensor over all ranks
    dtype        the dtype of the tensor and of every piece
    pieces       this rank's boxes, which do not overlap; none if all of the tensor is on other ranks
    is_writer    False: another rank holds the same boxes and saves them (a replica). A load fills the pieces of both
    spread_over  over how many ranks the whole is spread, if known: if not over all, the others may hold replicas, and
                 the ranks of a save agree who writes what. 0: over some, which need not be among those of the save
    """

    whole_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    is_writer: bool = True
    spread_over: int | None = None

    @property
    def boxes(self) -> list[tuple[tuple[int, ...], torch.Size]]:
        """Where every piece begins in the whole, and its shape."""
        return [(piece.begin, piece.tensor.shape) for piece in self.pieces]

    def is_written_here(self, ranks_count: int) -> bool:
        """Return whether this rank writes its pieces in a save of ranks_count ranks, unless they agree otherwise.

        If the whole is spread over more ranks than these, the writer of a replica may be missing.
        """
        return self.is_writer or (self.spread_over is not None and self.spread_over > ranks_count)

    def __post_init__(self) -> None:
        check_type("whole_shape of a Sharded", self.whole_shape, tuple)
        check_type("dtype of a Sharded", self.dtype, torch.dtype)
        check_type("pieces of a Sharded", self.pieces, tuple)
        for piece in self.pieces:
            check_type("a piece of a Sharded", piece, Piece)
            _check_piece(piece, self.whole_shape, self.dtype)


def sharded(
    tensor: torch.Tensor, begin: Sequence[int], whole_shape: Sequence[int], *, is_writer: bool = True
) -> Sharded:
    """Describe the usual case, one box per rank. Raises UsageError if the box is not within the whole."""
    check_type("tensor", tensor, torch.Tensor)
    check_type("begin", begin, Sequence)
    check_type("whole_shape", whole_shape, Sequence)
    piece = Piece(tensor=tensor, begin=tuple(begin))
    return Sharded(whole_shape=tuple(whole_shape), dtype=tensor.dtype, pieces=(piece,), is_writer=is_writer)


def _check_piece(piece: Piece, whole_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    shape, begin = tuple(piece.tensor.shape), piece.begin
    fits = len(shape) == len(begin) == len(whole_shape) and all(
        first >= 0 and first + size <= whole for first, size, whole in zip(begin, shape, whole_shape, strict=True)
    )
    if not fits:
        raise UsageError("a piece is not within the whole tensor", found=(begin, shape), expected=whole_shape)
    if piece.tensor.dtype is not dtype:
        raise UsageError("a piece has another dtype than the whole tensor", found=piece.tensor.dtype, expected=dtype)
