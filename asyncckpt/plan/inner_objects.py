"""Objects inside of another one, the parts of a TrainerState: each is checked, and made to fit, as if it stood alone.

One whose state does not fit stays as it is, where the load is not strict: it gets the state that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from asyncckpt.format.tree import VALUE, Path, path_name
from asyncckpt.plan.load_targets import Rebuilt


def inner_objects(item: Rebuilt) -> list[Rebuilt]:
    """Return the objects that one loads itself."""
    parts = item.owner._inner_objects.items()
    return [Rebuilt(path=(*item.path, name), owner=part, tree=VALUE) for name, part in parts]


def without_parts(
    inner: Sequence[Rebuilt], wanted: Sequence[Path], left_out: list[Path], not_wanted: set[Path]
) -> list[Path]:
    """Return what a filter has left out, without whole parts, which stay as they are: these are added to not_wanted."""
    for part in inner:
        below = {path for path in wanted if path[: len(part.path)] == part.path}
        if below and below.issubset(left_out):
            not_wanted.add(part.path)
            left_out = [path for path in left_out if path not in below]
    return left_out


def with_inner_states(
    inner: Sequence[Rebuilt], left: Sequence[Collection[Path]], fits: Mapping[Path, Callable[[Any], Any]]
) -> Callable[[Any], Any]:
    """Return what makes a state with those of other objects fit. left: the paths of those that stay as they are, when
    it is called.
    """

    def fit(state: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(state)
        for part in inner:
            name = part.path[-1]
            if any(part.path in each for each in left):
                found[name] = part.owner.state_dict()
            elif part.path in fits:
                found[name] = fits[part.path](state[name])
        return found

    return fit


def of_module(item: Rebuilt, stored: Any) -> list[str]:
    """Return what a module inside of another object would refuse, as far as it can be known."""
    own, name = item.owner, path_name(item.path)
    is_torchs = type(own).load_state_dict is torch.nn.Module.load_state_dict
    if not is_torchs or any(each._load_state_dict_pre_hooks for each in own.modules()):
        return []
    state = own.state_dict()
    if not isinstance(stored, Mapping) or state.keys() != stored.keys():
        return [f"{name!r} is a module, and the state of another one was saved"]
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and isinstance(stored[key], torch.Tensor):
            own, there = ((each.dtype, tuple(each.shape)) for each in (value, stored[key]))
            if own != there:
                return [f"{name!r} has {key!r} as {own[0]} {own[1]}, the checkpoint {there[0]} {there[1]}"]
    return []
