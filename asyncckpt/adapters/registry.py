"""Which adapter makes tables of which kind of module.

A kind is a type, or the qualified name of one, so that an adapter for a library needs no import of it. A module's kinds
are looked for along its method resolution order: the adapter of the nearest class is taken, and of two for one class
the one that was registered later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table

AdapterFactory: TypeAlias = Callable[[Any, str], Mapping[str, Table]]
RestFunction: TypeAlias = Callable[[Any], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Adapter:
    """What was registered for a kind; of two adapters the one with the higher `order` is the newer."""

    kind: str
    factory: AdapterFactory
    rest: RestFunction | None
    order: int

    def tables(self, module: torch.nn.Module, name: str) -> Mapping[str, Table]:
        """The tables of a module by name. UsageError when the factory returns something else."""
        tables = self.factory(module, name)
        if not isinstance(tables, Mapping):
            what = f"the adapter for {self.kind} returned no mapping for module {name!r}"
            raise UsageError(what, found=type(tables).__name__, expected="a mapping of name to Table")
        for table_name, table in tables.items():
            if not isinstance(table_name, str) or not isinstance(table, Table):
                what = f"the adapter for {self.kind} returned something else than tables for module {name!r}"
                raise UsageError(what, found=(table_name, type(table).__name__), expected="a str and a Table")
        return tables

    def rest_of(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """What the tables of a module do not hold of it, by name."""
        return {} if self.rest is None else self.rest(module)


_adapters: dict[type | str, Adapter] = {}
_orders = itertools.count()


def register_adapter(kind: type | str, factory: AdapterFactory, *, rest: RestFunction | None = None) -> None:
    """Let `tables_of` make tables of the modules of a kind.

    kind     a type, or its qualified name ("fbgemm_gpu....SplitTableBatchedEmbeddingBagsCodegen"): the module's class
             or a base of it
    factory  (module, name) -> mapping of name to Table. `name` is the module's path ("" for the root), by which the
             names of its tables begin; called at every tables_of, so it should cost little
    rest     module -> mapping of name to the live tensors that the tables do not hold but a checkpoint needs;
             `dense_state_of` saves them and fills them in place. Without it the tables hold all of the module

    Later registrations win. Raises UsageError.
    """
    if isinstance(kind, str):
        parts = kind.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            raise UsageError("kind of an adapter is wrong", found=kind, expected="'package.module.Class'")
    elif not isinstance(kind, type):
        raise UsageError("kind of an adapter is wrong", found=kind, expected="a type or its qualified name")
    if not callable(factory):
        raise UsageError(f"factory of the adapter for {_shown(kind)} is not callable", found=type(factory).__name__)
    if rest is not None and not callable(rest):
        raise UsageError(f"rest of the adapter for {_shown(kind)} is not callable", found=type(rest).__name__)
    _adapters[kind] = Adapter(kind=_shown(kind), factory=factory, rest=rest, order=next(_orders))


def adapter_of(module: torch.nn.Module) -> Adapter | None:
    """The adapter that a module is handed to, if any."""
    for cls in type(module).__mro__:
        found = [_adapters[kind] for kind in (cls, qualified_name(cls)) if kind in _adapters]
        if found:
            return max(found, key=lambda adapter: adapter.order)
    return None


def qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def is_kind(module: object, names: frozenset[str]) -> bool:
    """Whether a class of the module, or a base of it, has one of the qualified names."""
    return any(qualified_name(cls) in names for cls in type(module).__mro__)


def _shown(kind: type | str) -> str:
    return kind if isinstance(kind, str) else qualified_name(kind)
