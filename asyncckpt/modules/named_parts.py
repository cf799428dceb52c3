"""What people train with, by name, as what a Saver takes: its tables, and everything else.

    given                                     tables                            everything else
    a table                                   itself, by the name given
    a module with tables of this package      by their own names                the module: its state dict has no tables
    a module with tables of other libraries   tables_of, below the name given   dense_state_of
    a sparse optimizer                        by their own names                itself
    a dict or list of plain values                                              an object that a load fills in place
    a dict or list of these and of tensors                                      itself; `restore` puts values into it

Each table is taken once. An nn.Embedding stays in the state dict of its module, unless that has tables of other
libraries. A number or a text by itself is refused: it would be saved for ever as it is now.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table
from asyncckpt.modules.dense_state import dense_state_of
from asyncckpt.modules.embeddings import collection_tables, embedding_tables, hash_embedding_tables
from asyncckpt.modules.walk import tables_of, walk
from asyncckpt.tables.left_out import tables_held

_OWN_FACTORIES = (collection_tables, embedding_tables, hash_embedding_tables)
BARE = (bool, int, float, complex, str, bytes, np.generic, type(None))
_MORE_PLAIN = (set, frozenset, slice, range, torch.dtype, torch.Size, torch.device)


class Values:
    """A dict or list of plain values as an object with a state dict, so that a load changes the container itself.

    known: see `filled`; shared by all containers of one load.
    """

    def __init__(self, values: Any) -> None:
        self._values = values
        self.known: dict[int, Any] = {}

    def state_dict(self) -> Any:
        return self._values

    def load_state_dict(self, state: Any) -> None:
        if filled(self._values, state, self.known) is not self._values:
            raise TypeError(f"a {type(self._values).__name__} cannot take this {type(state).__name__}")


def filled(own: Any, value: Any, known: dict[int, Any]) -> Any:
    """Return a plain value, in the containers that are there where they are of its kind: the program may hold them
    elsewhere too, and some are subclasses.

    known: containers that have got their value, by their ids. A second value, of another place, does not change them.
    """
    if isinstance(own, tuple) and isinstance(value, tuple) and len(own) == len(value):
        children = [filled(*pair, known) for pair in zip(own, value, strict=True)]
        return own._make(children) if hasattr(own, "_make") else tuple(children)
    is_list = isinstance(own, list) and isinstance(value, list)
    if not is_list and not (isinstance(own, MutableMapping) and isinstance(value, Mapping)):
        return value
    if id(own) in known:
        return own if is_plain(value) and own == value else value
    known[id(own)] = own
    if is_list:
        own[:] = [filled(own[at], each, known) if at < len(own) else each for at, each in enumerate(value)]
    else:
        there = own.keys()
        new = {key: filled(own[key], each, known) if key in there else each for key, each in value.items()}
        for key in list(there):
            del own[key]
        own.update(new)
    return own


def named_parts(state: Mapping[str, Any]) -> tuple[dict[str, Table], dict[str, Any]]:
    """Return (tables, everything else), both by name; see above. UsageError for what would not be saved as it is."""
    tables: dict[str, Table] = {
        # A mapping may have an attribute of any name, or raise for it: so its class is asked first.
        name: value
        for name, value in state.items()
        if (not isinstance(value, Mapping) or hasattr(type(value), "begin_cut")) and isinstance(value, Table)
    }
    rest = {name: value for name, value in state.items() if name not in tables}
    for name, value in rest.items():
        if isinstance(value, BARE):
            raise UsageError(
                f"{name}={value!r} is a bare value: every checkpoint would hold what it is now",
                hint=f"put it into a dict and update that, or pass step(..., metadata={{{name!r}: {value!r}}})",
            )
        if isinstance(value, torch.nn.Module) and _has_tables_of_others(value):
            _add(tables, tables_of(value, prefix=name))
            rest[name] = dense_state_of(value)
        elif isinstance(value, (MutableMapping, list)) and is_plain(value):
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


def is_plain(value: Any) -> bool:
    """Return whether a value holds neither tensors nor objects."""
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    if isinstance(value, _MORE_PLAIN):
        return True
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return isinstance(value, BARE)
