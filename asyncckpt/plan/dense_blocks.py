"""Blocks of dense tensors: what they are called, which bytes of tensors they are, and how these are copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.model.block import BlockSpec
from asyncckpt.model.table import Role
from asyncckpt.native import I64
from asyncckpt.plan.image import array_spec
from asyncckpt.plan.leaf_memory import is_plain, span

BY_HOST, BY_TORCH = -1, -2


@dataclass(frozen=True)
class TensorPieces:
    """Whole rows of tensors, and their places in an arena: int64 [n] each.

    `bytes` of tensor number `tensor`, from its byte `source_offset` on, go to `place`.
    """

    tensor: I64
    source_offset: I64
    place: I64
    bytes: I64

    @staticmethod
    def of(parts: Sequence[tuple[BlockSpec, BlockSpec, int]], *, place: I64, bytes: I64) -> TensorPieces:
        """Return the pieces that parts of boxes are: (part, box, number of the tensor that the box is)."""
        offsets = [
            0 if part is box else (part.row_begin - box.row_begin) * (box.bytes // box.shape[0])
            for part, box, _ in parts
        ]
        tensors = np.array([tensor for _, _, tensor in parts], dtype=np.int64)
        return TensorPieces(tensors, source_offset=np.array(offsets, dtype=np.int64), place=place, bytes=bytes)

    def only(self, wanted: NDArray[np.bool_]) -> TensorPieces:
        """Return some of the pieces: bool [n]."""
        return TensorPieces(self.tensor[wanted], self.source_offset[wanted], self.place[wanted], self.bytes[wanted])

    def rows(self, number: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows that a piece is, in the tensor's own memory."""
        tensor, size = tensors[int(self.tensor[number])].detach(), int(self.bytes[number])
        if size == tensor.nbytes:
            return tensor
        row_bytes = tensor.nbytes // len(tensor)
        first = int(self.source_offset[number]) // row_bytes
        return tensor[first : first + size // row_bytes]


@dataclass(frozen=True)
class CopyWays:
    """How tensors are copied, by their numbers: int64 [n] each.

    way: by address, from the device of this number or (BY_HOST) from memory of the host; or BY_TORCH, for strides and
    other kinds of devices. spans: bytes from the first element to past the last one; 0 of what is not copied.
    """

    way: I64
    bytes: I64
    itemsizes: I64
    spans: I64

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], device_of: Callable[[torch.Tensor], int | None]) -> CopyWays:
        itemsizes = np.array([tensor.element_size() for tensor in tensors], dtype=np.int64)
        way = np.array([_way(tensor, device_of(tensor)) for tensor in tensors], dtype=np.int64)
        bytes = np.array([tensor.numel() for tensor in tensors], dtype=np.int64) * itemsizes
        spans = bytes.copy()
        for number in np.flatnonzero(way == BY_TORCH).tolist():
            spans[number] = span(tensors[number].shape, tensors[number].stride()) * itemsizes[number]
        return CopyWays(way, bytes, itemsizes, spans)


def _way(tensor: torch.Tensor, device: int | None) -> int:
    if not is_plain(tensor) or (device is None and not tensor.is_cpu):
        return BY_TORCH
    return BY_HOST if device is None else device


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
    """Return the block of one box of a dense tensor. UnsupportedError for the dtype.

    is_part: None: it is unless it has the shape of the whole.
    """
    size, whole = tuple(shape), tuple(whole_shape)
    spec = replace(array_spec(name, dtype, size, Role.DENSE), leaf=leaf)
    if size == whole if is_part is None else not is_part:
        return spec
    row, *columns = begin or (0,)
    return replace(spec, row_begin=row, whole_shape=whole, column_begins=tuple(columns) if any(columns) else ())
