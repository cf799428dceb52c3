"""The `hashtables` argument of a Saver or a Loader, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncckpt.errors import UsageError, must_be
from asyncckpt.model.table import HasCompanions, Table


def named_tables(hashtables: Any) -> Mapping[str, Table]:
    """Return the argument as a mapping name -> Table, with companions, each once; UsageError else.

    It may hold companions already under their own names, as what this returns does.
    """
    if hashtables is None:
        return {}
    if not isinstance(hashtables, Mapping):
        raise must_be("hashtables", "a mapping of name to table", type(hashtables))
    names: dict[int, str] = {}
    tables: dict[str, Table] = {}
    for name, table in _with_companions(hashtables):
        if not isinstance(name, str) or "@" in name:
            raise must_be("a table's name", "a str without '@'", name)
        if not isinstance(table, Table):
            rule = "an asyncckpt.HashTable or an object with the Table protocol"
            raise must_be(f"hashtable {name!r}", rule, type(table))
        if names.get(id(table)) == name:  # A companion that is named beside its table.
            continue
        if id(table) in names:
            raise UsageError(f"hashtables {names[id(table)]!r} and {name!r} are the same table")
        if name in tables:
            raise UsageError(f"two hashtables have the name {name!r}, one of them as companion of another table")
        names[id(table)] = name
        tables[name] = table
    return tables


def _with_companions(hashtables: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for name, table in hashtables.items():
        yield name, table
        if isinstance(table, HasCompanions):
            for suffix, companion in table.companions().items():
                yield f"{name}.{suffix}", companion
