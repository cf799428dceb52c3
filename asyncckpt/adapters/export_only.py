"""A table whose memory only its library may access: its rows can only be exported, and replaced as a whole.

For libraries that keep their rows behind an API. A cut is a copy, made in one pause; a load collects all rows in host
memory and writes them to the table at its end.

    from   to     done by            the table
    free   cut    begin_cut          was copied into host memory; it may change at once
    cut    free   fence, or end      the copy is dropped
    free   load   begin_load         is as before; its future rows are in host memory
    load   free   end(True)          holds these rows; none if writing them fails
    load   free   end(False)         is as before the load

So a cut and a load both need the table's size in host memory. The table's lock, held in the states cut and load, keeps
them apart from each other but not from training: make cuts on the training thread (and stream).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeAlias

import torch

from asyncckpt.model.table import ID_COLUMN, TableSchema
from asyncckpt.modules.fixed_table import one_run
from asyncckpt.native import I64
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.slots import EMBEDDING_COLUMN, Layout
from asyncckpt.tables.table_arguments import check_shard, flat_ids
from asyncckpt.tables.table_lock import HashTableLoad, HeldTable, LockedTable, TableLock

Rows: TypeAlias = Mapping[str, torch.Tensor]
"""Column name -> contiguous CPU tensor `[n, *row_shape]`; ids are distinct, all columns are in one row order."""


class ExportOnlyTable(LockedTable):
    """Base of such tables. Implements `asyncckpt.model.table.Table`; a subclass overrides `_export` and the rest.

    device: where the library has the table; it is the current device while the library is called.
    """

    def __init__(
        self,
        name: str,
        schema: TableSchema,
        *,
        shard: tuple[int, int] = (0, 1),
        replicated: bool = False,
        device: torch.device | None = None,
    ) -> None:
        check_shard(name, shard, replicated=replicated)
        super().__init__(name, schema, shard=shard, replicated=replicated)
        self._library_device = device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, shard={self._shard})"

    def begin_cut(self) -> ExportOnlyCut:
        """Copy the table; call it on the training thread and stream. Raises what `_export` raises."""
        with self._lock.hold_for_result("cut"), torch.no_grad(), self.on_device():
            return ExportOnlyCut(self._name, self._lock, self._export())

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str] = ()) -> ExportOnlyLoad:
        """Begin to collect about rows_count rows, in addition to the present ones unless clear.

        Columns outside of `filled` get the table's initial values. The table does not change before `end`.
        """
        with self._lock.hold_for_result("load"), torch.no_grad(), self.on_device():
            present = self._no_rows() if clear else self._export()
            return ExportOnlyLoad(self, self._lock, present, rows_count=rows_count, filled=filled)

    def on_device(self) -> AbstractContextManager[object]:
        """Make the table's device the current one: libraries launch there, wherever their arguments are."""
        device = self._library_device
        return torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()

    def _no_rows(self) -> dict[str, torch.Tensor]:
        return {c.name: torch.empty((0, *c.row_shape), dtype=c.dtype, device="cpu") for c in self._schema.columns}

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


class ExportOnlyCut(HeldTable):
    """A TableCut of a copy, which exists until the fence."""

    def __init__(self, table: str, lock: TableLock, rows: Rows) -> None:
        columns = {name: column for name, column in rows.items() if name != ID_COLUMN}
        super().__init__(table, lock, columns=columns, ids=lambda: rows[ID_COLUMN])
        self.rows_count = len(rows[ID_COLUMN])
        self.runs = one_run(self.rows_count)

    def fence(self) -> None:
        """Drop the copy. Idempotent."""
        self._release()

    def end(self, ok: bool) -> None:
        """Note that the save has committed or failed."""
        self.fence()


class ExportOnlyLoad(HashTableLoad):
    """A TableLoad that collects rows in host memory. Any thread may call `end`."""

    def __init__(
        self, table: ExportOnlyTable, lock: TableLock, present: Rows, *, rows_count: int, filled: Collection[str]
    ) -> None:
        self._owner = table
        schema, first_value = table.schema(), table._first_value
        fills = {c.name: first_value(c.name) for c in schema.columns if c.name not in (ID_COLUMN, EMBEDDING_COLUMN)}
        store = RowStore(
            Layout(schema=schema, fills=fills),
            capacity=max(1, len(present[ID_COLUMN]) + rows_count),
            initializer=first_value(EMBEDDING_COLUMN),
        )
        columns = {name: present[name] for name in store.columns()}
        store.write(store.insert(present[ID_COLUMN].numpy(), filled=columns), columns)
        # The loader has chosen the ids of this table, perhaps by a rule of its own (OwnsIds).
        super().__init__(table.name, store=store, lock=lock, shard=(0, 1), filled=filled)

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        """Give every id (int64 [n]) a row and return the rows (int64 [n], CPU). Raises UnsupportedError, UsageError."""
        self._owner._check_ids(flat_ids(ids, table=self._table))
        return super().insert(ids)

    def end(self, ok: bool) -> None:
        """Write the rows to the table if ok, else drop them; raises what writing raises. Idempotent."""
        self._release(partial(self._finish, ok))

    def _finish(self, ok: bool) -> None:
        store = self._store
        del self._store
        if ok:
            # Rows are never removed here, so they are the first ones of every column.
            columns = {name: column[: len(store)] for name, column in store.columns().items()}
            with torch.no_grad(), self._owner.on_device():
                self._owner._replace({ID_COLUMN: torch.from_numpy(store.ids()), **columns})


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
