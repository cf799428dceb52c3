"""What one write block is, and where it is stored.

A BlockSpec names a column of a table or a dense tensor, or a part of one: a range of its rows when it is too large for
one block, a box of it when it is spread over ranks. A PlacedBlock says where in which shard file its bytes are. Its
digest is made of those of its leaves: see "The digest" of docs/format.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncckpt.model.table import Role
from asyncckpt.model.table_shard import Shard

REMOVED_COLUMN = "#removed"
LEAF_BYTES = 4 << 20
DIGEST_BYTES = 16

# What one step of an encoding did, as the manifest records it: {"kind": "cast", ...}.
EncodingStep = Mapping[str, Any]


def leaves_count(bytes: int) -> int:
    """Return how many leaves of a block have digests of their own: 0 where all of it is one leaf."""
    return -(-bytes // LEAF_BYTES) if bytes > LEAF_BYTES else 0


@dataclass(frozen=True)
class BlockSpec:
    """A named array of one rank.

    name:         `table@column`, or the dotted path of a dense tensor (RecIS' tensor_name)
    dtype:        true dtype, e.g. "float32"; stored_dtype is the safetensors one
    shape:        of this block; whole_shape of the whole tensor when the block is a part of it: elements [begin[d],
                  begin[d] + shape[d]) of every dimension d, see `begin`
    leaf:         number of the dense leaf in the state tree, None for tables and for renamed blocks
    encoding:     what was done to the array of that dtype and shape, in this order, before it was stored as
                  stored_dtype and stored_shape; empty: the array itself is stored
    """

    name: str
    role: Role
    dtype: str
    stored_dtype: str
    stored_itemsize: int
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    table: str | None = None
    column: str | None = None
    leaf: int | None = None
    row_begin: int = 0
    whole_shape: tuple[int, ...] | None = None
    column_begins: tuple[int, ...] = ()
    slice_info: str = " "
    encoding: tuple[EncodingStep, ...] = ()

    @property
    def bytes(self) -> int:
        return math.prod(self.stored_shape) * self.stored_itemsize

    @property
    def alignment(self) -> int:
        """Bytes of one element in memory, or of both that store one number as a pair."""
        is_pair = not self.encoding and len(self.stored_shape) > len(self.shape)
        return self.stored_itemsize * (2 if is_pair else 1)

    @property
    def is_part(self) -> bool:
        return self.whole_shape is not None

    @property
    def is_box(self) -> bool:
        """Whether it is a part that is not a range of whole rows."""
        return self.whole_shape is not None and self.shape[1:] != self.whole_shape[1:]

    @property
    def begin(self) -> tuple[int, ...]:
        """Where the block begins in the whole, in every dimension. `column_begins`: but the first; empty: all 0."""
        return (self.row_begin, *(self.column_begins or (0,) * (len(self.shape) - 1)))[: len(self.shape)]

    def with_rows(self, count: int) -> BlockSpec:
        """Return a block like this one with another number of rows."""
        return replace(self, shape=(count, *self.shape[1:]), stored_shape=(count, *self.stored_shape[1:]))

    def part(self, begin: int, end: int) -> BlockSpec:
        """Return the rows [begin, end) of this block, as a part of the same whole."""
        if end - begin == self.shape[0]:
            return self
        whole = self.whole_shape or self.shape
        return replace(self.with_rows(end - begin), row_begin=self.row_begin + begin, whole_shape=whole)

    @property
    def is_known(self) -> bool:
        """Whether this version knows the dtype; else stored_dtype is empty, and stored_shape counts bytes."""
        return self.stored_dtype != ""


@dataclass(frozen=True)
class PlacedBlock:
    """A block in a shard file: `key` is its safetensors name, `offset` counts from the start of the file."""

    spec: BlockSpec
    key: str
    file_index: int
    offset: int


@dataclass(frozen=True)
class TableFacts:
    """What the manifest says of a table, beside its blocks.

    whole:         all rows are here; else these rows, and the removed ids, are laid over what the parents hold
    removed_count: ids in the block of role "removed" (deltas that are not whole)
    filters:       the row filters that chose the rows, as the manifest records them
    """

    name: str
    rows_count: int
    shard: Shard
    whole: bool = True
    removed_count: int = 0
    filters: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Overlap:
    """The elements that two boxes share: where they begin in either, and how many they are in every dimension."""

    first_begin: tuple[int, ...]
    second_begin: tuple[int, ...]
    shape: tuple[int, ...]


def overlap(
    begin: Sequence[int], shape: Sequence[int], other_begin: Sequence[int], other_shape: Sequence[int]
) -> Overlap | None:
    """Return what the box of `shape` at `begin` shares with another one; None: nothing. Both are of one tensor."""
    firsts, seconds, sizes = [], [], []
    for low, size, other_low, other_size in zip(begin, shape, other_begin, other_shape, strict=True):
        first = max(low, other_low)
        count = min(low + size, other_low + other_size) - first
        if count <= 0:
            return None
        firsts.append(first - low)
        seconds.append(first - other_low)
        sizes.append(count)
    return Overlap(first_begin=tuple(firsts), second_begin=tuple(seconds), shape=tuple(sizes))
