"""Give objects their state where it holds composites (plan/composite_tensors.py), which nobody may cast or copy.

Those of a module are filled in place, so its load_state_dict does without them, unless its state_dict() has given
copies, or it has loading code of its own, which may ask for them. An optimizer gets them after its load_state_dict.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from asyncckpt.engine.load.load_object import changes_state
from asyncckpt.plan.composite_tensors import is_composite, on_device, place_of
from asyncckpt.plan.load_targets import Rebuilt
from asyncckpt.plan.object_checks import loads_as


def load_with_composites(item: Rebuilt, state: Any, load: Callable[..., None]) -> None:
    """Give an object its state. load: does it with all but composites; filled=: keys of what a module has."""
    if item.is_module and item.composites:
        load(state, filled=_filled_keys(item))
    elif loads_as(torch.optim.Optimizer, item.owner):
        _load_beside(item.owner, state, load)
    else:
        load(state)


def _filled_keys(item: Rebuilt) -> list[str]:
    tensors = itertools.chain(item.owner.parameters(), item.owner.buffers())
    live = {place_of(tensor) for tensor in tensors if is_composite(tensor)}
    own = {at[-1]: tensor for at, (tensor, _) in item.composites.items() if at[:-1] == item.path}
    begins = tuple(f"{name}." if name else "" for name, each in item.owner.named_modules() if changes_state(each))
    keys = [key for key, tensor in own.items() if place_of(tensor) in live and not key.startswith(begins)]
    return [item.wrapped.get(key, key) for key in keys]


def _load_beside(owner: torch.optim.Optimizer, state: Any, load: Callable[[Any], None]) -> None:
    """Load the state of an optimizer, which casts what it gets, and then put its composites there as they were stored.

    load: loads a state. What has hooks before it gets all of it.
    """
    entries = state.get("state") if isinstance(state, Mapping) else None
    if not isinstance(entries, Mapping) or owner._optimizer_load_state_dict_pre_hooks:
        load(state)
        return
    taken: dict[Any, dict[str, Any]] = {}
    others: dict[Any, Any] = {}
    for number, entry in entries.items():
        found = {key: item for key, item in entry.items() if is_composite(item)} if isinstance(entry, dict) else {}
        taken[number] = found
        others[number] = (
            {**entry, **{key: torch.zeros((), dtype=torch.float32, device="cpu") for key in found}} if found else entry
        )
    load({**state, "state": others})
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, item in taken.get(number, {}).items():
            owner.state[parameter][key] = on_device(item, parameter.device)
