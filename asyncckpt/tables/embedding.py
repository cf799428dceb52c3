"""torch modules over a HashTable or a MultiLevelTable: HashEmbedding and HashEmbeddingBag.

In training mode, a forward gives unseen ids a row, and records the step and adds the number of mentions in every row it
reads; ids that the table does not admit yet read as zero rows without a gradient. In eval mode, no id gets a row,
unseen ids read as zero rows, nothing gets a gradient, and caches stay as they are. The table is not a parameter:
`state_dict()` does not hold it (a checkpoint has it as a table), `.to()` does not move it, and sparse optimizers
(optim.py) update it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from asyncckpt.errors import UsageError, must_be
from asyncckpt.model.table import Role, TableSchema
from asyncckpt.native import I64
from asyncckpt.tables.gradients import PendingGradients
from asyncckpt.tables.hash_table import HashTable
from asyncckpt.tables.initializer import Initializer
from asyncckpt.tables.noted_tables import note_tables
from asyncckpt.tables.row_device import sent, spread
from asyncckpt.tables.row_values import RecordRows, RowValues
from asyncckpt.tables.slots import SlotSpec
from asyncckpt.tables.table_arguments import IdsLike, RowsLike, flat_ids
from asyncckpt.tables.table_lock import uncompiled
from asyncckpt.tables.trained_table import TrainedTable

LAST_SEEN_COLUMN = "last_seen"
COUNT_COLUMN = "count"
BAG_MODES = ("sum", "mean", "max")


@runtime_checkable
class TrainableTable(Protocol):
    """A table whose rows training reads, and updates by `update` and `rows`.

    The rows that `lookup` returns index `embedding` until the next lookup, which may move rows.
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

    def schema(self) -> TableSchema: ...
    def lookup(self, ids: IdsLike, insert: bool = True) -> torch.Tensor:
        """Return the rows of ids, int64 in the shape of ids; -1 for an id that is absent and gets no row."""
        ...

    def update(self, rows: RowsLike, function: Callable[[RowValues], object]) -> None:
        """Change rows that `lookup` returned, distinct, by a function of copies of them."""
        ...

    def rows(self, ids: IdsLike) -> AbstractContextManager[RowValues]:
        """Hold the rows of distinct ids for a block of code that changes copies of them."""
        ...


class HashEmbedding(nn.Module):
    """Rows of a table by id, like nn.Embedding without a size.

    table is a HashTable, a MultiLevelTable or any other TrainableTable; or a dim for a new HashTable made with name,
    optimizer_slots and initializer. step_column names the int64 metadata column, row shape (), to which training
    forwards write `step`; None: `last_seen`, if the table has it. If the table has an int64 metadata column `count`,
    row shape (), a training forward adds how often each id is mentioned. `pending` holds gradients until an optimizer
    takes them.
    """

    def __init__(
        self,
        table: TrainableTable | int,
        *,
        name: str = "embedding",
        optimizer_slots: Mapping[str, SlotSpec] | None = None,
        initializer: Initializer = None,
        step_column: str | None = None,
    ) -> None:
        super().__init__()
        self.table: TrainableTable
        if isinstance(table, TrainableTable):
            if optimizer_slots is not None or initializer is not None:
                what = f"table {table.name!r} already exists, its slots and initializer are set"
                raise UsageError(what, hint="give them to HashTable, or a dim instead of the table")
            self.table = table
        else:
            metadata = None if step_column is None else {step_column: torch.int64}
            self.table = HashTable(
                name, table, optimizer_slots=optimizer_slots, metadata=metadata, initializer=initializer
            )
        self._step: int | None = None
        self.pending = PendingGradients()
        self._step_column = _checked_step_column(self.table, step_column)
        self._count_column = _scalar_column(self.table, COUNT_COLUMN)

    @property
    def step(self) -> int | None:
        """The number that training forwards write to the step column: steps, counted from 1, or seconds.

        An int64 of any kind, also of NumPy or a tensor. 0 is the initial value of the column: it stamps nothing, and
        `evict` keeps such ids. None, as it is to begin with: nothing is written. Setting it raises UsageError.
        """
        return self._step

    @step.setter
    def step(self, step: SupportsIndex | None) -> None:
        self._step = None if step is None else _checked_step(step, table=self.table.name)

    def extra_repr(self) -> str:
        return repr(self.table)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        note_tables(destination, prefix, {"": self.table})

    @uncompiled
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows, `[*ids.shape, dim]`, of ids, int64 of any shape. Raises UsageError like HashTable.lookup."""
        places, rows = self._distinct_rows(ids)
        return functional.embedding(places, rows)

    def _distinct_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (places, rows): rows `[n, dim]` of the distinct ids, and for every id its place among them.

        The distinct ids are ascending, so that no result depends on row numbers.
        """
        if not isinstance(ids, torch.Tensor):
            raise must_be(f"ids for table {self.table.name!r}", "a torch.Tensor", type(ids))
        flat = flat_ids(ids, table=self.table.name)
        distinct, inverse, mentions = np.unique(flat, return_inverse=True, return_counts=True)
        places = sent(torch.from_numpy(inverse).view(ids.shape), self.table.device)
        if not self.training:
            return places, _read(self.table, distinct)
        values, found = _train(self.table, distinct, self._record_of(mentions))
        if not torch.is_grad_enabled():
            return places, values
        if found.all():
            self.pending.watch(values, distinct)
            return places, values
        # Ids that the table does not admit yet get zeros, and no gradient.
        kept = sent(torch.from_numpy(np.flatnonzero(found)), values.device)
        trained = values[kept]
        self.pending.watch(trained, distinct[found])
        return places, values.index_copy(0, kept, trained)

    def _record_of(self, mentions: I64) -> RecordRows | None:
        """Return what records the step and the mentions of the ids of a batch."""
        step, count_column = self.step, self._count_column
        step_column = None if step is None else self._step_column
        if step_column is None and count_column is None:
            return None

        def record(values: RowValues) -> None:
            if step is not None and step_column is not None:
                values[step_column] = step
            if count_column is not None:
                values[count_column] += sent(torch.from_numpy(mentions), self.table.device)

        return record


class HashEmbeddingBag(HashEmbedding):
    """Sums, means or maxima of rows per bag, like nn.EmbeddingBag without a size.

    In eval an unseen id counts as a zero row.
    """

    def __init__(
        self,
        table: TrainableTable | int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        name: str = "embedding",
        optimizer_slots: Mapping[str, SlotSpec] | None = None,
        initializer: Initializer = None,
        step_column: str | None = None,
    ) -> None:
        if mode not in BAG_MODES:
            raise must_be("mode of HashEmbeddingBag", BAG_MODES, mode)
        super().__init__(
            table, name=name, optimizer_slots=optimizer_slots, initializer=initializer, step_column=step_column
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    @uncompiled
    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return one row per bag, `[bags, dim]`.

        ids is int64 `[bags, ids per bag]`, or `[n]` with offsets, int64: where each bag begins. per_sample_weights,
        in the shape of ids, only with mode "sum". Raises UsageError.
        """
        self._check_bags(ids, offsets, per_sample_weights)
        places, rows = self._distinct_rows(ids)
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )

    def _check_bags(self, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None) -> None:
        what = f"for a bag lookup in table {self.table.name!r}"
        if not isinstance(ids, torch.Tensor) or ids.dim() not in (1, 2):
            found = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids)
            raise must_be(f"ids {what}", "an int64 tensor [n] or [bags, ids per bag]", found)
        if ids.dim() == 2 and offsets is not None:
            raise UsageError(f"offsets {what} make no sense with ids [bags, ids per bag]", found=tuple(offsets.shape))
        if ids.dim() == 1 and (not isinstance(offsets, torch.Tensor) or offsets.dim() != 1):
            offsets_found = tuple(offsets.shape) if isinstance(offsets, torch.Tensor) else type(offsets)
            raise must_be(f"offsets {what}", "an int64 tensor [bags]", offsets_found)
        if offsets is not None and offsets.dtype is not torch.int64:
            raise UsageError(f"offsets {what} have the wrong dtype", found=offsets.dtype, expected=torch.int64)
        if weights is None:
            return
        if self.mode != "sum":
            raise UsageError(f"per_sample_weights {what} need mode 'sum'", found=self.mode)
        if weights.shape != ids.shape:
            shape = tuple(weights.shape)
            raise must_be(f"per_sample_weights {what}", f"of shape {tuple(ids.shape)}", shape)


def _checked_step(step: SupportsIndex, *, table: str) -> int:
    # Older NumPy takes its flags for indices.
    is_bool = isinstance(step, (bool, np.bool_)) or (isinstance(step, torch.Tensor) and step.dtype is torch.bool)
    try:
        number = None if is_bool else operator.index(step)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise must_be(f"step for table {table!r}", "an int64 or None", step)
    return number


def _checked_step_column(table: TrainableTable, name: str | None) -> str | None:
    found = _scalar_column(table, LAST_SEEN_COLUMN if name is None else name)
    if found is not None or name is None:
        return found
    what = f"step column {name!r} of table {table.name!r}"
    raise must_be(what, "an int64 metadata column of row shape ()", table.schema().column(name))


def _scalar_column(table: TrainableTable, name: str) -> str | None:
    """Return `name` if the table has an int64 metadata column of row shape () with this name."""
    column = table.schema().column(name)
    if column is None or column.role is not Role.METADATA or column.dtype is not torch.int64:
        return None
    return name if column.row_shape == () else None


def _read(table: TrainableTable, ids: I64) -> torch.Tensor:
    """Return the rows `[n, dim]` of ids, zeros for those without one."""
    if isinstance(table, TrainedTable):
        return table.read_embedding(ids)
    return _rows_of(table, table.lookup(ids, insert=False).cpu().numpy())


def _train(table: TrainableTable, ids: I64, record: RecordRows | None) -> tuple[torch.Tensor, NDArray[np.bool_]]:
    """Give distinct ids rows, have them recorded, and return them, `[n, dim]`, and which ids have one.

    A table of another kind must keep other threads from moving its rows meanwhile.
    """
    if isinstance(table, TrainedTable):
        return table.train_rows(ids, record)
    rows = table.lookup(ids).cpu().numpy()
    if record is not None:
        table.update(rows, record)
    return _rows_of(table, rows), rows >= 0


def _rows_of(table: TrainableTable, rows: I64) -> torch.Tensor:
    """Return copies of rows, zeros for -1."""
    positions = np.flatnonzero(rows >= 0)
    with torch.no_grad():
        values = table.embedding.index_select(0, sent(torch.from_numpy(rows[positions]), table.device))
    return spread(values, positions, count=rows.size)
