"""What a load tells modules, or their state dicts, of the version of their tensors, and which modules resize theirs.

The version is that of the modules which the tensors are taken from: without a filter, what was stored of the module
itself.

Some modules take tensors of other shapes than theirs: those that size buffers when they have seen data, or had other
ones in an earlier version, and see to it in a `_load_from_state_dict` or a hook of their own, as torch.ao's observers.
A module does not declare it, so it is tried on a copy, before anything is filled.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from asyncckpt.format.module_facts import module_of
from asyncckpt.format.tree import VALUE, Path, descend, metadata_for, module_metadata, path_name
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.load_offer import Loads
from asyncckpt.plan.load_targets import DenseTargets, Rebuilt, is_extra_state
from asyncckpt.plan.object_checks import form_of, loads_as
from asyncckpt.plan.wrapped_names import PlainNames


class ModuleSources:
    """The `_metadata` of modules, or their state dicts, by their paths, and `problems`: those with tensors of several
    versions.

    not_given: the keys of what is not loaded in modules of other versions, which would upgrade it.
    """

    def __init__(self, objects: Iterable[Rebuilt], answer: Loads, contents: Contents, targets: DenseTargets) -> None:
        self.problems: list[str] = []
        self._contents = contents
        self._known: dict[Path, Mapping[str, Any] | None] = {}
        self._sources = {
            leaf.path: contents.dense[source].path
            for leaf in targets.in_place
            for source in answer.get(leaf.name, ())
            if source in contents.dense
        }
        self._left_out = {item.path for item in contents.dense.values()} - self._sources.keys()
        modules = [item for item in objects if item.is_module]
        self.metadata = {item.path: self._of(item) for item in (*modules, *targets.state_dicts)}
        self.not_given = {
            item.path: frozenset(self._not_given(item)) for item in modules if loads_as(torch.nn.Module, item.owner)
        }
        for item in (*modules, *targets.state_dicts):
            paths = [(*item.path, key) for key in self._not_given(item)] if item.path not in self.not_given else ()
            self.problems += [
                f"{path_name(path)!r} is left out by the filter, and would be changed with a module of another version"
                for path in paths
                if path in self._left_out
            ]

    def _of(self, item: Rebuilt) -> Any:
        stored, own = descend(self._contents.tree, item.path), module_metadata(item.tree)
        found = own if stored is None else metadata_for(item.tree, stored)
        if own is None:
            return found
        said: dict[str, list[Any]] = {}
        above: dict[str, list[Any]] = {}
        for name, source, old in self._loaded(item):
            theirs = self._metadata_at(source)
            said.setdefault(name, []).append(own.get(name) if theirs is None else theirs.get(old))
            while theirs is not None and name and name.rpartition(".")[2] == old.rpartition(".")[2]:
                name, old = name.rpartition(".")[0], old.rpartition(".")[0]
                above.setdefault(name, []).append(theirs.get(old))
        for path in item.tensors:
            # What a filter leaves out stays as it is, and what it is.
            if path in self._left_out and len(path) == len(item.path) + 1 and not is_extra_state(path[-1]):
                mine = own.get(name := module_of(path[-1]))
                locals_ = said.setdefault(name, [mine])
                locals_ += [mine] if _version(mine) != _version(locals_[0]) else []
        start: dict[str, Any] = dict(found or {})
        for name, locals_ in (above | said).items():
            if any(local != locals_[0] for local in locals_):
                if name in said:
                    shown = path_name((*item.path, name) if name else item.path)
                    self.problems.append(f"module {shown!r} would get tensors of modules of other versions: {locals_}")
                continue
            start[name] = locals_[0]
        return OrderedDict((name, local) for name, local in start.items() if local is not None)

    def _not_given(self, item: Rebuilt) -> Iterator[str]:
        told: Mapping[str, Any] = self.metadata[item.path] or {}
        own: Mapping[str, Any] = module_metadata(item.tree) or {}
        others = [name for name, local in own.items() if _version(told.get(name)) != _version(local)]
        begins = tuple(f"{name}." if name else "" for name in others)
        for path in item.tensors.keys() - self._sources.keys() if begins else ():
            key = path[-1]
            if type(key) is str and len(path) == len(item.path) + 1 and key.startswith(begins):
                yield key

    def _loaded(self, item: Rebuilt) -> set[tuple[str, Path, str]]:
        """Return the names of modules with tensors that are loaded, and from which module of which state dict."""
        depth = len(item.path) + 1
        pairs = ((path, self._sources[path]) for path in item.tensors if path in self._sources and len(path) == depth)
        return {(module_of(path[-1]), source[:-1], module_of(source[-1])) for path, source in pairs}

    def _metadata_at(self, path: Path) -> Mapping[str, Any] | None:
        if path not in self._known:
            node = descend(self._contents.tree, path)
            self._known[path] = None if node is None else module_metadata(node)
        return self._known[path]


def _version(local: Any) -> Any:
    return None if local is None else local.get("version")


class ResizingModules:
    """Which modules of one load take tensors of other shapes."""

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
