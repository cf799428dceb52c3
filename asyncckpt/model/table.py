"""The table protocol: what the saver and the loader need from a sparse table.

A table maps int64 ids to rows. All of its columns have the same row order: `id` first, then weights, optimizer slots,
metadata.

A save:
1. `begin_cut()` freezes the id -> row map and the row storage. Nothing of the table may change until the fence.
2. The snapshot stage copies the rows named by `runs` of every column.
3. `fence()`: the table may change again.
4. `end(ok)`: the save has committed (True) or failed (False). Any thread may call it, long after the fence.

Four kinds of cut can do more. A TracksRows knows which rows were written since an earlier cut. A WatchedCut asks before
its rows are written, so that they may be copied after the fence. An OverlaidCut has part of its newest values in a
faster level: they overlay the rows of the storage on the way out, and the live table is never flushed. The export of a
DeferredCut may be deferred past its fence, so that only its cache level is copied while training waits; its rows are
exported later, each as it was at the cut.

A load:
1. `begin_load(clear=..., rows_count=..., filled=...)`.
2. `insert(ids)` returns the rows of a batch of ids, in the order of the ids.
3. The restore stage writes those rows of every column tensor.
4. `end(ok)`: False leaves the table empty, never half filled.

Saves and loads of several tables begin in the order of the tables' identities, whatever the order of their names: so
none of them ever waits for a table that another one has, while that one waits for a table of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

from asyncckpt.model.table_shard import Shard

if TYPE_CHECKING:  # Manifests are read without them: the command line starts at once.
    import numpy as np
    import torch
    from numpy.typing import NDArray

ID_COLUMN = "id"


class Role(str, Enum):
    """The purpose of a block or column."""

    ID = "id"
    WEIGHT = "weight"
    OPTIMIZER = "optimizer"
    METADATA = "metadata"
    DENSE = "dense"
    REMOVED = "removed"  # Ids that a delta removes from what its parents hold.
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
        """Return the live storage of a column, `[>= last run end, *row_shape]`, contiguous; valid until the fence."""
        ...

    def fence(self) -> None: ...
    def end(self, ok: bool) -> None: ...


@runtime_checkable
class HandsOver(TableCut, Protocol):
    """A cut whose table refuses other uses to the thread that began it, which would wait for itself."""

    def hand_over(self) -> None:
        """Note that another thread fences it: from now on, the one that began it may wait for that."""
        ...


@dataclass(frozen=True)
class CutVersion:
    """Names the state of one table at one cut.

    `source` is unique to the table in this process, `number` grows from cut to cut.
    """

    source: int
    number: int


@runtime_checkable
class TracksRows(TableCut, Protocol):
    """A cut of a table that knows which of its rows were written since an earlier cut. Valid until the fence.

    A table has a mark for every row, the epoch in which it was last written; a cut ends an epoch. To get the rows
    touched since a cut later, keep that cut's version; so a failed save has nothing to take back.
    """

    @property
    def version(self) -> CutVersion:
        """The version of this cut."""
        ...

    def touched_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        """Return the rows of `runs`, ascending int64 [n], that may differ in any column, `id` included, from that cut.

        None if unknown: then all rows may.
        """
        ...

    def removed_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        """Return the ids removed since that cut, distinct int64 [m]; some may be back. None if unknown."""
        ...


@runtime_checkable
class TracksIds(TracksRows, Protocol):
    """A TracksRows that also knows which rows have another id, which few of the touched rows have."""

    def begun_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        """Return the rows assigned to an id since that cut, ascending int64 [n]; some may be free. None if unknown."""
        ...


class RowWatcher(Protocol):
    """Called by the thread that is about to change rows, which holds the table's lock; may block it."""

    def rows_change(self, rows: NDArray[np.int64], columns: Collection[str] | None) -> None:
        """Rows, int64 [n], distinct, are about to change in these columns; None: in any, `id` is one of them."""
        ...

    def storage_moves(self) -> None:
        """All columns are about to move to other memory, or to be rewritten."""
        ...


@runtime_checkable
class WatchedCut(TableCut, Protocol):
    """A cut of a table that asks before it writes, so that rows may be copied after the fence, too."""

    def watch(self, watcher: RowWatcher) -> None:
        """Ask it from now on. Before the fence."""
        ...

    def unwatch(self, watcher: RowWatcher) -> None:
        """Ask it no longer. Any thread, any number of times."""
        ...

    def writes_by_others(self, names: Sequence[str]) -> list[int]:
        """Return how often other code has written to each column, as far as that is counted; too much while another
        thread counts a write of the table itself. Any thread."""
        ...


@runtime_checkable
class OverlaidCut(TableCut, Protocol):
    """A cut of a table with a cache level over its storage. A cached row wins over a row of the storage."""

    @property
    def cache_map(self) -> torch.Tensor:
        """Return the storage row of each row of the cache level, -1 for a free one: int64 [k] on the CPU.

        Storage rows in it are distinct and in `runs`. Valid until the fence.
        """
        ...

    def cached_column(self, name: str) -> torch.Tensor | None:
        """Return the live cache level of a column, `[>= k, *row_shape]`, contiguous, on its device, until the fence.

        None if this column has no cache level (`id` never has).
        """
        ...


@dataclass(frozen=True)
class CacheCopy:
    """The cache level as it was at the cut, in memory that lives until the cut's `end`: `map` and every column."""

    map: NDArray[np.int64]
    columns: Mapping[str, torch.Tensor]


@runtime_checkable
class DeferredCut(OverlaidCut, Protocol):
    """A cut whose export may be deferred past its fence.

    1. `be_deferred(...)` before the fence: from then on, the table keeps old values of rows that are about to change.
    2. `fence()`: training goes on.
    3. `export(index, ...)` of every window, in any order, from another thread.
    4. `end(ok)`.
    """

    def be_deferred(self, copy: CacheCopy, *, window_rows: int) -> None:
        """Defer the export. Window i has the rows [i, i + 1) * window_rows of the cut; the last one is shorter."""
        ...

    def most_urgent(self, left: Sequence[int]) -> int:
        """Return which of the windows that are left, ascending and not empty, to export next."""
        ...

    def export(self, index: int, targets: Mapping[str, int]) -> None:
        """Copy the rows of a window, as they were at the cut, to the address of each column; `id` is one of them.

        Raises IOFailedError if the old values of a row could not be kept.
        """
        ...


@runtime_checkable
class OwnsIds(Protocol):
    """A table that owns ids by another rule than their modulo, for example a range of rows."""

    def owned(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of ids, int64 [n], belong to this table: bool [n]."""
        ...


@runtime_checkable
class HoldsRange(Protocol):
    """A table of consecutive ids: a whole table or a part of it."""

    def id_range(self) -> tuple[int, int, int]:
        """Return (first, end, end of the whole): it has the ids [first, end) of a table with [0, end of the whole)."""
        ...


@runtime_checkable
class Replicated(Protocol):
    """A table that says whether it is a replica: all ids, with the same rows on every rank that has the table."""

    @property
    def replicated(self) -> bool: ...


@dataclass(frozen=True)
class IdsHeld:
    """How many ids a table holds, and the sum of their fingerprints modulo 2**64: the same for the same ids."""

    count: int = 0
    fingerprint: int = 0


@runtime_checkable
class CountsIds(Protocol):
    """A replica that keeps its IdsHeld as ids come and go, so that a rank that does not write it need not read it."""

    def ids_held(self) -> IdsHeld:
        """Return them; takes no lock: it is asked during a cut of the table, too."""
        ...


@runtime_checkable
class ChecksLoad(Protocol):
    """A table that cannot load every checkpoint's ids."""

    def check_load(self, ids: NDArray[np.int64], *, clear: bool) -> None:
        """Raise an error if these ids of a checkpoint, int64 [n], of all owners, cannot be loaded.

        Called before the load of any table begins.
        """
        ...


class TableLoad(Protocol):
    """A table being filled. Other uses of the table wait until `end`."""

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        """Give every id (int64 [n], CPU) a row and return the rows (int64 [n])."""
        ...

    def column(self, name: str) -> torch.Tensor:
        """Return the live storage of a column; fetch it again after an insert."""
        ...

    def end(self, ok: bool) -> None: ...


@runtime_checkable
class OrderedLoad(TableLoad, Protocol):
    """A load that knows its rows in advance, so that they can be read while the ids are inserted."""

    def first_row(self) -> int | None:
        """Return r if n distinct ids inserted next will get the rows r to r + n - 1 in their order; else None.

        The columns already have these rows.
        """
        ...


@runtime_checkable
class Table(Protocol):
    """Anything that the saver can save as a table."""

    @property
    def name(self) -> str: ...
    @property
    def shard(self) -> Shard:
        """(index, count): this table holds the ids whose unsigned value modulo count is index; (begin, end, size):
        those whose unsigned value modulo size is in [begin, end).

        (0, 1) holds all ids. Where several ranks save together it says nothing: see Replicated, OwnsIds, HoldsRange.
        """
        ...

    def schema(self) -> TableSchema: ...
    def begin_cut(self) -> TableCut: ...
    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> TableLoad:
        """Begin to fill the table with about rows_count rows.

        clear: empty it first. filled: columns that the load writes for every inserted row, so that they need no initial
        values.
        """
        ...


@runtime_checkable
class TrainedInBackward(Protocol):
    """A table whose rows a module changes in its backward, before any optimizer has begun its step."""

    @property
    def in_backward_of(self) -> torch.nn.Module | None:
        """Return the module; None if optimizers change the rows."""
        ...


@runtime_checkable
class HasCompanions(Protocol):
    """A table with part of its state in other tables, which are saved and loaded with it in the same cut."""

    def companions(self) -> Mapping[str, Table]:
        """Return the other tables; the one with suffix s is saved as the table `<name>.<s>`."""
        ...


# An isinstance with a Protocol takes 50 microseconds, and a save asks often while training waits: once for each class.
_offers: dict[tuple[type, type], bool] = {}


def tracks_rows(cut: TableCut) -> TypeGuard[TracksRows]:
    """Return whether the table knows which rows were written since an earlier cut."""
    return _offers_all(cut, TracksRows)


def tracks_ids(cut: TableCut) -> TypeGuard[TracksIds]:
    """Return whether the table also knows which rows were assigned to another id."""
    return _offers_all(cut, TracksIds)


def is_watched(cut: TableCut) -> TypeGuard[WatchedCut]:
    """Return whether the table asks before it writes."""
    return _offers_all(cut, WatchedCut)


def is_overlaid(cut: TableCut) -> TypeGuard[OverlaidCut]:
    """Return whether the table has a cache level over its storage."""
    return _offers_all(cut, OverlaidCut)


def can_be_deferred(cut: TableCut) -> TypeGuard[DeferredCut]:
    """Return whether the export of the table can be deferred past the fence."""
    return _offers_all(cut, DeferredCut)


def hands_over(cut: TableCut) -> TypeGuard[HandsOver]:
    """Return whether the table knows the thread that makes the cut."""
    return _offers_all(cut, HandsOver)


def owns_ids(table: Table) -> TypeGuard[OwnsIds]:
    """Return whether a table owns ids by a rule of its own."""
    return _offers_all(table, OwnsIds)


def _offers_all(item: Table | TableCut, protocol: type) -> bool:
    key = (type(item), protocol)
    if key not in _offers:
        _offers[key] = isinstance(item, protocol)
    return _offers[key]
