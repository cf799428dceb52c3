"""Which adapter makes tables of which kind of module.

A kind is a type or its qualified name, so that an adapter for a library need not import it. The lookup follows the
method resolution order of the module's class: the nearest class wins, and of two adapters for a class the later one.
Those of this package for other libraries are imported when a class of such a library is met.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from asyncckpt.errors import UsageError, must_be
from asyncckpt.model.table import Table

AdapterFactory: TypeAlias = Callable[[Any, str], Mapping[str, Table]]
RestFunction: TypeAlias = Callable[[Any], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Adapter:
    """What was registered for a kind; a higher `order` was registered later."""

    kind: str
    factory: AdapterFactory
    rest: RestFunction | None
    order: int

    def tables(self, module: torch.nn.Module, name: str) -> Mapping[str, Table]:
        """Return the tables of a module by name. Raises UsageError if the factory returns something else."""
        tables = self.factory(module, name)
        if not isinstance(tables, Mapping):
            what = f"the adapter for {self.kind} returned no mapping for module {name!r}"
            raise UsageError(what, found=type(tables), expected="a mapping of name to Table")
        for table_name, table in tables.items():
            if not isinstance(table_name, str) or not isinstance(table, Table):
                what = f"the adapter for {self.kind} returned something else than tables for module {name!r}"
                raise UsageError(what, found=(table_name, type(table).__name__), expected="a str and a Table")
        return tables

    def rest_of(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a module that its tables do not hold, by name."""
        return {} if self.rest is None else self.rest(module)


# Package of a library -> the module that registers its adapters.
LIBRARIES = {
    "dynamicemb": "asyncckpt.adapters.dynamicemb",
    "fbgemm_gpu": "asyncckpt.adapters.fbgemm",
    "merlin_kv": "asyncckpt.adapters.hkv",
    "torchrec": "asyncckpt.adapters.torchrec",
}
_adapters: dict[type | str, Adapter] = {}
_orders = itertools.count()


def register_adapter(kind: type | str, factory: AdapterFactory, *, rest: RestFunction | None = None) -> None:
    """Register how `tables_of` makes tables of the modules of a kind.

    kind     a type, or its qualified name ("fbgemm_gpu....SplitTableBatchedEmbeddingBagsCodegen"): the module's class
             or a base of it
    factory  (module, name) -> mapping of name to Table. `name` is the module's path ("" for the root), with which the
             names of its tables begin. Called at every tables_of, so it should be cheap
    rest     module -> mapping of name to the live tensors that a checkpoint needs besides the tables; `dense_state_of`
             saves them and fills them in place. None: the tables hold all of the module

    Later registrations win. Raises UsageError.
    """
    if isinstance(kind, str):
        parts = kind.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            raise must_be("kind of an adapter", "a type or its name 'package.module.Class'", kind)
    elif not isinstance(kind, type):
        raise must_be("kind of an adapter", "a type or its qualified name", kind)
    if not callable(factory):
        raise UsageError(f"factory of the adapter for {_shown(kind)} is not callable", found=type(factory))
    if rest is not None and not callable(rest):
        raise UsageError(f"rest of the adapter for {_shown(kind)} is not callable", found=type(rest))
    _import_own(_shown(kind))  # Registered earlier.
    _adapters[kind] = Adapter(kind=_shown(kind), factory=factory, rest=rest, order=next(_orders))


def adapter_of(module: torch.nn.Module) -> Adapter | None:
    """Return the adapter of a module, if any."""
    for cls in type(module).__mro__:
        _import_own(cls.__module__)
        found = [_adapters[kind] for kind in (cls, qualified_name(cls)) if kind in _adapters]
        if found:
            return max(found, key=lambda adapter: adapter.order)
    return None


def qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def is_kind(module: object, names: frozenset[str]) -> bool:
    """Return whether the module's class or a base of it has one of the qualified names."""
    return any(qualified_name(cls) in names for cls in type(module).__mro__)


def _import_own(name: str) -> None:
    own = LIBRARIES.get(str(name).partition(".")[0])  # Some classes have no module.
    if own is not None:
        importlib.import_module(own.rpartition(".")[0])  # First: otherwise two threads may wait for each other's half.
        importlib.import_module(own)


def _shown(kind: type | str) -> str:
    return kind if isinstance(kind, str) else qualified_name(kind)
