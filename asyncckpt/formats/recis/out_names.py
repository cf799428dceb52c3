"""What RecIS calls the columns of our tables, and the arrays that are written under these names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from asyncckpt.errors import UsageError, must_be
from asyncckpt.formats.recis.names import OPTIMIZERS, STEP_FILTER_SLOT
from asyncckpt.formats.recis.stored import Columns
from asyncckpt.formats.recis.write_directory import check_block
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.table import ID_COLUMN, Role
from asyncckpt.tables.embedding import LAST_SEEN_COLUMN


def check_names(columns: Columns | None, optimizer: str | None) -> Mapping[str, str]:
    """Return column -> slot of a mapping of slot to column, as a load has it. UsageError."""
    if columns is not None and (
        not isinstance(columns, Mapping) or not all(isinstance(text, str) for item in columns.items() for text in item)
    ):
        raise must_be("columns", "a mapping of slot to column", columns)
    slots = {column: slot for slot, column in (columns or {}).items()}
    if len(slots) != len(columns or {}):
        raise UsageError("columns has two slots for one column", found=columns)
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise must_be("optimizer", OPTIMIZERS, optimizer)
    return slots


def slots_of(
    table: str, columns: Iterable[tuple[str, Role]], slots: Mapping[str, str], optimizer: str | None
) -> dict[str, str]:
    """Return the slot of every column of a table. UsageError where it is not known."""
    found: dict[str, str] = {}
    unknown: list[str] = []
    for column, role in columns:
        is_of_recis = any(column.startswith(f"{name}_") for name in OPTIMIZERS)
        if column in slots and column != ID_COLUMN:
            found[column] = slots[column]
        elif column == LAST_SEEN_COLUMN:
            found[column] = STEP_FILTER_SLOT
        elif role is Role.OPTIMIZER and not is_of_recis:
            found[column] = f"{optimizer}_{column}"
            unknown += [column] if optimizer is None else []
        else:
            found[column] = column
    if unknown:
        raise UsageError(
            f"what RecIS calls the optimizer slots of table {table!r} is not known",
            found=unknown,
            hint=f"optimizer=... is one of {', '.join(OPTIMIZERS)}; or columns={{slot of RecIS: column}} says it",
        )
    if len(set(found.values())) != len(found):
        raise UsageError(f"two columns of table {table!r} would be the same slot", found=found)
    return found


def out_spec(spec: BlockSpec, name: str, slot: str | None) -> BlockSpec:
    """Return an array as RecIS has it: [rows, 1] for its step filter. UnsupportedError for what it cannot have."""
    check_block(name, slot, spec.dtype)
    if slot == STEP_FILTER_SLOT and len(spec.shape) == 1:
        return replace(spec, shape=(*spec.shape, 1), stored_shape=(*spec.shape, 1))
    return spec
