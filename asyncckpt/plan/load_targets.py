"""What a load fills: dense leaves in place, objects by load_state_dict, tables by rows.

In place are plain tensors, arrays and the tensors of modules (whose load_state_dict is called afterwards, with the same
tensors, so that its hooks run). Other objects with load_state_dict (optimizers, schedulers) get a state dict made anew
from the checkpoint, because a fresh optimizer has no tensors yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.format.tree import ARRAY, VALUE, Node, Path, leaves, path_name
from asyncckpt.plan.leaf_facts import check_leaf
from asyncckpt.plan.leaf_names import tensor_names
from asyncckpt.plan.state import FlatState, flatten


@dataclass(frozen=True)
class InPlace:
    """A dense leaf that is overwritten."""

    name: str
    path: Path
    tensor: torch.Tensor


@dataclass(frozen=True)
class Rebuilt:
    """An object below `path` that gets a new state dict; a module gets its own, overwritten in place."""

    path: Path
    owner: Any
    module_state: FlatState | None


@dataclass(frozen=True)
class DenseTargets:
    """All dense targets. `values` are the paths of plain values the caller wants back."""

    in_place: tuple[InPlace, ...]
    rebuilt: tuple[Rebuilt, ...]
    values: tuple[Path, ...]


def dense_targets(state: Mapping[str, Any], *, tables: Iterator[str]) -> DenseTargets:
    """Take a target state apart; UsageError for a leaf that cannot be written."""
    flat = flatten(state)
    names = dict(
        zip([p for p, n in leaves(flat.tree) if n is not VALUE], tensor_names(flat.tree, tables=tables), strict=True)
    )
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
        is_module = isinstance(owner, torch.nn.Module)
        rebuilt.append(Rebuilt(path=path, owner=owner, module_state=flatten(owner.state_dict()) if is_module else None))
        hidden.append(path)
    values = []
    for path, node in leaves(flat.tree):
        inside = next((item for item in rebuilt if path[: len(item.path)] == item.path), None)
        if node is VALUE:
            if inside is None:
                values.append(path)
            continue
        if inside is None:
            in_place.append(_writable(names[path], path, node, live[path]))
    for item in rebuilt:
        in_place += _module_leaves(item, names)
    return DenseTargets(in_place=tuple(in_place), rebuilt=tuple(rebuilt), values=tuple(values))


def _module_leaves(item: Rebuilt, names: Mapping[Path, str]) -> list[InPlace]:
    if item.module_state is None:
        return []
    paths = [(*item.path, *path) for path, node in leaves(item.module_state.tree) if node is not VALUE]
    return [
        _writable(names[path], path, None, tensor)
        for path, tensor in zip(paths, item.module_state.tensors, strict=True)
    ]


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


def _live_leaves(state: Mapping[str, Any], flat: FlatState) -> dict[Path, Any]:
    """The user's own object of every leaf: flatten copies arrays that torch cannot hold."""
    found: dict[Path, Any] = {}
    tensors = iter(flat.tensors)
    for path, node in leaves(flat.tree):
        if node is VALUE:
            continue
        found[path] = next(tensors)
        if node is ARRAY:
            found[path] = _walk(state, path)
    return found


def _walk(state: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(state, (Mapping, list, tuple)):
            state = state.state_dict()
        state = state[key if isinstance(key, str) else key[1]]
    return state


def _writable(name: str, path: Path, node: Node | None, leaf: Any) -> InPlace:
    if isinstance(leaf, np.generic):
        raise UsageError(f"target {name!r} is a NumPy scalar and cannot be written", hint="use a 0-d array")
    if isinstance(leaf, np.ndarray):
        if not leaf.flags.writeable:
            raise UsageError(f"target {name!r} is a read-only array")
        if any(stride < 0 for stride in leaf.strides):
            raise UsageError(f"target {name!r} has negative strides", hint="load into a contiguous array")
        leaf = torch.from_numpy(leaf)
    check_leaf(leaf, name)
    tensor = leaf.detach()
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError(f"target {name!r} is an inference tensor and cannot be written outside inference mode")
    if tensor.numel() > 1 and _overlaps(tensor):
        raise UsageError(
            f"target {name!r} has overlapping elements",
            found=tuple(tensor.stride()),
            hint="load into a contiguous tensor",
        )
    return InPlace(name=name, path=path, tensor=tensor)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two indices may share memory: a dimension that does not step over everything the smaller strides span."""
    span = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < span:
            return True
        span = stride * (size - 1) + span
    return False
