"""One step of a rule on the rows of some ids: found, changed and marked in one hold of the table's lock.

Where all columns are plain memory of the host, the native core does it in one pass over gradient, weights, slots and
marks, in float32. For other devices, float64 columns and tables of another kind, torch does the same operations in the
same order (native/row_rules.py) on what `table.rows` hands out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from asyncckpt.native import BFLOAT16, FLOAT16, FLOAT32, I64, U8, FloatRows, RowUpdate, Rule, core, new_values
from asyncckpt.tables.embedding import TrainableTable
from asyncckpt.tables.row_values import RowValues
from asyncckpt.tables.slots import EMBEDDING_COLUMN
from asyncckpt.tables.trained_table import TrainedTable

KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


@dataclass(frozen=True)
class RuleStep:
    """A rule, its numbers in this step, and the slots of the table that it uses."""

    rule: Rule
    numbers: tuple[float, ...]
    slots: tuple[str, ...]


def update_rows(table: TrainableTable, ids: I64, gradient: torch.Tensor, step: RuleStep) -> None:
    """Update the rows of ids, int64 [n], distinct, by their gradient, `[n, dim]`; pass over ids without a row."""
    names = (EMBEDDING_COLUMN, *step.slots)
    with torch.no_grad():
        if isinstance(table, TrainedTable) and core_takes(table, names):
            table.update_in_memory(ids, partial(_update_by_core, names, gradient.contiguous(), step))
            return
        with table.rows(ids) as rows:
            _update_by_torch(rows, names, gradient, step)


def core_takes(table: TrainedTable, names: Sequence[str]) -> bool:
    """Return whether columns of a table have a type and place that the core updates."""
    return table.is_on_host and all(column.dtype in KINDS for column in table.schema().columns if column.name in names)


def _update_by_core(
    names: Sequence[str],
    gradient: torch.Tensor,
    step: RuleStep,
    all_columns: Mapping[str, torch.Tensor],
    rows: I64,
    marks: tuple[U8, int] | None,
) -> None:
    columns = [all_columns[name] for name in names]
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


def _update_by_torch(rows: RowValues, names: Sequence[str], gradient: torch.Tensor, step: RuleStep) -> None:
    columns = [rows[name] for name in names]
    dtype = torch.float32
    for column in columns:
        dtype = torch.promote_types(dtype, column.dtype)
    numbers = step.numbers if dtype is torch.float64 else [float(np.float32(number)) for number in step.numbers]
    weight, *slots = [column.to(dtype) for column in columns]
    changed = new_values(
        _Rounded,
        step.rule,
        numbers,
        gradient=gradient.to(dtype),
        weight=weight,
        slots=slots,
        rowwise=_is_rowwise(columns, step),
    )
    for name, column, value in zip(names, columns, changed, strict=True):
        rows[name] = value.to(column.dtype)


def _float_rows(column: torch.Tensor) -> FloatRows:
    width = column.shape[1] if column.dim() == 2 else 1
    return FloatRows(address=column.data_ptr(), width=width, kind=KINDS[column.dtype])


def _is_rowwise(columns: Sequence[torch.Tensor], step: RuleStep) -> bool:
    return step.rule.has_rowwise and columns[-1].dim() == 1
