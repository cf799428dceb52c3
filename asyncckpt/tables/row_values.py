"""Rows of a table while its lock is held: copies of their columns, written back at once when the use ends.

    with table.rows(ids) as rows:              # or table.update(rows, function), by row numbers
        rows.embedding -= lr * gradient
        rows["last_seen"] = step

1. A column is copied when it is first asked for, or is given whole.
2. The caller changes the copies. Nothing else of the table can change by that, so the table knows what was written.
3. At the end all columns that were asked for or given are written back, in one call that counts the write. After an
   error nothing is. The rows are marked before 1, so those of a use that failed, or only read, count as written: the
   next save copies them once too often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import UsageError, must_be, nearest
from asyncckpt.model.table import TableSchema
from asyncckpt.native import I64, U8
from asyncckpt.tables.row_device import sent, spread
from asyncckpt.tables.row_store import Level
from asyncckpt.tables.slots import EMBEDDING_COLUMN

# Called with the columns that training sees, rows of them, int64 [n], -1 for an id without a row, and the marks to set
# for the others (uint8 by row, and the value); None if they are marked already. It must not use the table.
WriteMemory: TypeAlias = Callable[[Mapping[str, torch.Tensor], I64, tuple[U8, int] | None], None]
RecordRows: TypeAlias = Callable[["RowValues"], object]
UseRows: TypeAlias = Callable[[I64], None]


class RowValues:
    """The columns of some rows, by name: each `[*shape, *row_shape]` on the table's device, `shape` being that of the
    ids or row numbers.

    Rows whose id is absent read as zeros, and what is set there is dropped: `found` says which are there. Valid until
    the use ends, on the thread that began it. Raises UsageError for wrong names and values, and after the end.
    """

    def __init__(
        self,
        table: str,
        schema: TableSchema,
        level: Level,
        rows: I64,
        *,
        used: NDArray[np.bool_],
        shape: tuple[int, ...],
    ) -> None:
        self._table, self._schema, self._level, self._shape = table, schema, level, shape
        self._used = used
        self._positions = None if used.all() else sent(torch.from_numpy(np.flatnonzero(used)), level.place.device)
        self._rows = rows if self._positions is None else rows[used]
        self._values: dict[str, torch.Tensor] = {}
        self._is_ended = False

    @property
    def found(self) -> torch.Tensor:
        """Which rows there are: bool `[*shape]` on the table's device."""
        return sent(torch.from_numpy(self._used).view(self._shape), self._level.place.device)

    @property
    def embedding(self) -> torch.Tensor:
        return self[EMBEDDING_COLUMN]

    @embedding.setter
    def embedding(self, values: torch.Tensor) -> None:
        self[EMBEDDING_COLUMN] = values

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a copy of a column, which is written back as it is at the end."""
        if name not in self._values:
            row_shape, _ = self._column(name)
            values = self._level.read(self._rows, only=name)[name]
            if self._positions is not None:
                values = spread(values, np.flatnonzero(self._used), count=self._used.size)
            self._values[name] = values.view((*self._shape, *row_shape))
        return self._values[name]

    def __setitem__(self, name: str, values: torch.Tensor | float | np.generic) -> None:
        """Set a column: by a tensor of its shape and dtype, or by one number for all, also one of NumPy."""
        row_shape, dtype = self._column(name)
        shape = (*self._shape, *row_shape)
        what = f"values for column {name!r} of table {self._table!r}"
        number = values.item() if isinstance(values, np.generic) else values
        if isinstance(number, (int, float)):
            if not _holds(dtype, number):
                raise must_be(what, f"a number of {dtype}", values)
            number = float(number) if dtype.is_floating_point else int(number)
            values = torch.full(shape, number, dtype=dtype, device=self._level.place.device)
        if not isinstance(values, torch.Tensor):
            raise must_be(what, "a torch.Tensor or a number", type(values))
        if values.dtype is not dtype or tuple(values.shape) != shape:
            raise must_be(what, f"{dtype} of shape {shape}", (values.dtype, tuple(values.shape)))
        if any(_overlaps(values, column) for column in self._level.columns().values()):
            values = values.detach().clone()  # A view of the table would be written while it is read.
        self._values[name] = values

    def end(self) -> tuple[I64, dict[str, torch.Tensor]]:
        """End the use: return the rows that there are, int64 [n], and `[n, *row_shape]` of each column to write."""
        self._is_ended = True
        values = {}
        for name, value in self._values.items():
            flat = value.detach().reshape(self._used.size, *value.shape[len(self._shape) :])
            values[name] = flat if self._positions is None else flat.index_select(0, self._positions.to(flat.device))
        self._values = {}
        return self._rows, values

    def _column(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if self._is_ended:
            raise UsageError(f"{name!r} was used after the `with table.rows(...)` block of table {self._table!r}")
        column = self._schema.column(name)
        if column is None or name not in self._level.columns():
            known = list(self._level.columns())
            raise UsageError(f"table {self._table!r} has no column {name!r}", expected=known, hint=nearest(name, known))
        return column.row_shape, column.dtype


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Return whether a dtype has a number, or for floating point one near it."""
    if dtype.is_floating_point:
        return abs(number) <= torch.finfo(dtype).max or (isinstance(number, float) and not math.isfinite(number))
    least, greatest = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return least <= number <= greatest and number == int(number)


def _overlaps(values: torch.Tensor, column: torch.Tensor) -> bool:
    """Return whether values may lie in the memory of a column."""
    begin = column.data_ptr()
    return values.device == column.device and begin <= values.data_ptr() < begin + column.nbytes


def check_distinct(numbers: I64, *, what: str) -> None:
    """Raise UsageError if one of ids or rows, int64 [n], is mentioned twice: each is written once."""
    if (numbers[1:] > numbers[:-1]).all():
        return
    ordered = np.sort(numbers)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        hint = "use torch.unique, and sum what belongs to one id"
        raise UsageError(f"{what} are not distinct", found=int(twice[0]), hint=hint)
