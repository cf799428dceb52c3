"""The twin's update of rows: the formulas of row_rules.py on NumPy arrays over the same memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncckpt.native.contract import BFLOAT16, FLOAT16, FLOAT32, I64, FloatRows, RowUpdate
from asyncckpt.native.row_rules import new_values

F32 = NDArray[np.float32]
_STORED: dict[int, Any] = {FLOAT32: np.float32, FLOAT16: np.float16, BFLOAT16: np.uint16}


def update_rows(update: RowUpdate, rows: I64) -> None:
    """Do what Core.update_rows says; `rows` and the update are checked, except the range of rows."""
    if rows.size and (int(rows.min()) < -1 or int(rows.max()) >= update.rows_count):
        raise ValueError("a row to update is neither -1 nor one of the rows")
    places = np.flatnonzero(rows >= 0)
    if not places.size:
        return
    used = rows[places]
    columns = [_memory(column, update.rows_count) for column in (update.weight, *update.slots)]
    values = [_widened(column[used]) for column in columns]
    if update.rowwise:
        values[-1] = values[-1][:, 0]
    with np.errstate(all="ignore"):
        changed = new_values(
            np,
            update.rule,
            [np.float32(number) for number in update.numbers],
            gradient=_widened(_memory(update.gradient, len(rows))[places]),
            weight=values[0],
            slots=values[1:],
            rowwise=update.rowwise,
        )
        for column, value in zip(columns, changed, strict=True):
            column[used] = _narrowed(value.reshape(used.size, -1), column.dtype)
    if update.marks is not None:
        update.marks[used] = update.mark


def _memory(column: FloatRows, rows_count: int) -> NDArray[Any]:
    stored = np.dtype(_STORED[column.kind])
    bytes = (ctypes.c_uint8 * (rows_count * column.width * stored.itemsize)).from_address(column.address)
    return np.frombuffer(bytes, dtype=stored).reshape(rows_count, column.width)


def _widened(values: NDArray[Any]) -> F32:
    if values.dtype == np.uint16:
        widened: F32 = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return widened
    return values.astype(np.float32)


def _narrowed(values: F32, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round to nearest, ties to even."""
    if dtype != np.uint16:
        return values.astype(dtype)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    narrowed: NDArray[Any] = np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))
    return narrowed
