"""The table protocol: what the saver and the loader ask of a sparse table.

A table is rows under int64 ids. Its columns all share one row order: `id` first, then weights, optimizer slots,
metadata.

A save:
1. `begin_cut()` freezes the id -> row map and the row storage. Nothing of the table may change until the fence.
2. The snapshot stage copies the rows named by `runs` of every column.
3. `fence()`: the table may change again.
4. `end(ok)`: the save has committed (True) or failed (False). May come from another thread, long after the fence.

Three kinds of cut can do more. A TracksRows knows which rows were written since an earlier cut. An OverlaidCut is one
whose newest values are partly in a faster level: they are laid over the storage's rows on the way out, and the live
table is never flushed. An OpenCut may stay open behind its fence, so that only its cache level is copied while training
waits; its rows are exported later, each as it was at the cut.

A load:
1. `begin_load(clear=..., rows_count=..., filled=...)`.
2. `insert(ids)` gives the rows of a batch of ids, in the order of the ids.
3. The restore stage writes those rows of every column tensor.
4. `end(ok)`: on False the table is left empty, never half filled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    REMOVED = "removed"  # Ids that a delta takes out of what its parents hold.
    PAD = "pad"  # Fills a shard file up to the next page.


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


@dataclass(frozen=True)
class CutVersion:
    """Names the state of one table at one cut: `source` is a number of this process that no other table has, `number`
    grows from cut to cut.
    """

    source: int
    number: int


@runtime_checkable
class TracksRows(TableCut, Protocol):
    """A cut of a table that knows which of its rows were written since an earlier cut. Asked before the fence.

    A table has a mark for every row, the number of the epoch in which it was last written; a cut ends an epoch. Who
    needs the rows touched since some cut keeps that cut's version, so there is nothing to give back when a save fails.
    """

    @property
    def version(self) -> CutVersion:
        """This cut's own."""
        ...

    def touched_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        """The rows of `runs`, ascending int64 [n], that may differ in some column, `id` included, from that cut.

        None: it is not known any more, so all may.
        """
        ...

    def removed_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        """The ids removed since that cut, distinct int64 [m]; some may be back. None: not known any more."""
        ...


@runtime_checkable
class TracksIds(TracksRows, Protocol):
    """A TracksRows that also knows whose id has changed: of most touched rows it has not."""

    def begun_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        """The rows given to an id since that cut, ascending int64 [n]; some may be free again. None: not known."""
        ...


@runtime_checkable
class OverlaidCut(TableCut, Protocol):
    """A cut of a table with a cache level over its storage. A cached row wins over the storage's."""

    @property
    def cache_map(self) -> torch.Tensor:
        """The storage row that each row of the cache level holds, -1 where it holds none: int64 [k] on the CPU.

        Storage rows in it are distinct and lie in `runs`. Valid until the fence.
        """
        ...

    def cached_column(self, name: str) -> torch.Tensor | None:
        """The live cache level of a column, `[>= k, *row_shape]`, contiguous, on the cache's device, until the fence.

        None: this column has no cache level (`id` never has).
        """
        ...


@dataclass(frozen=True)
class CacheCopy:
    """The cache level as it was at the cut, in memory that lives until the cut's `end`: `map` and every column."""

    map: NDArray[np.int64]
    columns: Mapping[str, torch.Tensor]


@runtime_checkable
class OpenCut(OverlaidCut, Protocol):
    """A cut that may stay open behind its fence.

    1. `stay_open(...)` before the fence: from then on the table keeps the old values of rows that are about to change.
    2. `fence()`: training goes on.
    3. `export(index, ...)` of every window, in whatever order, from another thread.
    4. `end(ok)`.
    """

    def stay_open(self, copy: CacheCopy, *, window_rows: int) -> None:
        """Window i is rows [i * window_rows, (i + 1) * window_rows) of the cut, the last one is shorter."""
        ...

    def most_urgent(self, left: Sequence[int]) -> int:
        """Which of the windows not yet exported, ascending and not empty, should come next."""
        ...

    def export(self, index: int, targets: Mapping[str, int]) -> None:
        """Copy the rows of a window, as they were at the cut, to the address of each column; `id` is one of them.

        Raises IOFailedError when the old values of a row could not be kept.
        """
        ...


@runtime_checkable
class OwnsIds(Protocol):
    """A table that does not own its ids by their modulo, for example a range of rows."""

    def owned(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ids, int64 [n], belong to this table: bool [n]."""
        ...


@runtime_checkable
class HoldsRange(Protocol):
    """A table of consecutive ids, all of a whole one or a part of it."""

    def id_range(self) -> tuple[int, int, int]:
        """(first, end, end of the whole): it holds the ids [first, end) of a table that holds [0, end of the whole)."""
        ...


@runtime_checkable
class ChecksLoad(Protocol):
    """A table that cannot take whatever ids a checkpoint holds."""

    def check_load(self, ids: NDArray[np.int64], *, clear: bool) -> None:
        """Raise an error when these ids of a checkpoint, int64 [n], of all owners, cannot be loaded.

        Called before the load begins with any table.
        """
        ...


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
class OrderedLoad(TableLoad, Protocol):
    """A load that can say beforehand which rows it gives, so that they are read while the ids are inserted."""

    def first_row(self) -> int | None:
        """The row r, when n distinct ids inserted next will get the rows r to r + n - 1 in their order; else None.

        The columns of these rows exist already.
        """
        ...


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


@runtime_checkable
class HasCompanions(Protocol):
    """A table that keeps a part of its state in further tables, saved and loaded with it in the same cut."""

    def companions(self) -> Mapping[str, Table]:
        """The further tables; the one under suffix s is saved as the table `<name>.<s>`."""
        ...
