"""The state dict of a module, read past its state_dict() where that is torch's own: in about half of the time.

Read so is a module whose result follows from its attributes alone, as those of all modules in it:

1. The class takes the methods that state_dict() uses from torch, whose own are nobody's replacement, and looks
   attributes up as usual; the object has none of these methods of its own.
2. The attributes are plain dicts of plain tensors and of such modules.
3. There are no hooks and no extra state, and the version is a plain value of the class.

Any other module is asked. The tensors are the live ones, where state_dict() returns detached ones over their memory.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

# Tensors of these types are all there; others may be spread over ranks.
PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer if hasattr(torch.nn, "Buffer") else None))
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_PARTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks")
_NOT_SAVED = "_non_persistent_buffers_set"
_ATTRIBUTES = (*_PARTS, *_HOOKS, _NOT_SAVED)
_attributes_of = itemgetter(*_ATTRIBUTES)
_NOT_OF_OBJECTS = frozenset((*_METHODS, "_version"))
_VERSIONS = (bool, int, float, type(None), str)  # Of other types it is computed, or can be changed in place.
_NO_HOOKS = (dict, OrderedDict)
_USUAL_LOOKUP: object = object.__getattribute__
_TORCH = str(Path(torch.__file__).parent)


def _is_torchs(function: Any) -> bool:
    """Return whether a function was torch's when this module was imported, and nobody's wrapper around it."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


# What is not torch's is nobody's: then no class has it.
_TORCHS_OWN: dict[str, object] = {
    name: function if _is_torchs(function) else object()
    for name in _METHODS
    for function in [inspect.getattr_static(torch.nn.Module, name)]
}


class _Unusual(Exception):
    """A module has to be asked for its state."""


def state_of(owner: Any) -> Any:
    """Return what the state_dict() of an object returns; the live tensors of a module that need not be asked."""
    if isinstance(owner, torch.nn.Module):
        reader = _Reader()
        try:
            reader.read(owner, "")
            return reader.state_dict()
        except (_Unusual, TypeError):  # A name is no text.
            pass
    parts = objects_in(owner)
    return owner.state_dict() if parts is None else parts


def objects_in(owner: Any) -> Mapping[str, Any] | None:
    """Return the objects in a TrainerState, each of which is saved and loaded as if it stood alone."""
    return owner._objects_in_it if hasattr(type(owner), "_objects_in_it") else None


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the live tensors of a module that need not be asked; of any other none."""
    reader = _Reader()
    try:
        reader.read(module, "")
    except (_Unusual, TypeError):
        return {}
    return dict(reader.found)


class _Reader:
    """Reads modules in the order of state_dict(): own tensors first, then the modules in it, each after the other."""

    def __init__(self) -> None:
        self.found: OrderedDict[str, Any] = OrderedDict()
        self._metadata: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._facts: dict[type, dict[str, Any]] = {}

    def state_dict(self) -> Any:
        """Return what was read. _Unusual."""
        others = {type(tensor) for tensor in self.found.values()} - PLAIN_TENSORS
        if any(kind.__name__ == "DTensor" or not hasattr(kind, "__tensor_flatten__") for kind in others):
            raise _Unusual
        state: Any = self.found
        state._metadata = self._metadata
        return state

    def read(self, module: Any, prefix: str) -> None:
        """Read a module and those in it; prefix: before all their names. _Unusual."""
        attributes, facts = vars(module), self._facts.get(type(module))
        if facts is None:
            facts = self._facts[type(module)] = _facts_of(type(module))
        if type(attributes) is not dict or not attributes.keys().isdisjoint(_NOT_OF_OBJECTS):
            raise _Unusual
        try:
            parameters, buffers, modules, before, after, not_saved = _attributes_of(attributes)
        except KeyError:
            raise _Unusual from None
        if not type(parameters) is type(buffers) is type(modules) is dict or type(not_saved) is not set:
            raise _Unusual
        if before or after or type(before) not in _NO_HOOKS or type(after) not in _NO_HOOKS:
            raise _Unusual
        found = self.found
        self._metadata[prefix[:-1]] = facts
        for name, tensor in parameters.items():
            if tensor is not None:
                found[prefix + name] = tensor
        for name, tensor in buffers.items():
            if tensor is not None and name not in not_saved:
                found[prefix + name] = tensor
        for name, below in modules.items():
            if below is not None:
                self.read(below, prefix + name + ".")


def _facts_of(kind: type) -> dict[str, Any]:
    """Return what torch notes in `_metadata` of modules of a class that need not be asked. _Unusual."""
    version = inspect.getattr_static(kind, "_version", None)
    if not issubclass(kind, torch.nn.Module) or type(version) not in _VERSIONS:
        raise _Unusual
    if kind.__getattribute__ is not _USUAL_LOOKUP or any("__class__" in vars(base) for base in kind.__mro__[:-1]):
        raise _Unusual
    if any(getattr(kind, name, None) is not own for name, own in _TORCHS_OWN.items()) or _has_any(kind, _ATTRIBUTES):
        raise _Unusual
    return {"version": version}


def _has_any(kind: type, names: Iterable[str]) -> bool:
    """Return whether a class has one of the attributes that objects must have."""
    return any(hasattr(kind, name) for name in names)
