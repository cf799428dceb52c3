"""The table protocol: what the saver and the loader ask of a sparse table.

A table is rows under int64 ids. Its columns all share one row order: `id` first, then weights, optimizer slots,
metadata.

A save:
1. `begin_cut()` freezes the id -> row map and the row storage. Nothing of the table may change until the fence.
2. The snapshot stage copies the rows named by `runs` of every column.
3. `fence()`: the table may change again.
4. `end(ok)`: the save has committed (True) or failed (False). May come from another thread, long after the fence.

A load:
1. `begin_load(clear=..., rows_count=..., filled=...)`.
2. `insert(ids)` gives the rows of a batch of ids, in the order of the ids.
3. The restore stage writes those rows of every column tensor.
4. `end(ok)`: on False the table is left empty, never half filled.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

ID_COLUMN = "id"


class Role(str, Enum):
    """What a block or column is for."""

    ID = "id"
    WEIGHT = "weight"
    OPTIMIZER = "optimizer"
    METADATA = "metadata"
    DENSE = "dense"


@dataclass(frozen=True)
class Column:
    """One array of a table: `[rows, *row_shape]` of dtype."""

    name: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    role: Role


@dataclass(frozen=True)
class TableSchema:
    """Columns in their order; the first is `id` (int64, row shape ())."""

    columns: tuple[Column, ...]

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)


class TableCut(Protocol):
    """A frozen table. `runs` are ascending row ranges `[begin, end)`, int64 [k, 2], shared by all columns."""

    @property
    def rows_count(self) -> int: ...
    @property
    def runs(self) -> NDArray[np.int64]: ...
    def column(self, name: str) -> torch.Tensor:
        """The live storage of a column, `[>= last run end, *row_shape]`, contiguous; valid until the fence."""
        ...

    def fence(self) -> None: ...
    def end(self, ok: bool) -> None: ...


class TableLoad(Protocol):
    """A table being filled. Other use of the table waits until `end`."""

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        """Give every id (int64 [n], CPU) a row and return the rows (int64 [n])."""
        ...

    def column(self, name: str) -> torch.Tensor:
        """The live storage of a column; fetch it again after an insert."""
        ...

    def end(self, ok: bool) -> None: ...


@runtime_checkable
class Table(Protocol):
    """Anything the saver can save as a table."""

    @property
    def name(self) -> str: ...
    @property
    def shard(self) -> tuple[int, int]:
        """(index, count): this table holds the ids whose unsigned value modulo count is index."""
        ...

    def schema(self) -> TableSchema: ...
    def begin_cut(self) -> TableCut: ...
    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> TableLoad:
        """Begin to fill the table with about rows_count rows.

        clear: empty it first. filled: columns that will be written for every inserted row, so that they need no first
        value.
        """
        ...
