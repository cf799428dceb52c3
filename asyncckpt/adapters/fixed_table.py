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

A table knows which rows were written between two cuts only if it is tracked, see fixed_marks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.adapters.export_only import one_run
from asyncckpt.adapters.fixed_marks import FixedMarks, TracksFixedRows
from asyncckpt.errors import IncompatibleError, UnsupportedError, UsageError
from asyncckpt.model.table import ID_COLUMN, Column, Role, TableSchema
from asyncckpt.native import I64
from asyncckpt.tables.ids import IdsLike, flat_ids
from asyncckpt.tables.slots import EMBEDDING_COLUMN
from asyncckpt.tables.table_lock import FirstCaller, TableLock

LiveColumns: TypeAlias = Callable[[], Mapping[str, torch.Tensor]]
LiveMarks: TypeAlias = Callable[[], FixedMarks | None]


class FixedTable:
    """Rows [first_id, first_id + n) of a module. Implements `asyncckpt.model.table.Table`, `OwnsIds` and `ChecksLoad`.

    live returns the current columns, `[n, *row_shape]` each: `embedding`, then optimizer states. It is called at every
    cut and load, because a module may replace its tensors; rows, shapes and dtypes must stay the same.

    Rows of a checkpoint outside of the range belong to other parts of the table, up to ids_end: how many rows all parts
    have together (None: this is the only part). A load that empties first (no merge) must have all rows of the range
    and none from ids_end on. marks returns the marks of the rows, if there are any now. Raises UsageError for wrong
    arguments, UnsupportedError for tensors that cannot be read by row.
    """

    def __init__(
        self,
        name: str,
        live: LiveColumns,
        *,
        first_id: int = 0,
        ids_end: int | None = None,
        marks: LiveMarks | None = None,
    ) -> None:
        columns = _checked_columns(name, live)
        self._name = name
        self._live = live
        self._first_id = first_id
        self._rows_count = len(columns[EMBEDDING_COLUMN])
        self._ids_end = first_id + self._rows_count if ids_end is None else ids_end
        self._schema = TableSchema(
            columns=(
                Column(name=ID_COLUMN, dtype=torch.int64, row_shape=(), role=Role.ID),
                *(_column(column, tensor) for column, tensor in columns.items()),
            )
        )
        self._lock = TableLock(name)
        self._ids: torch.Tensor | None = None
        self._marks = marks
        self._own_marks: FixedMarks | None = None
        self._checked_live()

    @property
    def name(self) -> str:
        return self._name

    @property
    def shard(self) -> tuple[int, int]:
        """Always (0, 1): ids belong to the table by range, see `owned`."""
        return (0, 1)

    @property
    def first_id(self) -> int:
        return self._first_id

    def __len__(self) -> int:
        return self._rows_count

    def __repr__(self) -> str:
        return f"FixedTable({self._name!r}, ids [{self._first_id}, {self._first_id + self._rows_count}))"

    def schema(self) -> TableSchema:
        """Return the columns in their order: id, embedding, optimizer states."""
        return self._schema

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
        flat = flat_ids(ids, table=self._name)
        self._check_owned(flat)
        for marks in self._all_marks():
            marks.mark(flat - self._first_id)

    def begin_cut(self) -> FixedCut:
        """Cut the live columns. Raises UsageError if rows, shapes or dtypes have changed."""
        with self._lock.hold_for_result("cut"):
            columns, marks = self._checked_live(), self._live_marks()
            if marks is None:
                return FixedCut(self, columns=columns, lock=self._lock)
            cut = TrackedFixedCut(self, columns=columns, lock=self._lock)
            cut.start_tracking(marks)
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
            self._lose_marks()
            return FixedLoad(self, columns=columns, lock=self._lock)

    def ids(self) -> torch.Tensor:
        """Return the ids, int64 [n] on the CPU, ordered by row. Made when first needed: eight bytes a row."""
        if self._ids is None:
            self._ids = torch.arange(self._first_id, self._first_id + self._rows_count, dtype=torch.int64)
        return self._ids

    def _live_marks(self) -> FixedMarks | None:
        """Return the current marks for cuts: those kept for the module, else the table's own."""
        return next(iter(self._all_marks()), None)

    def _all_marks(self) -> list[FixedMarks]:
        given = None if self._marks is None else self._marks()
        return [marks for marks in (given, self._own_marks) if marks is not None]

    def _lose_marks(self) -> None:
        for marks in self._all_marks():
            marks.lose_all()

    def _check_owned(self, ids: I64) -> None:
        owned = self.owned(ids)
        if not owned.all():
            what = f"id {int(ids[int(np.argmin(owned))])} does not belong to table {self._name!r}"
            raise UsageError(what, expected=f"an id of {self!r}")

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


class _Held:
    """The live columns of a FixedTable, held for a cut or a load. The caller took the lock; any thread releases it."""

    what = ""

    def __init__(self, table: FixedTable, *, columns: dict[str, torch.Tensor], lock: TableLock) -> None:
        self._table = table
        self._columns = columns
        self._lock = lock
        self._released = FirstCaller()

    def column(self, name: str) -> torch.Tensor:
        """Return the live memory of a column, on the module's device. Raises UsageError."""
        self._check_open(f"column {name!r}")
        if name == ID_COLUMN:
            return self._table.ids()
        if name not in self._columns:
            what = f"table {self._table.name!r} has no such column"
            raise UsageError(what, found=name, expected=[ID_COLUMN, *self._columns])
        return self._columns[name]

    def _release(self) -> None:
        if self._released.first():
            self._columns = {}
            self._lock.release()

    def _check_open(self, use: str) -> None:
        if self._released.done:
            ends = "fence" if self.what == "cut" else "end"
            raise UsageError(f"{use} of a {self.what} of table {self._table.name!r} was asked for after its {ends}")


class FixedCut(_Held):
    """A TableCut of a FixedTable."""

    what = "cut"

    def __init__(self, table: FixedTable, *, columns: dict[str, torch.Tensor], lock: TableLock) -> None:
        super().__init__(table, columns=columns, lock=lock)
        self.rows_count = len(table)
        self.runs = one_run(self.rows_count)

    def fence(self) -> None:
        """Release the table. Idempotent."""
        self._release()

    def end(self, ok: bool) -> None:
        """Note that the save has committed or failed, and make up for a fence that was never called."""
        self.fence()


class TrackedFixedCut(FixedCut, TracksFixedRows):
    """A FixedCut that is a TracksRows too."""


class FixedLoad(_Held):
    """A TableLoad of a FixedTable."""

    what = "load"

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (int64 [n], CPU) of ids (int64 [n]). Raises UsageError for an id outside of the range."""
        self._check_open("insert")
        flat = flat_ids(ids, table=self._table.name)
        self._table._check_owned(flat)
        return torch.from_numpy(flat - self._table.first_id)

    def end(self, ok: bool) -> None:
        """Release the table, as far as it was filled. Idempotent."""
        self._release()


def _checked_columns(name: str, live: LiveColumns) -> Mapping[str, torch.Tensor]:
    if not isinstance(name, str) or not name:
        raise UsageError("name of a table is wrong", found=name, expected="a non-empty str")
    columns = live()
    if EMBEDDING_COLUMN not in columns or ID_COLUMN in columns:
        what = f"columns of table {name!r} are wrong"
        raise UsageError(what, found=list(columns), expected=f"{EMBEDDING_COLUMN!r} among them, not {ID_COLUMN!r}")
    for column, tensor in columns.items():
        _check_plain(tensor, f"column {column!r} of table {name!r}")
    return columns


def _column(name: str, tensor: torch.Tensor) -> Column:
    role = Role.WEIGHT if name == EMBEDDING_COLUMN else Role.OPTIMIZER
    return Column(name=name, dtype=tensor.dtype, row_shape=tuple(tensor.shape[1:]), role=role)


def _check_plain(tensor: torch.Tensor, what: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{what} is wrong", found=type(tensor).__name__, expected="a torch.Tensor")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        hint = "register an adapter that gives the rows of this rank as a plain tensor"
        raise UnsupportedError(f"{what} is not a plain tensor", found=type(tensor).__name__, hint=hint)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dim() == 0:
        found = (tensor.layout, str(tensor.device), tuple(tensor.shape))
        raise UnsupportedError(f"{what} has no rows in memory", found=found, expected="a strided tensor with rows")
