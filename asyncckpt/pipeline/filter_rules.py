"""Which filter of a Saver is for which table and which block, and whether it can be.

A name stands for itself, or is a pattern with `*`, `?` and `[...]`. What is named must exist and must fit; a pattern
takes what fits and passes over the rest, ids among it.

Encodings of one block come in this order, at most one of each line, and of several that match the first one counts:

    cast, quantize     change numbers
    skip_zero_rows
    compress           comes last
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from asyncckpt.errors import UsageError, must_be, nearest
from asyncckpt.format.encodings import misfit
from asyncckpt.model.block import EncodingStep
from asyncckpt.model.table import Role, TableSchema

# All columns of some rows of a table, by name, each [n, *row_shape]: which of the rows to keep, bool [n].
Predicate = Callable[[Mapping[str, torch.Tensor]], Any]

_RANKS = {"cast": 0, "quantize": 0, "skip_zero_rows": 1, "zstd": 2}


@dataclass(frozen=True)
class KeepRows:
    """Only rows that the predicate wants, of the tables that `pattern` names."""

    pattern: str
    predicate: Predicate

    @property
    def predicate_name(self) -> str:
        return str(getattr(self.predicate, "__qualname__", type(self.predicate).__qualname__))

    def __str__(self) -> str:
        return f"keep_rows({self.pattern!r}, {self.predicate_name})"


@dataclass(frozen=True)
class EncodeBlocks:
    """A step of the encoding of the blocks that `pattern` names, given as it is recorded."""

    pattern: str
    step: EncodingStep

    def __str__(self) -> str:
        members = ", ".join(f"{key}={value}" for key, value in self.step.items() if key != "kind")
        return f"{self.step['kind']}({self.pattern!r}{', ' if members else ''}{members})"


RowFilter = KeepRows | EncodeBlocks


def check_filters(filters: Iterable[RowFilter], tables: Mapping[str, TableSchema]) -> tuple[RowFilter, ...]:
    """Return the filters of a Saver over these tables, companions among them; UsageError for one that fits no save.

    Any other name may be a dense tensor; these are known, and checked, when a save is made.
    """
    if isinstance(filters, str) or not isinstance(filters, Iterable):
        raise must_be("filters", "a list of asyncckpt.filters", type(filters))
    checked = tuple(filters)
    for item in checked:
        if not isinstance(item, KeepRows | EncodeBlocks):
            raise must_be("each of the filters", "one of asyncckpt.filters", item)
        _check_name(item, tables)
    for table, schema in tables.items():
        for column in schema.columns:
            shape = (1, *column.row_shape)
            steps_for(checked, f"{table}@{column.name}", column.role, column.dtype, shape, error=UsageError)
    return checked


def check_named(filters: Sequence[RowFilter], *, tables: Iterable[str], blocks: Iterable[str]) -> None:
    """Raise UsageError when a filter names a table or block that is not among those of a save."""
    known = {KeepRows: set(tables), EncodeBlocks: set(blocks)}
    for item in filters:
        if not is_pattern(item.pattern) and item.pattern not in known[type(item)]:
            what = "table" if isinstance(item, KeepRows) else "tensor"
            hint = nearest(item.pattern, known[type(item)]) or "a pattern such as 'name*' may match nothing"
            raise UsageError(f"filter {item} names a {what} that is not saved", hint=hint)


def row_rules(filters: Sequence[RowFilter], table: str) -> list[KeepRows]:
    """Return the filters that choose the rows of a table."""
    return [item for item in filters if isinstance(item, KeepRows) and matches(item.pattern, table)]


def steps_for(
    filters: Sequence[RowFilter],
    name: str,
    role: Role,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    error: type[UsageError],
) -> tuple[EncodingStep, ...]:
    """Return how to store a block. Raises `error` for a step that is named for it but cannot be done to it."""
    steps: list[EncodingStep] = []
    ranks: list[int] = []
    for item in filters:
        if not isinstance(item, EncodeBlocks) or not matches(item.pattern, name):
            continue
        rank = _RANKS[item.step["kind"]]
        if role in (Role.ID, Role.REMOVED, Role.PAD):
            reason: str | None = "ids are always stored as they are"
        elif rank in ranks:
            reason = "an earlier filter of the same kind is for it already"
        elif ranks and rank < ranks[-1]:
            raise error(
                f"filter {item} comes too late for {name!r}",
                found=[step["kind"] for step in steps],
                hint="cast or quantize first, then skip_zero_rows, compress last",
            )
        else:
            reason = misfit(dtype, shape, [*steps, item.step])
        if reason is None:
            steps.append(item.step)
            ranks.append(rank)
        elif not is_pattern(item.pattern):
            raise error(f"{item} cannot be applied to {name!r}: {reason}")
    return tuple(steps)


def matches(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(name, pattern)


def is_pattern(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def _check_name(item: RowFilter, tables: Mapping[str, TableSchema]) -> None:
    """Raise UsageError for the name of a table, or of a column of a table, that is not there."""
    if is_pattern(item.pattern):
        return
    if isinstance(item, KeepRows):
        if item.pattern not in tables:
            hint = nearest(item.pattern, tables)
            raise UsageError(f"there is no table {item.pattern!r} for {item}", expected=sorted(tables), hint=hint)
        return
    table, at, column = item.pattern.rpartition("@")
    if at and table in tables and tables[table].column(column) is None:
        columns = [column.name for column in tables[table].columns]
        hint = nearest(column, columns)
        raise UsageError(f"table {table!r} has no column {column!r} for {item}", expected=columns, hint=hint)
