"""Blocks of dense tensors: what they are called, and which bytes of tensors they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.table import Role
from asyncckpt.native import I64


@dataclass(frozen=True)
class TensorPieces:
    """Whole rows of tensors, and their places in an arena: int64 [n] each.

    `bytes` of tensor number `tensor`, from its byte `source_offset` on, go to `place`.
    """

    tensor: I64
    source_offset: I64
    place: I64
    bytes: I64

    def only(self, wanted: NDArray[np.bool_]) -> TensorPieces:
        """Some of the pieces: bool [n]."""
        return TensorPieces(self.tensor[wanted], self.source_offset[wanted], self.place[wanted], self.bytes[wanted])


def box_spec(
    name: str,
    dtype: torch.dtype,
    *,
    begin: Sequence[int],
    shape: Sequence[int],
    whole_shape: Sequence[int],
    leaf: int | None,
    is_part: bool | None = None,
) -> BlockSpec:
    """The block of one box of a dense tensor. UnsupportedError for the dtype.

    is_part: None: it is unless it has the shape of the whole.
    """
    stored = stored_dtype(dtype, owner=name)
    size, whole = tuple(shape), tuple(whole_shape)
    spec = BlockSpec(
        name=name,
        role=Role.DENSE,
        dtype=stored.name,
        stored_dtype=stored.stored,
        stored_itemsize=stored.stored_itemsize,
        shape=size,
        stored_shape=stored.stored_shape(size),
        leaf=leaf,
    )
    if size == whole if is_part is None else not is_part:
        return spec
    row, *columns = begin or (0,)
    return replace(spec, row_begin=row, whole_shape=whole, column_begins=tuple(columns) if any(columns) else ())
