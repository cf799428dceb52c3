"""A table whose memory only its library may access: its rows can only be exported, and replaced as a whole.

For libraries that keep their rows behind an API. A cut is a copy, made in one pause; a load collects all rows in host
memory and writes them to the table at its end.

    from   to     done by            the table
    free   cut    begin_cut          was copied into host memory; it may change at once
    cut    free   fence, or end      the copy is dropped
    free   load   begin_load         is as before; its future rows are in host memory
    load   free   end(True)          holds these rows; none if writing them fails
    load   free   end(False)         is as before the load

So a cut and a load both need the table's size in host memory. Nothing here waits for training: make cuts on the
training thread (and stream).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import ID_COLUMN, TableSchema
from asyncckpt.native import I64, core
from asyncckpt.tables.ids import flat_ids
from asyncckpt.tables.table_lock import FirstCaller

Rows: TypeAlias = Mapping[str, torch.Tensor]
"""Column name -> contiguous CPU tensor `[n, *row_shape]`; ids are distinct, all columns are in one row order."""


class ExportOnlyTable:
    """Base of such tables. Implements `asyncckpt.model.table.Table`; a subclass overrides `_export` and the rest.

    device: where the library has the table; it is the current device while the library is called.
    """

    def __init__(
        self, name: str, schema: TableSchema, *, shard: tuple[int, int] = (0, 1), device: torch.device | None = None
    ) -> None:
        self._name = name
        self._schema = schema
        self._shard = shard
        self._library_device = device

    @property
    def name(self) -> str:
        return self._name

    @property
    def shard(self) -> tuple[int, int]:
        return self._shard

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, shard={self._shard})"

    def schema(self) -> TableSchema:
        """Return the columns in their order: id, weights, optimizer states, scores."""
        return self._schema

    def begin_cut(self) -> ExportOnlyCut:
        """Copy the table; call it on the training thread and stream. Raises what `_export` raises."""
        with torch.no_grad(), self.on_device():
            return ExportOnlyCut(self._name, self._export())

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str] = ()) -> ExportOnlyLoad:
        """Begin to collect about rows_count rows, in addition to the present ones unless clear.

        Columns outside of `filled` get the table's initial values. The table does not change before `end`.
        """
        with torch.no_grad(), self.on_device():
            present = None if clear else self._export()
            return ExportOnlyLoad(self, present, rows_count=rows_count, filled=filled)

    def on_device(self) -> AbstractContextManager[object]:
        """Make the table's device the current one: libraries launch there, wherever their arguments are."""
        device = self._library_device
        return torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()

    # -- to override --

    def _export(self) -> Rows:
        """Copy every row, in one pause."""
        raise NotImplementedError

    def _replace(self, rows: Rows) -> None:
        """Make the table hold these rows and no others; none if that fails."""
        raise NotImplementedError

    def _first_value(self, column: str) -> float:
        """Return the initial value of every element of a column that a load does not fill."""
        return 0.0

    def _check_ids(self, ids: I64) -> None:
        """Raise UnsupportedError for ids (int64 [n]) that the table cannot hold."""


class ExportOnlyCut:
    """A TableCut of a copy, which exists until the fence."""

    def __init__(self, table: str, rows: Rows) -> None:
        self._table = table
        self._rows = rows
        self.rows_count = len(rows[ID_COLUMN])
        self.runs = one_run(self.rows_count)
        self._is_fenced = False

    def column(self, name: str) -> torch.Tensor:
        """Return the copy of a column, `[n, *row_shape]` on the CPU. Raises UsageError."""
        rows = self._rows
        if self._is_fenced:
            raise UsageError(f"column {name!r} of a cut of table {self._table!r} was asked for after its fence")
        if name not in rows:
            raise UsageError(f"table {self._table!r} has no such column", found=name, expected=[*rows])
        return rows[name]

    def fence(self) -> None:
        """Drop the copy. Idempotent."""
        self._is_fenced = True
        self._rows = {}

    def end(self, ok: bool) -> None:
        """Note that the save has committed or failed."""
        self.fence()


class ExportOnlyLoad:
    """A TableLoad that collects rows in host memory. Any thread may call `end`."""

    def __init__(
        self, table: ExportOnlyTable, present: Rows | None, *, rows_count: int, filled: Collection[str]
    ) -> None:
        present_count = 0 if present is None else len(present[ID_COLUMN])
        self._table = table
        self._ids = core.id_map(max(1, present_count + rows_count))
        self._filled = frozenset(filled)
        self._ended = FirstCaller()
        self._rows_count = 0
        self._columns = {
            column.name: torch.empty((0, *column.row_shape), dtype=column.dtype)
            for column in table.schema().columns
            if column.name != ID_COLUMN
        }
        self._reserve(present_count + rows_count)
        if present is not None:
            rows = self.insert(present[ID_COLUMN])
            for name, tensor in self._columns.items():
                tensor[rows] = present[name]

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        """Give every id (int64 [n]) a row and return the rows (int64 [n], CPU). Raises UnsupportedError, UsageError."""
        self._check_open("insert")
        flat = flat_ids(ids, table=self._table.name)
        self._table._check_ids(flat)
        rows, new_rows = self._ids.insert(flat)
        self._reserve(self._ids.rows_end)
        # Rows are never freed here, so new ones follow the old ones.
        for name, tensor in self._columns.items():
            if name not in self._filled:
                tensor[self._rows_count : self._ids.rows_end] = self._table._first_value(name)
        self._rows_count += len(new_rows)
        return torch.from_numpy(rows)

    def column(self, name: str) -> torch.Tensor:
        """Return the collected rows of a column; fetch it again after an insert. Raises UsageError."""
        self._check_open(f"column {name!r}")
        if name == ID_COLUMN:
            return torch.from_numpy(self._ids.ids_by_row())
        if name not in self._columns:
            what = f"table {self._table.name!r} has no such column"
            raise UsageError(what, found=name, expected=[ID_COLUMN, *self._columns])
        return self._columns[name]

    def end(self, ok: bool) -> None:
        """Write the rows to the table if ok, else drop them; raises what writing raises. Idempotent."""
        if not self._ended.first():
            return
        columns, self._columns = self._columns, {}
        if not ok:
            return
        rows = {ID_COLUMN: torch.from_numpy(self._ids.ids_by_row()[: self._rows_count].copy())}
        rows |= {name: tensor[: self._rows_count] for name, tensor in columns.items()}
        with torch.no_grad(), self._table.on_device():
            self._table._replace(rows)

    def _reserve(self, rows_count: int) -> None:
        for name, old in self._columns.items():
            if rows_count > len(old):
                new = torch.empty((max(rows_count, len(old) * 3 // 2), *old.shape[1:]), dtype=old.dtype)
                new[: self._rows_count] = old[: self._rows_count]
                self._columns[name] = new

    def _check_open(self, use: str) -> None:
        if self._ended.done:
            raise UsageError(f"{use} of a load of table {self._table.name!r} was asked for after its end")


def one_run(rows_count: int) -> I64:
    """Return the run of all rows, int64 [1, 2]; none if there are no rows."""
    return np.array([[0, rows_count]] if rows_count else [], dtype=np.int64).reshape(-1, 2)


def split_columns(values: torch.Tensor, schema: TableSchema, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Split value rows, `[n, width]`, into the named columns of a schema, in their order; copies on the CPU."""
    found = {}
    at = 0
    for column in schema.columns:
        if column.name in names:
            width = math.prod(column.row_shape)
            part = values[:, at : at + width].to("cpu", copy=True, memory_format=torch.contiguous_format)
            found[column.name] = part.reshape(len(values), *column.row_shape)
            at += width
    assert at == values.shape[1]
    return found
