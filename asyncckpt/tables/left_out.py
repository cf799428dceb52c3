"""Tables that modules hold, and a checkpoint would leave out without a word: they are not parameters of their module.

What is looked at, each thing once, modules first, then what is nearest, and at most LOOKED_AT_MAX things besides
modules, numbers, texts, tensors, and lists and dicts of these:

    the state       the modules, their state dicts and the sparse optimizers in it, in mappings, lists and tuples of any
                    depth; the modules in a TrainerState
    a module        its children and its attributes
    an attribute    a table, a module or a sparse optimizer, or a dict, list, tuple, set or deque of them, of any depth;
                    of any other object its own attributes, but not the attributes of what it holds in turn

So the time is linear in what there is. What a thing is, its class says, and it is read by the built-in methods: no code
of an attribute runs, which may be a mock, a proxy of something gone, or not ready yet. What such an object hides (in a
closure, in slots, behind a proxy) is not seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from inspect import getattr_static
from itertools import islice
from types import ModuleType, NoneType
from typing import Any, TypeAlias

import numpy as np
import torch

from asyncckpt.errors import UsageError, Words
from asyncckpt.model.table import Table
from asyncckpt.tables.noted_tables import noted_tables
from asyncckpt.tables.sparse_optimizer import SparseOptimizer

SHOWN_MAX = 8
LOOKED_AT_MAX = 100_000

_TABLE_METHODS = ("schema", "begin_cut", "begin_load")
_SEQUENCES = (list, tuple, set, frozenset, deque)
# By the id of their class, which asks nothing of a class.
_PLAIN = frozenset(
    map(id, (NoneType, bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray))
)
_ATTRIBUTES_OF_TORCH = frozenset(vars(torch.nn.Module()))
_PACKAGES_KNOWN = ("asyncckpt", "torch")  # Their other objects hold no tables of a user.

# The names on the way to something, the last one first: (name, (name, ... None)).
_Way: TypeAlias = tuple[object, Any] | None


class _Kind(Enum):
    MODULE = auto()
    OPTIMIZER = auto()
    TABLE = auto()
    DICT = auto()
    SEQUENCE = auto()
    OBJECT = auto()
    OTHER = auto()


class _Holder(Enum):
    """What holds a thing, be it in containers."""

    STATE = auto()
    MODULE = auto()
    OBJECT = auto()


def check_all_taken(state: object, taken: Iterable[Table], *, hint: str) -> None:
    """Raise UsageError, naming them, if modules or sparse optimizers hold tables that are not taken, or state dicts
    belong to such.

    state: a module, or mappings and sequences of what may be modules, or state dicts of these.
    """
    found = _named(tables_held(state, taken, with_noted=True))
    if found:
        raise UsageError("tables of a module would not be saved", found=Words(shown(found)), hint=hint)


def tables_left_out(state: object, taken: Iterable[Table]) -> tuple[str, ...]:
    """Return where modules and sparse optimizers of a state hold tables that are not taken, and their names."""
    return _named(tables_held(state, taken))


def _named(held: Iterable[tuple[str, Table]]) -> tuple[str, ...]:
    return tuple(f"{path} (table {table.name!r})" for path, table in held)


def tables_held(state: object, taken: Iterable[Table], *, with_noted: bool = False) -> list[tuple[str, Table]]:
    """Return the tables that modules and sparse optimizers of a state hold and that are not taken, with their paths.

    with_noted: those to which state dicts belong, too.
    """
    known = {id(table) for table in taken}
    found: dict[int, tuple[str, Table]] = {}
    for way, table in _tables_in(state, known, with_noted=with_noted):
        found.setdefault(id(table), (_path(way), table))
    return list(found.values())


def shown(left_out: tuple[str, ...]) -> str:
    """Return the text of an error about tables that are left out."""
    more = [f"{len(left_out) - SHOWN_MAX} more"] if len(left_out) > SHOWN_MAX else []
    return ", ".join([*left_out[:SHOWN_MAX], *more])


def _tables_in(state: object, known: set[int], *, with_noted: bool) -> Iterator[tuple[_Way, Any]]:
    """Yield the tables that something in a state holds, not those in the state itself, nor those known by their id."""
    waiting: deque[tuple[_Way, Any, _Holder]] = deque([(None, state, _Holder.STATE)])
    # The objects stay alive, so that their ids stay theirs.
    seen: dict[tuple[int, _Holder], object] = {}
    kinds: dict[int, _Kind] = {}
    while waiting:
        way, value, holder = waiting.popleft()
        if (id(value), holder) in seen or id(value) in known:
            continue
        seen[id(value), holder] = value
        cls = type(value)
        kind = kinds.get(id(cls)) or kinds.setdefault(id(cls), _kind_of(cls))
        if kind is _Kind.TABLE:
            if holder is not _Holder.STATE:
                yield way, value
            continue
        if with_noted and kind is _Kind.DICT and holder is _Holder.STATE:
            noted = noted_tables(value).items()
            yield from (((at, way), table) for at, table in noted if table is not None and id(table) not in known)
        parts = (
            ((name, way), part, its_holder)
            for name, part, its_holder in _parts(value, kind, holder)
            if not _is_plain(part)
        )
        if kind is _Kind.MODULE:
            waiting.extendleft(((name, way), child, _Holder.MODULE) for name, child in value.named_children())
        waiting.extend(islice(parts, max(0, LOOKED_AT_MAX - len(seen) - len(waiting))))


def _kind_of(cls: type) -> _Kind:
    """Return the kind of the instances of a class. Asks the class itself alone, by what is written in it."""
    if issubclass(cls, torch.nn.Module):
        return _Kind.MODULE
    if issubclass(cls, SparseOptimizer):
        return _Kind.OPTIMIZER
    if all(getattr_static(cls, name, None) is not None for name in _TABLE_METHODS):
        return _Kind.TABLE
    if issubclass(cls, dict):
        return _Kind.DICT
    if issubclass(cls, _SEQUENCES):
        return _Kind.SEQUENCE
    package = getattr_static(cls, "__module__", None)
    is_known = type(package) is str and package.partition(".")[0] in _PACKAGES_KNOWN
    return _Kind.OTHER if is_known or issubclass(cls, (type, ModuleType, torch.Tensor)) else _Kind.OBJECT


def _parts(value: Any, kind: _Kind, holder: _Holder) -> Iterator[tuple[object, object, _Holder]]:
    """Yield what a thing holds, with its name; not the children of a module."""
    if kind is _Kind.MODULE:
        for name, part in _attributes(value):
            if name not in _ATTRIBUTES_OF_TORCH:
                yield name, part, _Holder.MODULE
    elif kind is _Kind.OPTIMIZER:
        for parameter in SparseOptimizer.parameters(value):
            yield "", parameter.table, _Holder.OBJECT
    elif kind is _Kind.DICT:
        for key, item in zip(list(dict.keys(value)), list(dict.values(value)), strict=False):
            yield key, item, holder
    elif kind is _Kind.SEQUENCE:
        base = next(base for base in _SEQUENCES if issubclass(type(value), base))
        for index, item in enumerate(list(base.__iter__(value))):
            yield index, item, holder
    elif holder is _Holder.STATE:
        if issubclass(type(value), Mapping):  # A save reads it by its own methods, too.
            for key, item in value.items():
                yield key, item, holder
        elif getattr_static(type(value), "_objects_in_it", None) is not None:
            for key, part in value._objects_in_it.items():
                if _kind_of(type(part)) is not _Kind.OPTIMIZER:
                    yield key, part, holder
    elif kind is _Kind.OBJECT and holder is _Holder.MODULE:
        for name, part in _attributes(value):
            yield name, part, _Holder.OBJECT


def _is_plain(value: Any) -> bool:
    """Return whether a thing is a plain value or a container of nothing else, as most things are."""
    cls = type(value)
    if cls is dict:
        return _PLAIN.issuperset(map(id, map(type, value.values())))
    if cls is list or cls is tuple:
        return _PLAIN.issuperset(map(id, map(type, value)))
    return id(cls) in _PLAIN


def _attributes(value: object) -> list[tuple[str, object]]:
    """Return what an object itself holds by name."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # It has none, or its class makes one up and fails.
        return []
    return list(dict.items(found)) if issubclass(type(found), dict) else []


def _path(way: _Way) -> str:
    names: list[str] = []
    while way is not None:
        name, way = way
        names.append(str(name) if type(name) in (str, int) else type(name).__name__)
    return ".".join(name for name in reversed(names) if name)
