"""Compare two open checkpoints, in windows: what is compared does not need to fit into memory.

Tensors whose blocks have the same digests hold the same bits, and are not read. Tables are compared by their ids:

1. The ids of both are read, and those of one are looked up among those of the other.
2. Rows that both take from the same place of the same file are the same: nearly all, for a delta and its base.
3. The other ones are read column by column in windows, except columns whose blocks have the same digests.

In memory are the ids of one table at a time: about 60 bytes for each of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.engine.inspect.stored_values import (
    WINDOW_BYTES,
    NumbersCompared,
    StoredValues,
    bits_of,
    rows_count,
    taken,
)
from asyncckpt.engine.inspect.table_rows import TableRows
from asyncckpt.errors import CorruptError
from asyncckpt.format.composite import Composite, context_value
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.tree import composites, path_name
from asyncckpt.model.block import overlap
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.native import I64, core
from asyncckpt.plan.contents import Contents, StoredDense


@dataclass(frozen=True)
class TensorChange:
    """What became of a tensor.

    before, after   its dtype and shape, "float32 [3, 4]"; None where it is not there
    max_abs         the largest absolute difference of two numbers; None for other shapes or dtypes
    cosine          of the angle between all numbers, before and after; None also if one of both is zero
    """

    before: str | None
    after: str | None
    max_abs: float | None = None
    cosine: float | None = None

    @property
    def kind(self) -> str:
        """`"added"`, `"removed"` or `"changed"`."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"


def compare_tensors(
    first: Contents, first_values: StoredValues, second: Contents, second_values: StoredValues
) -> dict[str, TensorChange]:
    """Return the tensors that differ, by name."""
    changes = {}
    for name in {**first.dense, **second.dense}:
        a, b = first.dense.get(name), second.dense.get(name)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            changes[name] = TensorChange(before=_form(a), after=_form(b))
            continue
        if _digests(a, first_values) == _digests(b, second_values):
            continue
        numbers, differs = NumbersCompared(), False
        for own, other in _pairs(a, first_values, b, second_values):
            differs = differs or not torch.equal(bits_of(own), bits_of(other))
            numbers.add(own, other)
        if differs:
            changes[name] = TensorChange(_form(a), _form(b), numbers.max_abs, numbers.cosine)
    facts = [{path_name(path): node[3] for path, node in composites(each.tree)} for each in (first, second)]
    for name in {**facts[0], **facts[1]}:
        before, after = (each.get(name) for each in facts)
        if before != after:
            changes[name] = TensorChange(_form(before or first.dense.get(name)), _form(after or second.dense.get(name)))
    return changes


def _form(tensor: StoredDense | str | None) -> str | None:
    if isinstance(tensor, str):  # The facts of a composite.
        facts = Composite.of(tensor)
        return f"{facts}, {context_value(facts.context) if facts.module == 'torch' else facts.context}"[:200]
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _digests(tensor: StoredDense, values: StoredValues) -> set[object]:
    specs = ((values.spec(number), values.digest(number)) for number in tensor.blocks)
    return {(spec.begin, spec.shape, str(spec.encoding), digest) for spec, digest in specs}


def _pairs(
    first: StoredDense, first_values: StoredValues, second: StoredDense, second_values: StoredValues
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return all elements of two tensors of one shape, in boxes; each is [rows, ...] at the same place of both."""
    others = [(number, second_values.spec(number)) for number in second.blocks]
    for number in first.blocks:
        spec = first_values.spec(number)
        count, step = rows_count(spec), first_values.window_rows(number)
        for begin in range(0, count, step):
            own = first_values.range(number, begin, min(begin + step, count))
            if not spec.shape:
                yield own, second_values.range(second.blocks[0], 0, 1)
                continue
            place = (spec.begin[0] + begin, *spec.begin[1:])
            for other, other_spec in others:
                shared = overlap(place, own.shape, other_spec.begin, other_spec.shape)
                if shared is None:
                    continue
                top = shared.second_begin[0]
                theirs = second_values.range(other, top, top + shared.shape[0])
                yield (
                    _box(own, shared.first_begin, shared.shape),
                    _box(theirs, (0, *shared.second_begin[1:]), shared.shape),
                )


def _box(values: torch.Tensor, begin: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return values[tuple(slice(low, low + size) for low, size in zip(begin, shape, strict=True))]


WINDOW_ROWS_MAX = 1 << 18


@dataclass(frozen=True)
class ColumnChange:
    """What became of a column in rows that both checkpoints have.

    before, after    dtype and row shape, "float32 [4]"; None where there is no such column
    rows             how many rows differ in it
    max_abs, cosine  of the numbers in these rows, see TensorChange
    """

    before: str | None
    after: str | None
    rows: int = 0
    max_abs: float | None = None
    cosine: float | None = None


@dataclass(frozen=True)
class TableChange:
    """What became of a table.

    rows_before, rows_after  rows of each; None where there is no such table
    added, removed, changed  ids, int64 [n]; changed: of rows in which some column differs
    max_abs                  of each row of `changed` the largest absolute difference of two numbers, float64 [n]; inf
                             where a number became nan, or ceased to be it
    columns                  those that differ
    """

    rows_before: int | None
    rows_after: int | None
    added: I64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    removed: I64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    changed: I64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    max_abs: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    columns: Mapping[str, ColumnChange] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`"added"`, `"removed"` or `"changed"`."""
        return "added" if self.rows_before is None else "removed" if self.rows_after is None else "changed"

    @property
    def is_same(self) -> bool:
        counts = len(self.added) + len(self.removed) + len(self.changed) + len(self.columns)
        return self.rows_before == self.rows_after and not counts


def compare_tables(first: TableRows, second: TableRows) -> TableChange:
    """Compare two tables. CorruptError where one holds an id twice."""
    own, other, is_new = _matched(first.ids, second.ids)
    changed, farthest = np.zeros(len(own), dtype=np.bool_), np.zeros(len(own))
    columns = _other_columns(first, second)
    same_ids = first.digests(ID_COLUMN) == second.digests(ID_COLUMN)
    apart = np.flatnonzero(~_at_same_place(first, second, own, other))
    for name in first.columns:
        if name in columns or name not in second.columns or (same_ids and first.digests(name) == second.digests(name)):
            continue
        numbers, differs, by = _compare_column(name, first, second, own[apart], other[apart])
        if differs.any():
            changed[apart[differs]] = True
            farthest[apart] = np.maximum(farthest[apart], by)
            form = _column_form(first, name)
            columns[name] = ColumnChange(form, form, int(differs.sum()), numbers.max_abs, numbers.cosine)
    is_old = np.ones(len(first.ids), dtype=np.bool_)
    is_old[own] = False
    return TableChange(
        rows_before=len(first.ids),
        rows_after=len(second.ids),
        added=second.ids[is_new],
        removed=first.ids[is_old],
        changed=first.ids[own[changed]],
        max_abs=farthest[changed],
        columns=columns,
    )


def _matched(first: I64, second: I64) -> tuple[I64, I64, NDArray[np.bool_]]:
    """Return the rows of ids that both have, in either, and which rows of the second the first has not."""
    ids = core.id_map(len(second))
    _, new = ids.insert(second)
    if len(new) != len(second) or len(np.unique(first)) != len(first):
        raise CorruptError("a table holds the same id twice")
    found = ids.find(first)
    own = np.flatnonzero(found >= 0)
    number_of = np.empty(ids.rows_end, dtype=np.int64)
    number_of[new] = np.arange(len(new))
    other = number_of[found[own]]
    is_new = np.ones(len(second), dtype=np.bool_)
    is_new[other] = False
    return own, other, is_new


def _at_same_place(first: TableRows, second: TableRows, own: I64, other: I64) -> NDArray[np.bool_]:
    """Return which pairs of rows stand at the same place of the same layer."""
    same = np.zeros(len(own), dtype=np.bool_)
    theirs = {part.origin: part for part in second.parts}
    for part in first.parts:
        twin = theirs.get(part.origin)
        if twin is not None:
            in_own = (own >= part.begin) & (own < part.end)
            at = np.flatnonzero(in_own & (other >= twin.begin) & (other < twin.end))
            same[at] = part.positions(own[at]) == twin.positions(other[at])
    return same


def _compare_column(
    name: str, first: TableRows, second: TableRows, own: I64, other: I64
) -> tuple[NumbersCompared, NDArray[np.bool_], NDArray[np.float64]]:
    """Compare a column in pairs of rows; return which differ, and by how much, all together and each."""
    dtype, shape = first.form(name)
    row_bytes = int(np.prod(shape, dtype=np.int64)) * dtype_by_name(dtype, owner=name).itemsize
    step = max(1, min(WINDOW_ROWS_MAX, WINDOW_BYTES // max(1, row_bytes)))
    numbers = NumbersCompared()
    differs, by = np.zeros(len(own), dtype=np.bool_), np.zeros(len(own))
    for begin in range(0, len(own), step):
        a, b = first.read(name, own[begin : begin + step]), second.read(name, other[begin : begin + step])
        apart = (bits_of(a) != bits_of(b)).any(dim=1)
        differs[begin : begin + step] = apart.numpy()
        if apart.any():
            rows = np.flatnonzero(differs[begin : begin + step])
            by[begin + rows] = numbers.add(taken(a, rows), taken(b, rows))
    return numbers, differs, by


def _other_columns(first: TableRows, second: TableRows) -> dict[str, ColumnChange]:
    """Return the columns that only one has, or that have another dtype or shape."""
    names = dict.fromkeys([*first.columns, *second.columns])
    forms = {name: (_column_form(first, name), _column_form(second, name)) for name in names}
    return {name: ColumnChange(*form) for name, form in forms.items() if form[0] != form[1]}


def _column_form(rows: TableRows, column: str) -> str | None:
    if column not in rows.columns:
        return None
    dtype, shape = rows.form(column)
    return f"{dtype} {list(shape)}" if shape else dtype
