"""A table of fixed rows over live tensors: row i has the id first_id + i.

For embeddings whose ids are row numbers: nn.Embedding, FBGEMM, a row-wise shard of TorchRec. The columns are the
module's own memory, not copies.

    from   to     done by                   the tensors
    free   cut    FixedTable.begin_cut      must not be changed by training
    cut    free   fence, or end             may change again
    free   load   FixedTable.begin_load     are written by the load alone
    load   free   end                       are filled on end(True)

A fixed table cannot be emptied: its rows always exist. After a failed load its content is undefined, as for dense
tensors: each row is from before or from the checkpoint. The table's lock is held in the states cut and load, so that a
save and a load exclude each other; training does not use the lock.

Any code may write to the memory of such a table, so it knows which rows were written between two cuts only after a
promise to report every write: by `FixedTable.track()`, or by `track_lookups` for supported modules, whose kernels write
what torch does not count. There a write that torch has counted makes all marks unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import IncompatibleError, UnsupportedError, UsageError, must_be
from asyncckpt.model.table import ID_COLUMN, Column, CutVersion, Role, TableSchema
from asyncckpt.native import I64
from asyncckpt.signals import Guard
from asyncckpt.tables.slots import EMBEDDING_COLUMN, ID
from asyncckpt.tables.table_arguments import IdsLike, check_name, flat_ids
from asyncckpt.tables.table_lock import HeldTable, LockedTable, TableLock
from asyncckpt.tables.touched_rows import TouchedRows, TracksMarks

LiveColumns: TypeAlias = Callable[[], Mapping[str, torch.Tensor]]


class FixedMarks(TouchedRows):
    """The marks of rows_count rows, which are never removed.

    Any thread may call the methods: autograd has threads of its own. before_cut is called before an epoch ends, without
    the lock, to fetch marks that are collected elsewhere.
    """

    def __init__(self, rows_count: int, *, before_cut: Callable[[], None] = lambda: None) -> None:
        super().__init__(rows_count)
        self._lock = Guard()
        self._before_cut = before_cut
        self._versions: dict[str, int] | None = None
        self.begin_rows(np.arange(rows_count, dtype=np.int64), rows_end=rows_count)

    def mark(self, rows: I64) -> None:
        with self._lock:
            super().mark(rows)

    def lose_all(self, *, by_others: bool = False) -> None:
        with self._lock:
            super().lose_all(by_others=by_others)

    def look_for_others(self, columns: Mapping[str, torch.Tensor]) -> None:
        """Lose all when torch has counted a write to one of the columns since the last call.

        For columns that are trained by kernels whose writes torch does not count: a counted one is of other code, and
        nobody knows which rows it was to.
        """
        versions = {name: 0 if tensor.is_inference() else tensor._version for name, tensor in columns.items()}
        if self._versions not in (None, versions):
            self.lose_all()
        self._versions = versions

    def end_epoch(self) -> CutVersion:
        self._before_cut()
        with self._lock:
            return super().end_epoch()

    def touched_since(self, version: CutVersion) -> I64 | None:
        with self._lock:
            return super().touched_since(version)


LiveMarks: TypeAlias = Callable[[], FixedMarks | None]


class FixedCut(HeldTable):
    """A TableCut of a FixedTable."""

    def __init__(self, table: FixedTable, columns: Mapping[str, torch.Tensor], lock: TableLock) -> None:
        super().__init__(table.name, lock, columns=columns, ids=table.ids)
        self.rows_count = len(table)
        self.runs = one_run(self.rows_count)

    def fence(self) -> None:
        """Release the table. Idempotent."""
        self._release()

    def end(self, ok: bool) -> None:
        """Note that the save has committed or failed, and make up for a fence that was never called."""
        self.fence()


class TrackedFixedCut(FixedCut, TracksMarks):
    """A FixedCut that is a TracksRows too."""


class FixedLoad(HeldTable):
    """A TableLoad of a FixedTable."""

    use, released_by = "load", "end"

    def __init__(self, table: FixedTable, columns: Mapping[str, torch.Tensor], lock: TableLock) -> None:
        super().__init__(table.name, lock, columns=columns, ids=table.ids)
        self._rows_of = table.rows_of

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (int64 [n], CPU) of ids (int64 [n]). Raises UsageError for an id outside of the range."""
        self._check_held("insert")
        return torch.from_numpy(self._rows_of(ids))

    def end(self, ok: bool) -> None:
        """Release the table, as far as it was filled. Idempotent."""
        self._release()


class FixedTable(LockedTable):
    """Rows [first_id, first_id + n) of a module. Implements `asyncckpt.model.table.Table`, `OwnsIds` and `ChecksLoad`.

    live returns the current columns, `[n, *row_shape]` each: `embedding`, then optimizer states. It is called at every
    cut and load, because a module may replace its tensors; rows, shapes and dtypes must stay the same.

    Rows of a checkpoint outside of the range belong to other parts of the table, up to ids_end: how many rows all parts
    have together (None: this is the only part). A load that empties first (no merge) must have all rows of the range
    and none from ids_end on. marks returns the marks of the rows, if there are any now. in_backward_of: the module that
    changes the rows in its backward, if one does. Raises UsageError for wrong arguments, UnsupportedError for tensors
    that cannot be read by row.
    """

    _cut: type[FixedCut] = FixedCut
    _tracked_cut: type[TrackedFixedCut] = TrackedFixedCut
    _load: type[FixedLoad] = FixedLoad

    def __init__(
        self,
        name: str,
        live: LiveColumns,
        *,
        first_id: int = 0,
        ids_end: int | None = None,
        marks: LiveMarks = lambda: None,
        in_backward_of: torch.nn.Module | None = None,
    ) -> None:
        columns = _checked_columns(name, live)
        schema = TableSchema(columns=(ID, *(_column(column, tensor) for column, tensor in columns.items())))
        # Ids belong to the table by range: see `owned`.
        super().__init__(name, schema, shard=(0, 1))
        self._live = live
        self._first_id = first_id
        self._rows_count = len(columns[EMBEDDING_COLUMN])
        self._ids_end = first_id + self._rows_count if ids_end is None else ids_end
        self._ids: torch.Tensor | None = None
        self._marks = marks
        self.in_backward_of = in_backward_of
        self._own_marks: FixedMarks | None = None
        self._checked_live()

    @property
    def first_id(self) -> int:
        return self._first_id

    def __len__(self) -> int:
        return self._rows_count

    def __repr__(self) -> str:
        return f"FixedTable({self._name!r}, ids [{self._first_id}, {self._first_id + self._rows_count}))"

    def id_range(self) -> tuple[int, int, int]:
        """Return (first, end) of the ids here, and the end of those of the whole table."""
        return self._first_id, self._first_id + self._rows_count, self._ids_end

    def owned(self, ids: I64) -> NDArray[np.bool_]:
        """Return which of ids (int64 [n]) are in the table's range: bool [n]."""
        return (ids >= self._first_id) & (ids < self._first_id + self._rows_count)

    def track(self) -> None:
        """Keep marks of rows from now on, a byte each: the caller promises to call `touch` for every write.

        Cuts are then TracksRows, and saves may take only the touched rows. Idempotent.
        """
        with self._lock.hold("track"):
            if self._own_marks is None:
                self._own_marks = FixedMarks(self._rows_count)

    def touch(self, ids: IdsLike) -> None:
        """Mark the rows of ids (int64, any shape) as written, before or after they are; do nothing without marks.

        Raises UsageError for ids outside of the range.
        """
        rows = self.rows_of(ids)
        for marks in self._all_marks():
            marks.mark(rows)

    def begin_cut(self) -> FixedCut:
        """Cut the live columns. Raises UsageError if rows, shapes or dtypes have changed."""
        with self._lock.hold_for_result("cut"):
            columns, marks = self._checked_live(), self._all_marks()
            if not marks:
                return self._cut(self, columns, self._lock)
            kept = self._marks()
            if kept is not None:
                kept.look_for_others(columns)
            cut = self._tracked_cut(self, columns, self._lock)
            cut.start_tracking(marks[0])
            return cut

    def check_load(self, ids: I64, *, clear: bool) -> None:
        """Raise IncompatibleError for a checkpoint of a smaller or larger table, if clear.

        A smaller one would leave rows of another step, a larger one would silently lose rows.
        """
        if not clear:
            return
        found = int(np.count_nonzero(self.owned(ids)))
        hint = "load with merge=True to take the rows that both have"
        if found < self._rows_count:
            what = f"the checkpoint holds too few of the rows of table {self._name!r}, which cannot be emptied"
            raise IncompatibleError(what, found=found, expected=self._rows_count, hint=hint)
        foreign = (ids < 0) | (ids >= self._ids_end)
        if foreign.any():
            what = f"the checkpoint holds rows that table {self._name!r} does not have"
            expected = f"ids below {self._ids_end}"
            raise IncompatibleError(what, found=int(ids[int(np.argmax(foreign))]), expected=expected, hint=hint)

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str] = ()) -> FixedLoad:
        """Take the table for a load until its end; nothing is emptied, columns outside of `filled` stay.

        Raises UsageError if rows, shapes or dtypes of the module have changed.
        """
        with self._lock.hold_for_result("load"):
            columns = self._checked_live()
            for marks in self._all_marks():
                marks.lose_all()
            return self._load(self, columns, self._lock)

    def rows_of(self, ids: IdsLike) -> I64:
        """Return the rows, int64 [n], of ids (int64, any shape). Raises UsageError for ids outside of the range."""
        flat = flat_ids(ids, table=self._name)
        owned = self.owned(flat)
        if not owned.all():
            what = f"id {int(flat[int(np.argmin(owned))])} does not belong to table {self._name!r}"
            raise UsageError(what, expected=f"an id of {self!r}")
        return flat - self._first_id

    def ids(self) -> torch.Tensor:
        """Return the ids, int64 [n] on the CPU, ordered by row. Made when first needed: eight bytes a row."""
        if self._ids is None:
            self._ids = torch.arange(self._first_id, self._first_id + self._rows_count, dtype=torch.int64, device="cpu")
        return self._ids

    def _all_marks(self) -> list[FixedMarks]:
        """Return the current marks: those kept for the module, by which cuts go if there are any, and the table's."""
        return [marks for marks in (self._marks(), self._own_marks) if marks is not None]

    def _checked_live(self) -> dict[str, torch.Tensor]:
        live = {name: tensor.detach() for name, tensor in self._live().items()}
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in live.items()}
        expected = {
            column.name: ((self._rows_count, *column.row_shape), column.dtype) for column in self._schema.columns[1:]
        }
        if found != expected:
            what = f"the columns of table {self._name!r} do not fit its schema"
            raise UsageError(what, found=found, expected=expected, hint="call tables_of again")
        return live


def _checked_columns(name: str, live: LiveColumns) -> Mapping[str, torch.Tensor]:
    check_name(name)
    columns = live()
    if EMBEDDING_COLUMN not in columns or ID_COLUMN in columns:
        what = f"columns of table {name!r} must include {EMBEDDING_COLUMN!r} and not {ID_COLUMN!r}"
        raise UsageError(what, found=list(columns))
    for column, tensor in columns.items():
        _check_plain(tensor, f"column {column!r} of table {name!r}")
    return columns


def _column(name: str, tensor: torch.Tensor) -> Column:
    role = Role.WEIGHT if name == EMBEDDING_COLUMN else Role.OPTIMIZER
    return Column(name=name, dtype=tensor.dtype, row_shape=tuple(tensor.shape[1:]), role=role)


def _check_plain(tensor: torch.Tensor, what: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise must_be(what, "a torch.Tensor", type(tensor))
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        hint = "register an adapter that gives the rows of this rank as a plain tensor"
        raise UnsupportedError(f"{what} is not a plain tensor", found=type(tensor), hint=hint)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dim() == 0:
        found = (tensor.layout, str(tensor.device), tuple(tensor.shape))
        raise UnsupportedError(f"{what} has no rows in memory", found=found, expected="a strided tensor with rows")


def one_run(rows_count: int) -> I64:
    """Return the run of all rows, int64 [1, 2]; none if there are no rows."""
    return np.array([[0, rows_count]] if rows_count else [], dtype=np.int64).reshape(-1, 2)
