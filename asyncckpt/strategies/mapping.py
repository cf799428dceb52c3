"""What one rank holds of a tensor or an object that is spread over ranks, in Megatron-Core's terms.

Megatron-Core's own objects are taken wherever these are: they are known by their attributes, and nothing of Megatron is
imported. Source of the interface: megatron.core.dist_checkpointing.mapping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from asyncckpt.errors import UsageError, must_be

StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
ReplicaId = int | tuple[int, ...]

STATE_DEPTH_MAX = 64
_SHARD = "/shard_"


@dataclass
class ShardedTensor:
    """A rank's piece of a global tensor.

    key                   of the global tensor
    data                  this rank's piece, of local_shape; None where only its place matters
    dtype                 of both
    local_shape           of the piece, without prepended axes
    global_shape          of the global tensor
    global_offset         the piece's first element in every global dimension
    axis_fragmentations   into how many equal pieces each global dimension is cut; None: no regular grid
    replica_id            all zero: this rank's copy is the one that is saved
    prepend_axis_num      global dimensions of size 1 in front of those of the piece
    allow_shape_mismatch  a load takes a stored tensor of another global shape: what both have, the rest being zero
    flattened_range       data is one-dimensional and holds this range of the flattened piece

    Raises UsageError for what does not fit together.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise UsageError unless shapes, offsets, dtype and data agree."""
        if self.data is not None:
            _check_data(self.data, self)
        if len(self.global_shape) != len(self.global_offset):
            raise _wrong(self, "global_offset has another number of dimensions than global_shape", self.global_offset)
        if len(self.local_shape) + self.prepend_axis_num != len(self.global_shape):
            what = "local_shape and prepend_axis_num make another number of dimensions than global_shape"
            raise _wrong(self, what, (self.local_shape, self.prepend_axis_num))
        inner = zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True)
        if self.axis_fragmentations is not None and any(size and offset % size for offset, size in inner):
            raise _wrong(self, "global_offset is not a multiple of local_shape in a regular grid", self.global_offset)

    @property
    def has_regular_grid(self) -> bool:
        """Whether all pieces of the global tensor have one shape."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return where the piece is in the global tensor: a number for every prepended axis, a slice for the others."""
        prepended, inner = self.global_offset[: self.prepend_axis_num], self.global_offset[self.prepend_axis_num :]
        slices = (slice(begin, begin + size) for begin, size in zip(inner, self.local_shape, strict=True))
        return (*prepended, *slices)

    def without_data(self) -> ShardedTensor:
        """Return the same piece with data None."""
        return replace(self, data=None)

    def init_data(self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Give a piece without data a tensor made by init_fn(shape, dtype=..., device=...)."""
        if self.data is None:
            shape = self.local_shape if self.flattened_range is None else (_length(self.flattened_range),)
            self.data = init_fn(shape, dtype=self.dtype, device=device)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Make the piece number `place` of `count` equal ones along `axis`, for every (axis, place, count) given.

        Axes count the prepended ones too. Raises UsageError.
        """
        if flattened_range is not None:
            raise UsageError("a piece made from rank offsets cannot be flattened", found=flattened_range)
        sizes = [1] * prepend_axis_num + list(data.shape)
        offset, whole, cuts = [0] * len(sizes), list(sizes), [1] * len(sizes)
        for axis, place, count in rank_offsets:
            if not 0 <= axis < len(sizes) or not 0 <= place < count:
                raise must_be(f"rank offsets of {key!r}", "(axis, i, n) with i < n", rank_offsets)
            offset[axis], whole[axis], cuts[axis] = place * sizes[axis], count * sizes[axis], count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(whole),
            tuple(offset),
            tuple(cuts),
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )


@dataclass
class ShardedObject:
    """One of the objects that make up a global one; unlike a tensor's, these pieces cannot be cut again.

    key            of the global object
    data           this rank's object; None where only its place matters
    global_shape   how many objects there are, in every dimension
    global_offset  which one this is
    replica_id     all zero: this rank's copy is the one that is saved
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise UsageError unless offset and shape have the same number of dimensions."""
        if len(self.global_shape) != len(self.global_offset):
            raise UsageError(
                f"sharded object {self.key!r}: global_offset has another number of dimensions than global_shape",
                found=self.global_offset,
                expected=self.global_shape,
            )

    @property
    def unique_key(self) -> str:
        """`<key>/shard_<offset>_<shape>`, numbers joined by dots."""
        offset, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}{_SHARD}{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Make the object of a unique key, without data. UsageError for a text of another form."""
        key, offset, shape = split_unique_key(unique_key)
        return cls(key, None, shape, offset, replica_id)

    def without_data(self) -> ShardedObject:
        """Return the same object with data None."""
        return replace(self, data=None)


def split_unique_key(unique_key: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return (key, global_offset, global_shape) of a unique key; UsageError for a text of another form."""
    key, mark, place = unique_key.rpartition(_SHARD)
    try:
        offset, shape = (tuple(int(n) for n in part.split(".") if n) for part in place.split("_"))
        if not mark:
            raise ValueError(unique_key)
    except ValueError:
        what = "a sharded object has a wrong unique key"
        raise UsageError(what, found=unique_key, expected="<key>/shard_<offset>_<shape>") from None
    return key, offset, shape


def is_main_replica(replica_id: Any) -> bool:
    """Return whether the copy with this replica_id is the one that is saved: 0, or a tuple of zeros."""
    if isinstance(replica_id, int):
        return replica_id == 0
    return all(number == 0 for number in replica_id)


def is_sharded_tensor(value: Any) -> bool:
    """Return whether a leaf has the attributes of a ShardedTensor, ours or Megatron's."""
    return all(hasattr(value, name) for name in ("key", "global_shape", "global_offset", "local_shape", "replica_id"))


def is_sharded_object(value: Any) -> bool:
    """Return whether a leaf has the attributes of a ShardedObject, ours or Megatron's."""
    return not hasattr(value, "local_shape") and all(
        hasattr(value, name) for name in ("key", "global_shape", "global_offset", "unique_key", "replica_id")
    )


def sharded_leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield all leaves of nested mappings, lists and tuples, with their paths; UsageError for one of another kind."""
    if isinstance(state, Mapping):
        items: Any = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    elif is_sharded_tensor(state) or is_sharded_object(state):
        yield path, state
        return
    else:
        raise UsageError(
            f"leaf {shown_path(path)} of a sharded state dict is not sharded",
            found=type(state),
            expected="a ShardedTensor or a ShardedObject",
            hint="factories are to be built first; what all ranks share belongs to the common state",
        )
    if len(path) >= STATE_DEPTH_MAX:
        raise UsageError(f"state {shown_path(path[:8])}... is nested too deeply", expected=STATE_DEPTH_MAX)
    for key, value in items:
        yield from sharded_leaves(value, (*path, key))


def replaced(state: Any, leaves: Iterator[Any]) -> Any:
    """Return the same nested containers with other leaves, taken in the order of sharded_leaves."""
    if isinstance(state, Mapping):
        return {key: replaced(value, leaves) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        found = [replaced(value, leaves) for value in state]
        return found if isinstance(state, list) else tuple(found)
    return next(leaves)


def shown_path(path: tuple[Any, ...]) -> str:
    """Return a path for people: 'model'['layers'][3]."""
    if not path:
        return "(root)"
    return repr(path[0]) + "".join(f"[{part!r}]" for part in path[1:])


def _check_data(data: torch.Tensor, piece: ShardedTensor) -> None:
    if data.dtype != piece.dtype:
        raise _wrong(piece, "data has another dtype", data.dtype, expected=piece.dtype)
    if piece.flattened_range is None:
        if tuple(data.shape) != tuple(piece.local_shape):
            raise _wrong(piece, "data has another shape", tuple(data.shape), expected=tuple(piece.local_shape))
        return
    part = piece.flattened_range
    if part.step not in (None, 1) or not 0 <= part.start <= part.stop <= math.prod(piece.local_shape):
        raise _wrong(piece, "flattened_range does not lie within the flattened piece", part)
    if tuple(data.shape) != (_length(part),):
        raise _wrong(piece, "data has another shape than flattened_range", tuple(data.shape), expected=(_length(part),))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _wrong(piece: ShardedTensor, what: str, found: Any, *, expected: Any = None) -> UsageError:
    expected = piece.global_shape if expected is None else expected
    return UsageError(f"sharded tensor {piece.key!r}: {what}", found=found, expected=expected)
