"""What the modules and optimizers of this room need of a table."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from asyncckpt.model.table import TableSchema
from asyncckpt.tables.ids import IdsLike, RowsLike


@runtime_checkable
class TrainableTable(Protocol):
    """A table whose rows training reads and updates in place.

    What `lookup` returns indexes `embedding` and `slot(name)`, and does so until the next lookup: rows may move then.
    """

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def embedding(self) -> torch.Tensor:
        """The live rows, `[n, dim]`; fetch them anew after a lookup."""
        ...

    def slot(self, name: str) -> torch.Tensor:
        """Return the live tensor, `[n, *row_shape]`, of an optimizer slot or metadata column. Raises UsageError."""
        ...

    def schema(self) -> TableSchema: ...
    def lookup(self, ids: IdsLike, insert: bool = True) -> torch.Tensor:
        """Return the rows of ids, int64 in the shape of ids; -1 for an id that is absent and gets no row."""
        ...

    def touch(self, rows: RowsLike) -> None:
        """Mark rows that are about to be written, or were: those of a lookup with insert are marked already.

        rows are what `lookup` returned, -1 is passed over. A table without marks may do nothing.
        """
        ...
