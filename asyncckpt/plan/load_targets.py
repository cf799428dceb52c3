"""What a load fills: dense leaves in place, objects by load_state_dict, tables by rows.

In place are plain tensors, arrays, this rank's boxes of tensors that are spread, and the tensors of modules (whose
load_state_dict is called afterwards, with the same tensors, so that its hooks run). Other objects with load_state_dict
(optimizers, schedulers) get a state dict made anew from the checkpoint, because a fresh optimizer has no tensors yet.
Its tensors are whole ones, but

1. where the object's own state has a spread tensor (DTensor, ShardedTensor, Sharded) of the stored shape and dtype at
   the same path, that one is filled in place, box by box, and given back to it;
2. where the object is an optimizer (it has param_groups), and the stored tensor has the shape of its parameter, which
   is a DTensor, a new DTensor of the parameter's mesh and placements is filled: a fresh optimizer over sharded
   parameters gets sharded state. Other state of such a parameter (a step, a factored moment) comes whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.tree import (
    TENSOR,
    VALUE,
    Key,
    Node,
    Path,
    key_value,
    leaves,
    path_name,
    tensor_names,
    tensor_paths,
)
from asyncckpt.model.sharded import Piece
from asyncckpt.plan.contents import StoredDense
from asyncckpt.plan.leaf_facts import check_leaf
from asyncckpt.plan.sharded_leaves import as_sharded
from asyncckpt.plan.state import FlatState, flatten


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


@dataclass(frozen=True)
class InPlace:
    """A dense leaf that is overwritten: the boxes of it that are here. One that is not spread is one box, all of it."""

    name: str
    path: Path
    whole_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ModuleState:
    """The state dict of a module: its tree, and what stands at the leaves, each in its order."""

    tree: Node
    tensors: tuple[Any, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Rebuilt:
    """An object below `path` that gets a new state dict; a module gets its own, overwritten in place.

    spread: of another object, the leaves of its state that are spread over ranks now, by their paths.
    """

    path: Path
    owner: Any
    module_state: ModuleState | None
    spread: Mapping[Path, Any]


@dataclass(frozen=True)
class DenseTargets:
    """All dense targets. `values` are the paths of plain values the caller wants back."""

    in_place: tuple[InPlace, ...]
    rebuilt: tuple[Rebuilt, ...]
    values: tuple[Path, ...]


def dense_targets(state: Mapping[str, Any], *, tables: Iterator[str]) -> DenseTargets:
    """Take a target state apart; UsageError for a leaf that cannot be written."""
    flat = flatten(state)
    names = dict(zip(tensor_paths(flat.tree), tensor_names(flat.tree, tables=tables), strict=True))
    live = _live_leaves(state, flat)
    in_place: list[InPlace] = []
    rebuilt: list[Rebuilt] = []
    stateful = iter(flat.stateful)
    hidden: list[Path] = []
    for path in _state_paths(flat.tree):
        owner = next(stateful)
        if any(path[: len(outer)] == outer for outer in hidden):
            continue  # Inside another object, which loads it.
        if not callable(getattr(owner, "load_state_dict", None)):
            raise UsageError(
                f"state {path_name(path)!r} has state_dict() but no load_state_dict()", found=type(owner).__name__
            )
        rebuilt.append(_rebuilt(path, owner))
        hidden.append(path)
    values = []
    for path, node in leaves(flat.tree):
        inside = next((number for number, item in enumerate(rebuilt) if path[: len(item.path)] == item.path), None)
        if node is VALUE:
            if inside is None:
                values.append(path)
            continue
        if inside is None:
            in_place.append(writable(names[path], path, live[path]))
        elif rebuilt[inside].module_state is None and _is_spread(live[path]):
            item = rebuilt[inside]
            rebuilt[inside] = replace(item, spread={**item.spread, path: live[path]})
    for item in rebuilt:
        in_place += _module_leaves(item, names)
    return DenseTargets(in_place=tuple(in_place), rebuilt=tuple(rebuilt), values=tuple(values))


def writable(name: str, path: Path, leaf: Any) -> InPlace:
    """A leaf as a target; UsageError, UnsupportedError when it cannot be written."""
    sharded = None if type(leaf) in (torch.Tensor, torch.nn.Parameter) else as_sharded(leaf, name)
    if sharded is None:
        tensor = writable_tensor(name, leaf)
        whole = (Piece(tensor, (0,) * tensor.dim()),)
        return InPlace(name=name, path=path, whole_shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=whole)
    pieces = tuple(Piece(writable_tensor(name, piece.tensor), piece.begin) for piece in sharded.pieces)
    return InPlace(name=name, path=path, whole_shape=sharded.whole_shape, dtype=sharded.dtype, pieces=pieces)


def _rebuilt(path: Path, owner: Any) -> Rebuilt:
    if not isinstance(owner, torch.nn.Module):
        return Rebuilt(path=path, owner=owner, module_state=None, spread={})
    state = owner.state_dict()
    flat = flatten(state)
    live = _live_leaves(state, flat)
    own = ModuleState(tree=flat.tree, tensors=tuple(live.values()), values=tuple(flat.values))
    return Rebuilt(path=path, owner=owner, module_state=own, spread={})


def _module_leaves(item: Rebuilt, names: Mapping[Path, str]) -> list[InPlace]:
    if item.module_state is None:
        return []
    paths = [(*item.path, *path) for path in tensor_paths(item.module_state.tree)]
    return [writable(names[path], path, leaf) for path, leaf in zip(paths, item.module_state.tensors, strict=True)]


def _is_spread(leaf: Any) -> bool:
    return type(leaf) is not torch.Tensor and as_sharded(leaf, "") is not None


def _state_paths(node: Node, prefix: Path = ()) -> Iterator[Path]:
    """Paths of "state" nodes, in the order in which flatten met their objects."""
    if node[0] == "state":
        yield prefix
        yield from _state_paths(node[1], prefix)
    elif node[0] == "dict":
        for key, child in zip(node[1], node[2], strict=True):
            yield from _state_paths(child, (*prefix, key))
    elif node[0] in ("list", "tuple"):
        for index, child in enumerate(node[1]):
            yield from _state_paths(child, (*prefix, ("int", index)))


def _live_leaves(state: Any, flat: FlatState) -> dict[Path, Any]:
    """Return the user's own object of every leaf: flatten copies some arrays, and takes other leaves apart."""
    plain = not flat.sharded and all(node in (TENSOR, VALUE) for _, node in leaves(flat.tree))
    found = flat.tensors if plain else _walk(state, flat.tree)
    return dict(zip(tensor_paths(flat.tree), found, strict=True))


def _walk(state: Any, node: Node) -> Iterator[Any]:
    """Return what stands at the leaves of a tree that are no plain values."""
    if node is VALUE:
        return
    if len(node) == 1:
        yield state
    elif node[0] == "state":
        yield from _walk(state.state_dict(), node[1])
    elif node[0] == "dict":
        for key, child in zip(node[1], node[2], strict=True):
            yield from _walk(state[key_value(key)], child)
    else:
        for item, child in zip(state, node[1], strict=True):
            yield from _walk(item, child)


def writable_tensor(name: str, leaf: Any) -> torch.Tensor:
    """Return the tensor to write to; UsageError, UnsupportedError for what does not hold a value for every element."""
    if isinstance(leaf, np.generic):
        raise UsageError(f"target {name!r} is a NumPy scalar and cannot be written", hint="use a 0-d array")
    if isinstance(leaf, np.ndarray):
        if not leaf.flags.writeable:
            raise UsageError(f"target {name!r} is a read-only array")
        if any(stride < 0 for stride in leaf.strides):
            raise UsageError(f"target {name!r} has negative strides", hint="load into a contiguous array")
        leaf = torch.from_numpy(leaf)
    check_leaf(leaf, name)
    tensor: torch.Tensor = leaf.detach()
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError(f"target {name!r} is an inference tensor and cannot be written outside inference mode")
    if tensor.numel() > 1 and _overlaps(tensor):
        raise UsageError(
            f"target {name!r} has overlapping elements",
            found=tuple(tensor.stride()),
            hint="load into a contiguous tensor",
        )
    return tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two indices may share memory: some dimension does not step over all that smaller strides span."""
    span = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < span:
            return True
        span = stride * (size - 1) + span
    return False


class ObjectLeaves:
    """Answers for one object, whose state was stored with these values."""

    def __init__(self, item: Rebuilt, values: Mapping[Path, Any]) -> None:
        self._item = item
        self._parameters = dict(_parameters(item, values))

    def find(self, stored: StoredDense) -> tuple[InPlace | None, Any]:
        """Return the boxes to fill of the spread tensor that a stored one becomes, and it; Nones: a new whole one."""
        dtype = dtype_by_name(stored.dtype, owner=stored.name).dtype
        own = self._item.spread.get(stored.path)
        if own is not None:
            target = writable(stored.name, stored.path, own)
            if (target.whole_shape, target.dtype) == (stored.shape, dtype):
                return target, own
        below = stored.path[len(self._item.path) :]
        parameter = self._parameters.get(below[1]) if len(below) == 3 and below[0] == "state" else None
        if parameter is None or tuple(parameter.shape) != stored.shape:
            return None, None
        # No communication: an empty tensor like another DTensor has its mesh and placements.
        given = torch.empty_like(parameter.detach(), dtype=dtype)
        return writable(stored.name, stored.path, given), given


def _parameters(item: Rebuilt, values: Mapping[Path, Any]) -> Iterator[tuple[Key, Any]]:
    """Return the DTensor parameters of an optimizer, by the keys under which its stored state has theirs.

    As torch.optim.Optimizer.load_state_dict does it: the stored groups number parameters, and the n-th of all of them
    is the n-th of the optimizer's own.
    """
    groups = getattr(item.owner, "param_groups", None)
    if not isinstance(groups, list):
        return
    own = [parameter for group in groups for parameter in group["params"]]
    numbers = [number for index in range(len(groups)) for number in _stored_list(item, index, values)]
    if len(own) != len(numbers):
        return  # load_state_dict says so better.
    for number, parameter in zip(numbers, own, strict=True):
        if hasattr(parameter, "device_mesh") and hasattr(parameter, "placements"):
            yield (number if isinstance(number, str) else (type(number).__name__, number)), parameter


def _stored_list(item: Rebuilt, group: int, values: Mapping[Path, Any]) -> Iterator[Any]:
    """Return the numbers of the parameters of a stored group."""
    for index in itertools.count():
        path = (*item.path, "param_groups", ("int", group), "params", ("int", index))
        if path not in values:
            return
        yield values[path]
