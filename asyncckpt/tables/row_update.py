"""One step of a rule on the rows of some ids: found, marked and changed in one hold of the table's lock.

On the host, the native core does it in one pass over gradient, weights, slots and marks, in float32. On other devices,
and where a column is float64, torch does the same operations in the same order (native/row_rules.py). A table of
another kind is asked for its rows, told that they change, and changed by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.native import BFLOAT16, FLOAT16, FLOAT32, I64, U8, FloatRows, RowUpdate, Rule, core, new_values
from asyncckpt.tables.embedding import TrainableTable, rows_on_host
from asyncckpt.tables.row_device import sent
from asyncckpt.tables.stored_table import TrainedTable

KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


@dataclass(frozen=True)
class RuleStep:
    """A rule, its numbers in this step, and the slots of the table that it uses."""

    rule: Rule
    numbers: tuple[float, ...]
    slots: tuple[str, ...]


def update_rows(table: TrainableTable, ids: I64, gradient: torch.Tensor, step: RuleStep) -> None:
    """Update the rows of ids, int64 [n], distinct, by their gradient, `[n, dim]`; pass over ids without a row."""

    def write(rows: I64, marks: tuple[U8, int] | None) -> None:
        columns = [table.embedding, *(table.slot(name) for name in step.slots)]
        if core_takes(columns):
            _update_by_core(columns, rows, gradient.contiguous(), step, marks)
            return
        if marks is not None:
            core.mark(marks[0], rows, marks[1])
        _update_by_torch(columns, rows, gradient, step)

    with torch.no_grad():
        if isinstance(table, TrainedTable):
            table.update_ids(ids, write)
            return
        rows = rows_on_host(table, ids, insert=False)
        # The forward marked them too, but there may have been a cut since.
        table.touch(rows)
        write(rows, None)


def core_takes(columns: Sequence[torch.Tensor]) -> bool:
    """Return whether columns have a type and place that the core updates."""
    return all(column.is_cpu and column.dtype in KINDS and column.is_contiguous() for column in columns)


def _update_by_core(
    columns: Sequence[torch.Tensor], rows: I64, gradient: torch.Tensor, step: RuleStep, marks: tuple[U8, int] | None
) -> None:
    weight, *slots = [_float_rows(column) for column in columns]
    update = RowUpdate(
        rule=step.rule,
        numbers=step.numbers,
        gradient=_float_rows(gradient),
        weight=weight,
        slots=tuple(slots),
        rows_count=min(len(column) for column in columns) if marks is None else len(marks[0]),
        rowwise=_is_rowwise(columns, step),
        marks=None if marks is None else marks[0],
        mark=0 if marks is None else marks[1],
    )
    # As many threads as torch's own operations of the trainer take.
    core.update_rows(update, rows, threads=torch.get_num_threads())


class _Rounded:
    """The operations of torch that the formulas need, each rounded as IEEE 754 says."""

    where = staticmethod(torch.where)
    full_like = staticmethod(torch.full_like)
    ones_like = staticmethod(torch.ones_like)
    hstack = staticmethod(torch.hstack)

    @staticmethod
    def sqrt(values: torch.Tensor) -> torch.Tensor:
        # On the CPU this may be a library's, whose last bit is wrong now and then; that of float64 rounds away.
        if values.is_cpu and values.dtype is torch.float32:
            return values.double().sqrt().float()
        return values.sqrt()


def _update_by_torch(columns: Sequence[torch.Tensor], rows: I64, gradient: torch.Tensor, step: RuleStep) -> None:
    found = np.flatnonzero(rows >= 0)
    if found.size < rows.size:
        rows, gradient = rows[found], gradient[sent(torch.from_numpy(found), gradient.device)]
    dtype = torch.float32
    for column in columns:
        dtype = torch.promote_types(dtype, column.dtype)
    index = sent(torch.from_numpy(rows), columns[0].device)
    values = [column.index_select(0, index).to(dtype) for column in columns]
    numbers = step.numbers if dtype is torch.float64 else [float(np.float32(number)) for number in step.numbers]
    changed = new_values(
        _Rounded,
        step.rule,
        numbers,
        gradient=gradient.to(dtype),
        weight=values[0],
        slots=values[1:],
        rowwise=_is_rowwise(columns, step),
    )
    for column, value in zip(columns, changed, strict=True):
        column.index_copy_(0, index, value.to(column.dtype))


def _float_rows(column: torch.Tensor) -> FloatRows:
    width = column.shape[1] if column.dim() == 2 else 1
    return FloatRows(address=column.data_ptr(), width=width, kind=KINDS[column.dtype])


def _is_rowwise(columns: Sequence[torch.Tensor], step: RuleStep) -> bool:
    return step.rule.has_rowwise and columns[-1].dim() == 1
