"""Tables that modules hold, and a checkpoint would leave out without a word: they are no parameters of their module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table

SHOWN_MAX = 8


def check_all_taken(state: object, taken: Iterable[Table], *, hint: str) -> None:
    """Raise UsageError, naming them, if modules hold tables that are not taken.

    state: a module, or mappings and sequences of what may be modules. A module holds what its attributes are, also in
    a list or a mapping.
    """
    known = {id(table) for table in taken}
    left_out: dict[int, str] = {}
    for path, table in _tables_in(state):
        if id(table) not in known:
            left_out.setdefault(id(table), f"{path} (table {table.name!r})")
    if left_out:
        found = list(left_out.values())
        more = [f"{len(found) - SHOWN_MAX} more"] if len(found) > SHOWN_MAX else []
        what = "tables of a module would be left out of the checkpoint"
        raise UsageError(what, found=", ".join(found[:SHOWN_MAX] + more), hint=hint)


def _tables_in(state: object) -> Iterator[tuple[str, Table]]:
    """Yield (path, table) of the tables that the modules in a state hold, not of what is in the state itself."""
    waiting: list[tuple[str, object]] = [("", state)]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            waiting += [(_joined(path, name), child) for name, child in value.named_children()]
            yield from _held(path, value)
        elif isinstance(value, (Mapping, list, tuple)):
            waiting += [(_joined(path, str(name)), item) for name, item in _items(value)]


def _held(path: str, module: torch.nn.Module) -> Iterator[tuple[str, Table]]:
    for name, value in vars(module).items():
        # torch's own dictionaries of children, parameters and hooks begin with an underscore.
        values = _items(value) if isinstance(value, (Mapping, list, tuple)) and not name.startswith("_") else ()
        for key, item in [("", value), *values]:
            if isinstance(item, Table) and not isinstance(item, torch.nn.Module):
                yield _joined(path, name, str(key)), item


def _items(values: Mapping[object, object] | list[object] | tuple[object, ...]) -> Iterable[tuple[object, object]]:
    return values.items() if isinstance(values, Mapping) else enumerate(values)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
