"""What a table holds per row besides its id: the columns, their dtypes and row shapes, and the initial value of a row.

A column can be specified in four ways, from short to exact:

    torch.float32                     an optimizer slot as wide as the embedding; a metadata column of one scalar a row
    (4,) or ()                        a row shape, in the table's dtype
    (torch.float32, (4,))             both
    Slot(torch.float32, (4,), 0.1)    both, and the initial value of a row
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch

from asyncckpt.arguments import check_int
from asyncckpt.errors import UnsupportedError, UsageError, must_be
from asyncckpt.model.table import ID_COLUMN, Column, Role, TableSchema

EMBEDDING_COLUMN = "embedding"
ID = Column(name=ID_COLUMN, dtype=torch.int64, row_shape=(), role=Role.ID)
WEIGHT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SLOT_DTYPES = (*WEIGHT_DTYPES, *INTEGER_DTYPES, torch.bool)


@dataclass(frozen=True)
class Slot:
    """One column of a table: `[capacity, *row_shape]` of dtype; every element of a new row is `fill`."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]
    fill: float = 0.0


SlotSpec: TypeAlias = torch.dtype | tuple[int, ...] | tuple[torch.dtype, tuple[int, ...]] | Slot


@dataclass(frozen=True)
class Layout:
    """The columns of a table in their order, and the fill of each column except id and embedding."""

    schema: TableSchema
    fills: Mapping[str, float]

    def slots(self, role: Role) -> dict[str, Slot]:
        """Return the columns of optimizer slots or of metadata, as a new table takes them."""
        columns = [column for column in self.schema.columns if column.role is role]
        return {column.name: Slot(column.dtype, column.row_shape, self.fills[column.name]) for column in columns}


def table_layout(
    dim: int,
    *,
    dtype: torch.dtype,
    optimizer_slots: Mapping[str, SlotSpec] | None,
    metadata: Mapping[str, SlotSpec] | None,
) -> Layout:
    """Build the columns of a table: id, embedding, optimizer slots, metadata. Raises UsageError or UnsupportedError."""
    check_int("dim of a table", dim, at_least=1)
    _check_dtype("dtype of a table", dtype, allowed=WEIGHT_DTYPES)
    columns = [
        ID,
        Column(name=EMBEDDING_COLUMN, dtype=dtype, row_shape=(dim,), role=Role.WEIGHT),
    ]
    fills: dict[str, float] = {}
    for role, specs, plain_shape in ((Role.OPTIMIZER, optimizer_slots, (dim,)), (Role.METADATA, metadata, ())):
        for name, spec in _items(specs, role=role):
            _check_slot_name(name, role=role, taken=[column.name for column in columns])
            slot = _resolve_slot(name, spec, table_dtype=dtype, plain_shape=plain_shape)
            columns.append(Column(name=name, dtype=slot.dtype, row_shape=slot.row_shape, role=role))
            fills[name] = slot.fill
    return Layout(schema=TableSchema(columns=tuple(columns)), fills=fills)


def _items(specs: object, *, role: Role) -> list[tuple[str, object]]:
    if specs is None:
        return []
    if not isinstance(specs, Mapping):
        raise must_be(f"{role.value} columns of a table", "a mapping of name to spec", specs)
    return list(specs.items())


def _check_slot_name(name: object, *, role: Role, taken: list[str]) -> None:
    what = f"name of a column for {role.value}"
    if not isinstance(name, str) or not name:
        raise must_be(what, "a non-empty str", name)
    if "@" in name:
        raise UsageError(f"{what} holds '@'", found=name, hint="'@' parts table and column in block names")
    if name in (ID_COLUMN, EMBEDDING_COLUMN):
        raise UsageError(f"{what} is reserved", found=name)
    if name in taken:
        raise UsageError(f"{what} is taken by another column of the table", found=name)


def _resolve_slot(name: str, spec: object, *, table_dtype: torch.dtype, plain_shape: tuple[int, ...]) -> Slot:
    match spec:
        case Slot():
            slot = spec
        case torch.dtype():
            slot = Slot(dtype=spec, row_shape=plain_shape)
        case (torch.dtype() as dtype, row_shape) if isinstance(spec, tuple):
            slot = Slot(dtype=dtype, row_shape=cast(tuple[int, ...], row_shape))  # Checked below.
        case tuple():
            slot = Slot(dtype=table_dtype, row_shape=spec)
        case _:
            raise must_be(f"spec of column {name!r}", "a torch.dtype, a row shape, (dtype, row shape) or Slot", spec)
    _check_dtype(f"dtype of column {name!r}", slot.dtype, allowed=SLOT_DTYPES)
    if not isinstance(slot.row_shape, tuple) or not all(type(size) is int and size >= 1 for size in slot.row_shape):
        raise must_be(f"row shape of column {name!r}", "a tuple of ints of at least 1", slot.row_shape)
    _check_fill(f"fill of column {name!r}", slot)
    # A torch.Size is a tuple too; the schema has plain ones.
    return Slot(dtype=slot.dtype, row_shape=tuple(slot.row_shape), fill=slot.fill)


def _check_fill(what: str, slot: Slot) -> None:
    if not isinstance(slot.fill, (int, float)):
        raise must_be(what, "a number", slot.fill)
    if slot.dtype in WEIGHT_DTYPES:
        return
    if slot.dtype is torch.bool:
        low, high = 0, 1
    else:
        low, high = torch.iinfo(slot.dtype).min, torch.iinfo(slot.dtype).max
    if not math.isfinite(slot.fill) or slot.fill != int(slot.fill) or not low <= slot.fill <= high:
        raise UsageError(f"{what} does not fit {slot.dtype}", found=slot.fill)


def _check_dtype(what: str, dtype: object, *, allowed: tuple[torch.dtype, ...]) -> None:
    if not isinstance(dtype, torch.dtype):
        raise must_be(what, "a torch.dtype", dtype)
    if dtype not in allowed:
        raise UnsupportedError(f"{what} is not supported", found=dtype, expected=allowed)
