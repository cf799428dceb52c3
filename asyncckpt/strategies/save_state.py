"""What one rank saves of a sharded state dict: its main replicas, as the state that a Saver takes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.sharded import Piece, Sharded
from asyncckpt.strategies.backend import OBJECTS, TENSORS
from asyncckpt.strategies.boxes import pieces_of
from asyncckpt.strategies.mapping import (
    ShardedStateDict,
    is_main_replica,
    is_sharded_object,
    is_sharded_tensor,
    sharded_leaves,
    shown_path,
)
from asyncckpt.strategies.packed_objects import pack


def state_to_save(sharded_state_dict: ShardedStateDict) -> dict[str, Any]:
    """Return tensors by key and packed objects by unique key; tensors are not copied. UsageError naming the leaf."""
    tensors: dict[str, list[tuple[Any, Piece]]] = defaultdict(list)
    objects: dict[str, Any] = {}
    for path, leaf in sharded_leaves(sharded_state_dict):
        if not is_main_replica(leaf.replica_id):
            continue
        if not isinstance(leaf.key, str):
            raise UsageError(f"leaf {shown_path(path)} has a key that is not a string", found=leaf.key)
        if is_sharded_object(leaf):
            if leaf.unique_key in objects:
                raise UsageError("a sharded object has two main replicas", found=leaf.unique_key)
            objects[leaf.unique_key] = pack(leaf.data, path=path)
            continue
        if not isinstance(leaf.data, torch.Tensor):
            what = f"sharded tensor {leaf.key!r} at {shown_path(path)} has no data to save"
            raise UsageError(what, found=type(leaf.data))
        tensors[leaf.key] += [(leaf, piece) for piece in pieces_of(leaf, leaf.data.detach())]
    return {TENSORS: {key: _sharded(key, held) for key, held in tensors.items() if held}, OBJECTS: objects}


def objects_to_save(sharded_objects_state_dict: ShardedStateDict) -> dict[str, Any]:
    """Do the same for a dict that holds objects only; UsageError for a tensor."""
    for path, leaf in sharded_leaves(sharded_objects_state_dict):
        if is_sharded_tensor(leaf):
            raise UsageError(f"leaf {shown_path(path)} is a sharded tensor", expected="sharded objects only")
    return state_to_save(sharded_objects_state_dict)


def _sharded(key: str, held: list[tuple[Any, Piece]]) -> Sharded:
    first = held[0][0]
    for leaf, _ in held:
        if tuple(leaf.global_shape) != tuple(first.global_shape) or leaf.dtype != first.dtype:
            raise UsageError(
                f"pieces of sharded tensor {key!r} disagree on its shape or dtype",
                found=(tuple(leaf.global_shape), leaf.dtype),
                expected=(tuple(first.global_shape), first.dtype),
            )
    pieces = tuple(piece for _, piece in held)
    try:
        return Sharded(whole_shape=tuple(first.global_shape), dtype=first.dtype, pieces=pieces)
    except UsageError as error:
        raise UsageError(f"sharded tensor {key!r} cannot be saved: {error}") from error
