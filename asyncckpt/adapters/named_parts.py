"""What people train with, by name, as what a Saver takes: its tables, and everything else.

    given                                     tables                            everything else
    a table                                   itself, by the name given
    a module with tables of this package      by their own names                the module: its state dict has no tables
    a module with tables of other libraries   tables_of, below the name given   dense_state_of
    a sparse optimizer                        by their own names                itself
    a dict of plain values                                                      an object that a load fills in place

Each table is taken once. An nn.Embedding stays in the state dict of its module, unless that has tables of other
libraries. A number or a text by itself is refused: it would be saved for ever as it is now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asyncckpt.adapters.dense_state import dense_state_of
from asyncckpt.adapters.embeddings import collection_tables, embedding_tables, hash_embedding_tables
from asyncckpt.adapters.left_out import tables_held
from asyncckpt.adapters.walk import tables_of, walk
from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table

_OWN_FACTORIES = (collection_tables, embedding_tables, hash_embedding_tables)
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))


class Values:
    """A dict of plain values as an object with a state dict, so that a load changes the dict itself."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[Any, Any]:
        return self._values

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        self._values.clear()
        self._values.update(state)


def named_parts(state: Mapping[str, Any]) -> tuple[dict[str, Table], dict[str, Any]]:
    """Return (tables, everything else), both by name; see above. UsageError for what would not be saved as it is."""
    tables: dict[str, Table] = {name: value for name, value in state.items() if isinstance(value, Table)}
    rest = {name: value for name, value in state.items() if name not in tables}
    for name, value in rest.items():
        if isinstance(value, _PLAIN):
            raise UsageError(
                f"{name!r} is a plain value, which would be saved as it is now at every step",
                found=value,
                hint=f"give a dict that changes, {name}={{...}}, or pass metadata to step(); arguments of the Saver go "
                "into options={...}",
            )
        if isinstance(value, torch.nn.Module) and _has_tables_of_others(value):
            _add(tables, tables_of(value, prefix=name))
            rest[name] = dense_state_of(value)
        elif type(value) is dict and _is_plain(value):
            rest[name] = Values(value)
    for path, table in tables_held(rest, tables.values()):
        if table.name in tables:
            raise UsageError(
                f"two tables have the name {table.name!r}, one of them in {path!r}",
                hint="give one of them by a name of its own: Checkpointer(..., name=table)",
            )
        tables[table.name] = table
    return tables, rest


def _add(tables: dict[str, Table], more: Mapping[str, Table]) -> None:
    known = {id(table) for table in tables.values()}
    for name, table in more.items():
        if id(table) not in known:
            if name in tables:
                raise UsageError(f"two tables have the name {name!r}", hint="rename one of them")
            tables[name] = table


def _has_tables_of_others(module: torch.nn.Module) -> bool:
    return any(claim.adapter.factory not in _OWN_FACTORIES for claim in walk(module).claims)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
