"""Modules that take tensors of other shapes than theirs: those that size buffers when they have seen data, or had other
ones in an earlier version, and see to it in a `_load_from_state_dict` or a hook of their own, as torch.ao's observers.

Nobody says so of a module, so it is tried on a copy of it, before anything is filled.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from asyncckpt.format.tree import VALUE, Path, descend, module_metadata
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.load_targets import Rebuilt
from asyncckpt.plan.object_checks import form_of
from asyncckpt.plan.wrapped_names import PlainNames


class ResizingModules:
    """Answers for the modules of one load."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._answers: dict[tuple[Path, str], bool] = {}

    def takes(self, owner: Rebuilt, stored: StoredDense) -> bool:
        """Return whether the module that has a tensor of another shape than the stored one resizes it."""
        key = stored.path[-1]
        if len(stored.path) != len(owner.path) + 1 or not isinstance(key, str):
            return False
        place = owner.path, key.rpartition(".")[0]
        if place not in self._answers:
            metadata: Mapping[str, Any] = module_metadata(descend(self._contents.tree, owner.path) or VALUE) or {}
            self._answers[place] = _is_resizing(owner.owner, place[1], self._stored[place], metadata.get(place[1]))
        return self._answers[place]

    @cached_property
    def _stored(self) -> Mapping[tuple[Path, str], dict[str, StoredDense]]:
        """The stored tensors of each module, by its place and their names in it."""
        found: dict[tuple[Path, str], dict[str, StoredDense]] = defaultdict(dict)
        for item in self._contents.dense.values():
            if isinstance(item.path[-1], str):
                module, _, name = item.path[-1].rpartition(".")
                found[item.path[:-1], module][name] = item
        return found


def _is_resizing(root: torch.nn.Module, name: str, stored: Mapping[str, StoredDense], said: Any) -> bool:
    """Return it of the module of a name. said: what was stored of it in `_metadata`; None: nothing."""
    try:
        module = PlainNames(root).module(name)
        hooks = module._load_state_dict_pre_hooks.values()
        # What a hook has closed over is not copied: it could change the module itself.
        if any(getattr(getattr(hook, "hook", hook), "__closure__", None) for hook in hooks):
            return False
        if not hooks and type(module)._load_from_state_dict is torch.nn.Module._load_from_state_dict:
            return False
        tried: Any = copy.deepcopy(module)
        errors: list[str] = []
        metadata = {"version": getattr(module, "_version", None)} if said is None else dict(said)
        # In memory of their own: what is expanded cannot be given to all operations.
        state = {key: form_of(item).contiguous() for key, item in stored.items()}
        with torch.no_grad():
            tried._load_from_state_dict(state, "", metadata, True, [], [], errors)
    except Exception:  # It is foreign code, on a copy: any failure says no.
        return False
    return not errors
