"""What the modules and optimizers of this package need from a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from asyncckpt.model.table import TableSchema
from asyncckpt.native import I64
from asyncckpt.tables.ids import IdsLike, RowsLike


@runtime_checkable
class TrainableTable(Protocol):
    """A table whose rows training reads and updates in place.

    The rows that `lookup` returns index `embedding` and `slot(name)` until the next lookup, which may move rows.
    """

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def embedding(self) -> torch.Tensor:
        """The live rows, `[n, dim]`; fetch them again after a lookup."""
        ...

    def slot(self, name: str) -> torch.Tensor:
        """Return the live tensor, `[n, *row_shape]`, of an optimizer slot or metadata column. Raises UsageError."""
        ...

    def schema(self) -> TableSchema: ...
    def lookup(self, ids: IdsLike, insert: bool = True) -> torch.Tensor:
        """Return the rows of ids, int64 in the shape of ids; -1 for an id that is absent and gets no row."""
        ...

    def touch(self, rows: RowsLike) -> None:
        """Mark rows that are about to be written, or were written; a lookup with insert marks its rows itself.

        rows are what `lookup` returned; -1 is skipped. A table without marks may do nothing.
        """
        ...


def rows_on_host(table: TrainableTable, ids: IdsLike, *, insert: bool) -> I64:
    """Look ids up and return the rows on the host, int64 [n]: by `lookup_rows`, or else after a wait for the device."""
    find: Callable[[IdsLike, bool], I64] | None = getattr(table, "lookup_rows", None)
    if find is not None:
        return find(ids, insert)
    found: I64 = table.lookup(ids, insert=insert).cpu().numpy()
    return found
