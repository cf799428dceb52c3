"""Boxes of a block that go to boxes of memory: dense tensors, and columns whose rows lie in one piece.

What is a block of its own both in the file and in memory is read straight into place (restore.py), or goes to a device
as it is, in ranges of bytes. Otherwise

1. without verification, runs of bytes that are in one piece in both, where they are long enough, straight into place;
2. all other blocks by windows: ranges of the block's outermost dimension, or, where one step of that is larger than a
   window, of the next one inside of it. So a large block is never in memory beside its target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncckpt.format.dtypes import dtype_by_name, is_stored_as
from asyncckpt.format.encodings import decode
from asyncckpt.model.block import BlockSpec
from asyncckpt.native.contract import U8
from asyncckpt.snapshot.windows import BlockReader, Scatter, is_on_host, put

if TYPE_CHECKING:
    from asyncckpt.devices.uploads import Uploads

# Shorter runs cost more as reads of their own than what lies between them.
RUN_BYTES_MIN = 64 << 10
RUNS_MAX = 1 << 16


@dataclass(frozen=True)
class BoxCopy:
    """The box of a block at `begin`, and the memory that it goes to: `target` has its shape, and perhaps another dtype,
    to which the values are converted.
    """

    begin: tuple[int, ...]
    target: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.target.shape)

    def within(self, dimension: int, first: int, end: int) -> bool:
        """Return whether it has something of [first, end) of a dimension."""
        return self.begin[dimension] < end and first < self.begin[dimension] + self.target.shape[dimension]


@dataclass(frozen=True)
class BoxScatter:
    """A block, and the boxes of it that are wanted."""

    number: int
    copies: tuple[BoxCopy, ...]

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return tuple(copy.target for copy in self.copies)

    def wanted(self, spec: BlockSpec) -> tuple[int, int]:
        if spec.encoding or not spec.bytes:
            return 0, spec.bytes
        low, high = _span(self.copies, 0) if spec.shape else (0, 1)
        step_bytes = spec.bytes // (spec.shape[0] if spec.shape else 1)
        return low * step_bytes, high * step_bytes

    def windows(
        self, spec: BlockSpec, within: tuple[int, int], *, bytes_max: int, gapless: bool
    ) -> Iterator[_Whole | _Slab]:
        if spec.encoding or not spec.shape:
            yield _Whole(begin=0, bytes=spec.bytes, spec=spec, copies=self.copies)
            return
        step_bytes = spec.bytes // max(1, spec.shape[0])
        span = (within[0] // step_bytes, within[1] // step_bytes) if step_bytes else (0, spec.shape[0])
        yield from _slabs(spec, (), self.copies, 0, span, bytes_max=bytes_max, whole=gapless)


def queue_box_parts(
    number: int, copies: Sequence[BoxCopy], reader: BlockReader, uploads: Uploads | None
) -> list[Scatter]:
    """Queue the runs of boxes that can be read straight into place; return what cannot, for scatter_all."""
    spec = reader.block(number).placed.spec
    if reader.verify or spec.encoding:
        return [BoxScatter(number=number, copies=tuple(copies))]
    left = [
        copy for copy in copies if not (is_on_host(copy.target, uploads) and _queue_runs(number, copy, spec, reader))
    ]
    return [BoxScatter(number=number, copies=tuple(left))] if left else []


def _queue_runs(number: int, copy: BoxCopy, spec: BlockSpec, reader: BlockReader) -> bool:
    """Read a box run by run into its place on the host; False where that cannot be, or does not pay."""
    if not is_stored_as(copy.target, spec.dtype, owner=spec.name):
        return False
    itemsize, first = copy.target.element_size(), _run_begins(copy, spec)
    run_bytes = math.prod(copy.shape[first:]) * itemsize
    count = math.prod(copy.shape[:first])
    if count > 1 and (run_bytes < RUN_BYTES_MIN or count > RUNS_MAX):
        return False
    steps = [math.prod(spec.shape[dimension + 1 :]) for dimension in range(len(spec.shape))]
    begin = sum(at * step for at, step in zip(copy.begin, steps, strict=True))
    for outer in np.ndindex(*copy.shape[:first]):
        source = begin + sum(at * step for at, step in zip(outer, steps, strict=False))
        address = copy.target.data_ptr() + itemsize * sum(
            at * stride for at, stride in zip(outer, copy.target.stride(), strict=False)
        )
        reader.add(number, address, begin=source * itemsize, bytes=run_bytes)
    return True


def _run_begins(copy: BoxCopy, spec: BlockSpec) -> int:
    """Return the outermost dimension from which on the box is one run of bytes, both in the block and in memory."""
    first = len(spec.shape)
    expected = 1
    for dimension in reversed(range(len(spec.shape))):
        size = copy.target.shape[dimension]
        if size > 1 and copy.target.stride(dimension) != expected:
            break
        first, expected = dimension, expected * size
        if size != spec.shape[dimension]:
            break  # Behind it in the block comes something else.
    return first


@dataclass(frozen=True)
class _Whole:
    """All of a block: one that is encoded, or a single element."""

    begin: int
    bytes: int
    spec: BlockSpec
    copies: tuple[BoxCopy, ...]

    def put(self, memory: U8, uploads: Uploads | None) -> None:
        values = decode(memory, self.spec) if self.spec.encoding else _values(memory, self.spec, self.spec.shape)
        for copy in self.copies:
            put(copy.target, values[_box(copy.begin, copy.shape)], uploads)


@dataclass(frozen=True)
class _Slab:
    """Elements [first, end) of one dimension, all of the dimensions inside of it, at `outer` of those outside of it.

    copies: those that want something of it.
    """

    begin: int
    bytes: int
    spec: BlockSpec
    copies: tuple[BoxCopy, ...]
    outer: tuple[int, ...]
    first: int
    end: int

    def put(self, memory: U8, uploads: Uploads | None) -> None:
        depth = len(self.outer)
        values = _values(memory, self.spec, (self.end - self.first, *self.spec.shape[depth + 1 :]))
        for copy in self.copies:
            at = copy.begin[depth]
            low, high = max(self.first, at), min(self.end, at + copy.shape[depth])
            box = (slice(low - self.first, high - self.first), *_box(copy.begin, copy.shape)[depth + 1 :])
            target = copy.target
            for where, begin in zip(self.outer, copy.begin, strict=False):
                target = target[where - begin]
            put(target[low - at : high - at], values[box], uploads)


def _span(copies: Sequence[BoxCopy], dimension: int) -> tuple[int, int]:
    """Return the range of a dimension that holds what all of them want."""
    begins = [copy.begin[dimension] for copy in copies]
    return min(begins), max(copy.begin[dimension] + copy.shape[dimension] for copy in copies)


def _slabs(
    spec: BlockSpec,
    outer: tuple[int, ...],
    copies: tuple[BoxCopy, ...],
    begin: int,
    span: tuple[int, int],
    *,
    bytes_max: int,
    whole: bool,
) -> Iterator[_Slab]:
    """Cut what a block has at `outer`, where its bytes begin at `begin`, into slabs of about bytes_max.

    span: which range of the next dimension. whole: all of it, else what copies want.
    """
    depth, shape = len(outer), spec.shape
    step_bytes = spec.bytes // math.prod(shape[: depth + 1]) if spec.bytes else 0
    low, high = span
    if step_bytes > bytes_max and depth + 1 < len(shape):
        for at in range(low, high):
            inside = tuple(copy for copy in copies if copy.within(depth, at, at + 1))
            if inside or whole:
                at_step = begin + at * step_bytes
                inner = (0, shape[depth + 1]) if whole else _span(inside, depth + 1)
                yield from _slabs(spec, (*outer, at), inside, at_step, inner, bytes_max=bytes_max, whole=whole)
        return
    count = max(1, bytes_max // max(1, step_bytes))
    for first in range(low, high, count):
        end = min(first + count, high)
        wanted = tuple(copy for copy in copies if copy.within(depth, first, end))
        if wanted or whole:
            size = (end - first) * step_bytes
            yield _Slab(begin + first * step_bytes, size, spec, wanted, outer=outer, first=first, end=end)


def _box(begin: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(begin, shape, strict=True))


def _values(memory: U8, spec: BlockSpec, shape: Sequence[int]) -> torch.Tensor:
    """Return the bytes of a block that is not encoded, or of a part of it, as the array they are."""
    return torch.from_numpy(memory).view(dtype_by_name(spec.dtype, owner=spec.name).dtype).reshape(tuple(shape))


@dataclass(frozen=True)
class WholeScatter:
    """A block that is not encoded, and where it goes: a contiguous tensor of its shape and dtype on a device."""

    number: int
    target: torch.Tensor

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return (self.target,)

    def wanted(self, spec: BlockSpec) -> tuple[int, int]:
        return 0, spec.bytes

    def windows(self, spec: BlockSpec, within: tuple[int, int], *, bytes_max: int, gapless: bool) -> Iterator[_Range]:
        """Return ranges of bytes_max bytes."""
        for begin in range(0, spec.bytes, bytes_max):
            yield _Range(begin=begin, bytes=min(bytes_max, spec.bytes - begin), target=self.target)


@dataclass(frozen=True)
class _Range:
    """Bytes [begin, begin + bytes) of a block, and of its target."""

    begin: int
    bytes: int
    target: torch.Tensor

    def put(self, memory: U8, uploads: Uploads | None) -> None:
        assert uploads is not None
        uploads.put_bytes(self.target, self.begin, memory)
