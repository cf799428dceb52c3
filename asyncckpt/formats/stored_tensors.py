"""The dense tensors of a checkpoint as sources of plain bytes: parts and boxes put together, encodings undone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.source import ByteSource
from asyncckpt.model.table import Role
from asyncckpt.native import U64
from asyncckpt.plan.contents import StoredDense
from asyncckpt.plan.image import array_spec
from asyncckpt.shard.reader import ChainReader
from asyncckpt.shard.stored_rows import plain_source


def tensor_spec(dense: StoredDense) -> BlockSpec:
    """Return a tensor as one whole array."""
    return array_spec(dense.name, dtype_by_name(dense.dtype, owner=dense.name).dtype, dense.shape, Role.DENSE)


def tensor_source(dense: StoredDense, reader: ChainReader) -> ByteSource:
    """Return the bytes of a tensor: its blocks one after the other, or all of it put together from boxes."""
    ordered = sorted(dense.blocks, key=lambda number: reader.block(number).placed.spec.row_begin)
    end = 0
    for number in ordered:
        spec = reader.block(number).placed.spec
        if spec.is_box or (spec.is_part and spec.row_begin != end):
            return _Assembled(dense, reader)
        end += spec.shape[0] if spec.shape else 0
    itemsize = dtype_by_name(dense.dtype, owner=dense.name).itemsize
    parts = []
    for number in ordered:
        spec = reader.block(number).placed.spec
        size = int(np.prod(spec.shape, dtype=np.int64)) * itemsize
        if size:
            parts.append((size, plain_source(reader, number, None)))
    return JoinedSources(parts)


class JoinedSources:
    """The bytes of several sources, (bytes, source), one after the other."""

    def __init__(self, parts: Sequence[tuple[int, ByteSource]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([size for size, _ in parts], dtype=np.int64)
        self._used: list[ByteSource] = []

    def pieces(self, begin: int, end: int) -> U64:
        found = [np.empty((0, 2), dtype=np.uint64)]
        first = int(np.searchsorted(self._ends, begin, side="right"))
        for (size, source), last in zip(self._parts[first:], self._ends[first:].tolist(), strict=True):
            at = last - size
            if at >= end:
                break
            found.append(source.pieces(max(0, begin - at), min(size, end - at)))
            self._used.append(source)
        return np.concatenate(found)

    def restart(self, at: int) -> int:
        """Return where the source begins that byte `at` is in: each is checked as a whole."""
        number = int(np.searchsorted(self._ends, at, side="right"))
        return 0 if number == 0 else int(self._ends[number - 1])

    def release(self) -> None:
        used, self._used = self._used, []
        for source in used:
            source.release()


class _Assembled:
    """The bytes of a tensor that is stored in boxes: all of it in memory, from the first byte to the last."""

    def __init__(self, dense: StoredDense, reader: ChainReader) -> None:
        self._dense, self._reader = dense, reader
        self._bytes = 0

    @cached_property
    def _whole(self) -> torch.Tensor:
        whole = torch.empty(
            self._dense.shape, dtype=dtype_by_name(self._dense.dtype, owner=self._dense.name).dtype, device="cpu"
        )
        for number in self._dense.blocks:
            spec = self._reader.block(number).placed.spec
            box = tuple(slice(begin, begin + size) for begin, size in zip(spec.begin, spec.shape, strict=True))
            whole[box] = self._reader.array(number)
        return whole

    def pieces(self, begin: int, end: int) -> U64:
        self._bytes = end
        return np.array([[self._whole.data_ptr() + begin, end - begin]], dtype=np.uint64)

    def release(self) -> None:
        if self._bytes == self._whole.nbytes:
            del self._whole
