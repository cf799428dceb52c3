"""Names in the state dict of a module as they are without the wrappers inside of it: DDP, torch.compile, checkpointing.

As torch.distributed.checkpoint.state_dict does it: a wrapper is not part of a name, at any level, whether the state
dict spells it or a hook of the wrapper has left it out.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from asyncckpt.format.tree import metadata_in

_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
# What holds the module in wrappers that are known by nothing else: torch.compile, activation checkpointing, FSDP1.
_SURE = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_SURE_PART = re.compile(rf"(?<![^.])({'|'.join(_SURE)})\.")
_ANY = (*_SURE, "module")
_ANY_PART = re.compile(rf"(?<![^.])({'|'.join(_ANY)})(?![^.])")
_ANY_PREFIX = re.compile(rf"(?<![^.])({'|'.join(_ANY)})\.")


def inner_name(module: Any) -> str | None:
    """Return under which name a wrapper holds its module; None of any other module, as one with more than that."""
    if len(module._modules) != 1 or module._parameters or module._buffers:
        return None
    (name,) = module._modules.keys()
    return name if name in _SURE or (name == "module" and isinstance(module, _PARALLEL)) else None


def unwrapped(value: Any) -> Any:
    """Return the module inside of DDP, DataParallel or torch.compile, so that names are the same with and without."""
    return _unwrapped(value)[0]


def outer_prefix(value: Any) -> str:
    """Return what the wrappers around a module put before all names of their own state dicts."""
    return _unwrapped(value)[1]


def _unwrapped(value: Any) -> tuple[Any, str]:
    prefix = ""
    while isinstance(value, torch.nn.Module) and (name := inner_name(value)) in ("module", "_orig_mod"):
        value, prefix = value._modules[name], f"{prefix}{name}."
    return value, prefix


def without_sure_parts(name: str) -> str:
    """Return a name without the parts that only wrappers put there."""
    return _SURE_PART.sub("", name)


def bare_name(name: str) -> str:
    """Return a name without the parts that wrappers may have put there."""
    return _ANY_PREFIX.sub("", name)


class PlainNames:
    """The names of one module, which is no wrapper itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._found: dict[str, tuple[str, Any]] = {"": ("", module)}

    def of_tensor(self, name: str) -> str:
        begin, dot, last = name.rpartition(".")
        return f"{plain}.{last}" if dot and (plain := self.of_module(begin)) else last

    def of_module(self, name: str) -> str:
        return self._of(name)[0]

    def module(self, name: str) -> Any:
        """Return the module of a plain name, without wrappers around it; None: there is none."""
        at = self._of(name)[1]
        while at is not None and (inner := inner_name(at)) is not None:
            at = at._modules[inner]
        return at

    def _of(self, name: str) -> tuple[str, Any]:
        """Return the plain name of a module, and the module; None for it where there is no such one."""
        if name not in self._found:
            begin, _, last = name.rpartition(".")
            plain, at = self._of(begin)
            self._found[name] = _below(plain, at, last)
        return self._found[name]


def _below(plain: str, at: Any, name: str) -> tuple[str, Any]:
    while at is not None and (inner := inner_name(at)) is not None:
        at = at._modules[inner]
        if inner == name:
            return plain, at
    below = at._modules[name] if at is not None and name in at._modules else None  # Scripted ones have no `get`.
    return (f"{plain}.{name}" if plain else name), below


def with_plain_names(module: torch.nn.Module, state: Any) -> tuple[Any, Mapping[str, str]]:
    """Return a state dict of a module under plain names, and by these the others: none where no wrapper is in it.

    With two tensors of one plain name, all stay as they are.
    """
    metadata = metadata_in(state) or {}
    if not has_wrappers(state) and not has_wrappers(metadata):
        return state, {}
    names = PlainNames(module)
    plain: Any = OrderedDict()
    wrapped: dict[str, str] = {}
    for key, value in state.items():
        name = names.of_tensor(key) if type(key) is str else key
        if name in plain:
            return state, {}
        plain[name], wrapped[name] = value, key
    if metadata:
        # The wrapper is before what it wraps, which counts.
        plain._metadata = OrderedDict((names.of_module(key), local) for key, local in metadata.items())
    return plain, wrapped


def with_wrapped_names(module: torch.nn.Module, state: Any, wrapped: Mapping[str, str]) -> Any:
    """Return a state dict as the module itself names it, the inverse of with_plain_names."""
    if not wrapped:
        return state
    found: Any = OrderedDict((wrapped.get(name, name), value) for name, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        names = PlainNames(module)
        found._metadata = metadata.copy()
        for name, _ in module.named_modules(remove_duplicate=False):
            if (plain := names.of_module(name)) in metadata:
                found._metadata[name] = metadata[plain]
    return found


def has_wrappers(names: Iterable[Any]) -> bool:
    """Return whether one of these names may have a wrapper in it."""
    text = ".".join([name for name in names if type(name) is str])  # A search in each takes ten times as long.
    return any(part in text for part in _ANY) and _ANY_PART.search(text) is not None
