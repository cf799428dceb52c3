"""What the modules and optimizers of this package need from a table."""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.model.table import TableSchema
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


class FindsOnHost(Protocol):
    """A TrainableTable that returns rows on the host, so that reading them needs no wait for its device."""

    def lookup_rows(self, ids: IdsLike, insert: bool = True) -> NDArray[np.int64]:
        """Like TrainableTable.lookup, but return int64 [n] in the order of the flattened ids."""
        ...


def rows_on_host(table: TrainableTable, ids: IdsLike, *, insert: bool) -> NDArray[np.int64]:
    """Look ids up and return the rows on the host, int64 [n]; waits for the device unless the table FindsOnHost."""
    if hasattr(table, "lookup_rows"):  # An isinstance with a Protocol takes 50 microseconds.
        return cast(FindsOnHost, table).lookup_rows(ids, insert)
    found: NDArray[np.int64] = table.lookup(ids, insert=insert).cpu().numpy()
    return found
