"""The `hashtables` argument of a Saver or a Loader, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table


def named_tables(hashtables: Any) -> Mapping[str, Table]:
    """The argument as a mapping name -> Table, each table once; UsageError else."""
    if hashtables is None:
        return {}
    if not isinstance(hashtables, Mapping):
        raise UsageError("hashtables is not a mapping", found=type(hashtables).__name__)
    names: dict[int, str] = {}
    for name, table in hashtables.items():
        if not isinstance(name, str) or "@" in name:
            raise UsageError("a table's name is no string without '@'", found=name)
        if not isinstance(table, Table):
            raise UsageError(
                f"hashtable {name!r} is no table",
                found=type(table).__name__,
                expected="asyncckpt.HashTable or an object with the Table protocol",
            )
        if id(table) in names:
            raise UsageError(f"hashtables {names[id(table)]!r} and {name!r} are the same table")
        names[id(table)] = name
    return hashtables
