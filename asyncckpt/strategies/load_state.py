"""Load what one rank wants of a sharded state: any boxes out of any boxes, and objects as they were.

1. Look up every wanted tensor and object, and check shapes and dtypes; nothing is touched before all fit.
2. Fill: pieces that overlap (tied weights) go into different rounds, for a load fills every element once.
3. Give back the nested containers with tensors and objects in place of the leaves.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncckpt.errors import IncompatibleError, NotFoundError
from asyncckpt.model.block import overlap
from asyncckpt.model.sharded import Piece, Sharded
from asyncckpt.strategies.backend import OBJECTS, TENSORS
from asyncckpt.strategies.boxes import clipped, pieces_of
from asyncckpt.strategies.mapping import (
    ShardedObject,
    ShardedTensor,
    is_sharded_object,
    replaced,
    sharded_leaves,
    shown_path,
)
from asyncckpt.strategies.packed_objects import unpack
from asyncckpt.strategies.stored_state import StoredState, StoredTensor, use_stored

PROBLEMS_SHOWN_MAX = 20


@dataclass(frozen=True)
class _Wanted:
    """A tensor to fill: `tensor` is the caller's, or new; `filled` is what a load writes to, of the stored dtype."""

    leaf: Any
    tensor: torch.Tensor
    filled: torch.Tensor
    stored: StoredTensor


def load_sharded(state: Any, checkpoint_dir: str | Path, name: str) -> Any:
    """Return the same nested containers with tensors and objects, or the one leaf that is given.

    A leaf's own tensor is filled in place; one of a floating point dtype gets what is stored in another one, or as
    integers, converted. name: the part of the checkpoint to load from. Raises NotFoundError, IncompatibleError listing
    all that does not fit, CorruptError, UnsupportedError.
    """
    leaves = list(sharded_leaves(state))
    if not leaves:
        return replaced(state, iter(()))
    return use_stored(checkpoint_dir, name, lambda stored: _loaded(state, leaves, stored))


def tensors_metadata(checkpoint_dir: str | Path, name: str, *, tensor_type: Any = ShardedTensor) -> dict[str, Any]:
    """Return a `tensor_type` without data and sharding for every stored tensor, by its key."""
    found = use_stored(checkpoint_dir, name, lambda stored: stored.tensors)
    return {key: _unsharded(key, stored, tensor_type) for key, stored in found.items()}


def objects_metadata(checkpoint_dir: str | Path, name: str, *, object_type: Any = ShardedObject) -> dict[str, Any]:
    """Return an `object_type` without data for every stored object, by its unique key; none without such a part."""
    try:
        keys = use_stored(checkpoint_dir, name, lambda stored: stored.object_keys)
    except NotFoundError:
        return {}
    found = [ShardedObject.empty_from_unique_key(key) for key in keys]
    return {item.unique_key: object_type(item.key, None, item.global_shape, item.global_offset) for item in found}


def _loaded(state: Any, leaves: Sequence[tuple[tuple[Any, ...], Any]], stored: StoredState) -> Any:
    keys = [leaf.unique_key for _, leaf in leaves if is_sharded_object(leaf)]
    tensors = [(path, leaf) for path, leaf in leaves if not is_sharded_object(leaf)]
    _check(stored, tensors, keys)
    wanted = [_wanted(leaf, stored.tensors[leaf.key]) for _, leaf in tensors]
    packed = {key: stored.new_object(key) for key in dict.fromkeys(keys)}
    with stored.loading():
        _fill(stored, wanted, packed)
        for item in wanted:
            if item.filled is not item.tensor:
                item.tensor.copy_(item.filled)
    found = iter([item.tensor for item in wanted])
    objects = ((key, unpack(packed[key], owner=f"sharded object {key!r}")) for key in keys)
    taken = [next(objects)[1] if is_sharded_object(leaf) else next(found) for _, leaf in leaves]
    return replaced(state, iter(taken))


def _unsharded(key: str, stored: StoredTensor, tensor_type: Any) -> Any:
    shape = stored.shape
    return tensor_type(key, None, stored.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape))


def _check(stored: StoredState, tensors: Iterable[tuple[tuple[Any, ...], Any]], keys: Iterable[str]) -> None:
    for key in keys:
        if key not in stored.object_keys:
            raise _missing("sharded object", key, stored.object_keys, stored)
    problems = []
    for path, leaf in tensors:
        found = stored.tensors.get(leaf.key)
        if found is None:
            raise _missing(f"sharded tensor of {shown_path(path)}", leaf.key, stored.tensors, stored)
        problems += [f"{leaf.key!r} at {shown_path(path)} {what}" for what in _misfits(leaf, found)]
    if problems:
        more = f"; and {len(problems) - PROBLEMS_SHOWN_MAX} more" if len(problems) > PROBLEMS_SHOWN_MAX else ""
        raise IncompatibleError(
            f"checkpoint {str(stored.path)!r} does not fit, and nothing was changed: "
            f"{'; '.join(problems[:PROBLEMS_SHOWN_MAX])}{more}",
            hint="nothing was changed",
        )


def _missing(what: str, key: str, known: Iterable[str], stored: StoredState) -> NotFoundError:
    near = difflib.get_close_matches(key, known, n=3)
    hint = f"there is {', '.join(map(repr, near))}" if near else None
    return NotFoundError(f"{what} is not in checkpoint {str(stored.path)!r}", found=key, hint=hint)


def _misfits(leaf: Any, stored: StoredTensor) -> list[str]:
    found = []
    shape = tuple(leaf.global_shape)
    if leaf.dtype != stored.dtype and not _converts(stored.dtype, leaf.dtype):
        found.append(f"has dtype {leaf.dtype}, the checkpoint {stored.dtype}")
    if shape != stored.shape and (not leaf.allow_shape_mismatch or len(shape) != len(stored.shape)):
        found.append(f"has shape {shape}, the checkpoint {stored.shape}")
    return found


# Powers of two without a sign, and pairs of numbers in a byte.
_ALONE = frozenset(getattr(torch, name, None) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2")) - {None}


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether numbers stay what they are, except for the precision of a floating point dtype."""
    if not _ALONE.isdisjoint((stored, wanted)):
        return False
    if not wanted.is_floating_point or stored.is_complex or stored is torch.bool:
        return False
    return stored.is_floating_point or torch.finfo(wanted).max >= torch.iinfo(stored).max


def _wanted(leaf: Any, stored: StoredTensor) -> _Wanted:
    if leaf.data is not None:
        tensor = leaf.data.detach()
    else:
        part = getattr(leaf, "flattened_range", None)
        shape = tuple(leaf.local_shape) if part is None else (part.stop - part.start,)
        tensor = torch.empty(shape, dtype=leaf.dtype, device="cpu")
    filled = tensor if tensor.dtype is stored.dtype else torch.empty_like(tensor, dtype=stored.dtype)
    return _Wanted(leaf=leaf, tensor=tensor, filled=filled, stored=stored)


def _fill(stored: StoredState, wanted: Sequence[_Wanted], packed: dict[str, Any]) -> None:
    for item in wanted:
        if tuple(item.leaf.global_shape) != item.stored.shape:
            item.filled.zero_()  # What the checkpoint does not have.
    rounds = _rounds(wanted) or [{}]
    for number, targets in enumerate(rounds):
        stored.load({TENSORS: targets, OBJECTS: packed if number == 0 else {}})


def _rounds(wanted: Sequence[_Wanted]) -> list[dict[str, Sharded]]:
    """Return the targets of one load after the other, so that no two pieces in one of them overlap."""
    by_key: dict[str, list[list[Piece]]] = defaultdict(list)
    stored = {item.leaf.key: item.stored for item in wanted}
    for item in wanted:
        rounds = by_key[item.leaf.key]
        for piece in pieces_of(item.leaf, item.filled):
            inside = clipped(piece, item.stored.shape)
            if inside is None:
                continue
            free = next((held for held in rounds if not any(_overlap(inside, other) for other in held)), None)
            if free is None:
                rounds.append(free := [])
            free.append(inside)
    count = max((len(rounds) for rounds in by_key.values()), default=0)
    return [
        {
            key: Sharded(whole_shape=stored[key].shape, dtype=stored[key].dtype, pieces=tuple(rounds[number]))
            for key, rounds in by_key.items()
            if number < len(rounds)
        }
        for number in range(count)
    ]


def _overlap(one: Piece, other: Piece) -> bool:
    return overlap(one.begin, one.tensor.shape, other.begin, other.tensor.shape) is not None
