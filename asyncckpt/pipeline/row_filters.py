"""Run the row filters of a Saver on the staged state of one save, in the background.

1. Predicates of `keep_rows` choose rows, the same of all columns of a table, window by window.
2. Every column and tensor is cut into blocks, and every block gets its spec and the source of its stored bytes.

Blocks whose stored size is known beforehand (plain, cast, quantized) are made while they are written, window by
window. The others (skip_zero_rows, zstd) are encoded here and held until they are written, because a shard file begins
with the places of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import FILTER_HINT, FilterError, UsageError, one_line
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.encodings import ENCODED_BYTES_MAX, Encoded, StoredAs, Unfit, encode, stored_as
from asyncckpt.model.block import BlockSpec, EncodingStep, TableFacts
from asyncckpt.model.source import RowsSource, SpanSource, as_bytes
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.native import U8
from asyncckpt.options import BLOCK_BYTES_MAX
from asyncckpt.pipeline.filter_rules import KeepRows, RowFilter, check_filters, check_named, row_rules, steps_for
from asyncckpt.pipeline.filter_types import FilteredState, OutBlock, Rows, StagedBlock, StagedTable
from asyncckpt.plan.image import split_rows
from asyncckpt.plan.regions import removed_spec

__all__ = ["RowFilter", "check_filters", "run_row_filters"]

BOOL = NDArray[np.bool_]

WINDOW_BYTES = 64 << 20  # Of all columns, that a predicate sees at once.


def run_row_filters(
    filters: Sequence[RowFilter],
    tables: Sequence[StagedTable],
    dense: Sequence[StagedBlock],
    *,
    enter_state: Callable[[], None] = lambda: None,
) -> FilteredState:
    """Apply the filters. `enter_state` is called before every piece of work, and ends the run by raising.

    Raises FilterError naming filter and table or block; numbers that a cast or quantize cannot take may be found only
    when they are written, and then their source raises it. The sources call what was staged, so that must stay valid
    until all is written.
    """
    columns = [column.spec.name for table in tables for column in table.columns]
    try:
        names = [*columns, *(item.spec.name for item in dense)]
        check_named(filters, tables=[table.facts.name for table in tables], blocks=names)
    except UsageError as error:
        raise FilterError(str(error)) from error
    facts: list[TableFacts] = []
    rows: list[_WrittenRows] = []
    for table in tables:
        enter_state()
        chosen = _keep_rows(table, row_rules(filters, table.facts.name))
        facts.append(_facts(chosen))
        rows += _rows_of_table(chosen)
    rows += [_WrittenRows(item.spec, item.data.rows, (item,)) for item in dense]
    blocks = [block for item in rows for block in item.blocks(filters, enter_state)]
    return FilteredState(tables=tuple(facts), blocks=tuple(blocks))


def _rows_of_table(table: StagedTable) -> Iterator[_WrittenRows]:
    """Yield the columns, and the ids that a delta takes out if there are any."""
    kept, ids = table.kept, table.columns[0]

    def row_name(row: int) -> str:
        position = row if kept is None else int(kept[row])
        return f"the row of id {int(ids.rows(position, position + 1)[0])}"

    for column in table.columns:
        spec = column.spec if kept is None else column.spec.with_rows(len(kept))
        rows = partial(column.chosen_rows, kept)
        yield _WrittenRows(spec, rows, column.blocks, is_all=kept is None, row_name=row_name)
    if len(table.removed):
        spec = removed_spec(ids.spec, len(table.removed))
        removed = torch.from_numpy(table.removed)
        yield _WrittenRows(spec, lambda begin, end: removed[begin:end], (), is_all=False)


@dataclass(frozen=True)
class _WrittenRows:
    """The rows of a column, or of a tensor, that are written; a number without shape is one row.

    spec:     of all of them, as they are; a part of a large tensor keeps its place in it
    staged:   the blocks that hold them
    is_all:   whether these blocks hold no other ones
    row_name: what an error calls a row; None: by its number
    """

    spec: BlockSpec
    rows: Rows
    staged: Sequence[StagedBlock]
    is_all: bool = True
    row_name: Callable[[int], str] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return dtype_by_name(self.spec.dtype, owner=self.spec.name).dtype

    def blocks(self, filters: Sequence[RowFilter], enter_state: Callable[[], None]) -> Iterator[OutBlock]:
        """Yield the blocks in the order of their rows; those that are encoded beforehand hold their bytes.

        Raises FilterError when an encoding cannot take a value.
        """
        spec = self.spec
        wanted = steps_for(filters, spec.name, spec.role, self.dtype, spec.shape, error=FilterError)
        if self.is_all and not wanted:
            yield from (OutBlock(block.spec, block.data.source(), block.replaced) for block in self.staged)
            return
        replaced = any(block.replaced for block in self.staged)
        for part in split_rows(spec, bytes_max=ENCODED_BYTES_MAX if wanted else BLOCK_BYTES_MAX):
            count = part.shape[0] if part.shape else 1
            steps = wanted
            stored = stored_as(self.dtype, part.shape, steps)
            if stored is None:
                enter_state()
                encoded = self._encoded(part, steps, 0, count)
                if any(stored_as(self.dtype, part.shape, (step,)) is None for step in encoded.steps):
                    held = SpanSource(encoded.raw.ctypes.data, encoded.raw)
                    yield OutBlock(_stored_spec(part, encoded.stored, encoded.steps), held, replaced)
                    continue
                # What did not become smaller need not be held.
                steps, stored = encoded.steps, encoded.stored
            stored_spec = _stored_spec(part, stored, steps) if steps else part
            yield OutBlock(stored_spec, self._source(part, stored_spec, count), replaced)

    def _source(self, part: BlockSpec, spec: BlockSpec, count: int) -> RowsSource:
        """Return the bytes of a block whose size is known, made when they are asked for."""
        first = part.row_begin - self.spec.row_begin

        def made(begin: int, end: int) -> U8:
            if spec.encoding:
                return self._encoded(part, spec.encoding, begin, end).raw
            return as_bytes(self.rows(first + begin, first + end))

        return RowsSource(made, row_bytes=max(1, spec.bytes // max(1, count)))

    def _encoded(self, part: BlockSpec, steps: tuple[EncodingStep, ...], begin: int, end: int) -> Encoded:
        first = part.row_begin - self.spec.row_begin
        try:
            return encode(self.rows(first + begin, first + end), steps)
        except Unfit as error:
            kinds, where = " and ".join(step["kind"] for step in steps), ""
            if error.row is not None:
                row = first + begin + error.row
                name = f"row {self.spec.row_begin + row}" if self.row_name is None else self.row_name(row)
                where = f" in {name}"
            raise FilterError(f"block {part.name!r} cannot be stored by {kinds}: {error}{where}") from error


def _stored_spec(part: BlockSpec, stored: StoredAs, steps: tuple[EncodingStep, ...]) -> BlockSpec:
    return replace(
        part,
        stored_dtype=stored.dtype,
        stored_itemsize=stored.itemsize,
        stored_shape=stored.shape,
        encoding=steps,
    )


def _facts(table: StagedTable) -> TableFacts:
    """Return what the manifest says of a table, with the numbers of what is written of it."""
    count = table.columns[0].spec.shape[0] if table.kept is None else len(table.kept)
    return replace(table.facts, rows_count=count, removed_count=len(table.removed))


# -- keep_rows ---------------------------------------------------------------------------------------------------------


def _keep_rows(table: StagedTable, rules: Sequence[KeepRows]) -> StagedTable:
    """Return the table with the rows that all rules keep, and with records of that in its facts.

    In a delta, rows that are not kept are taken out of what the parents hold: their ids join `removed`. FilterError
    when a predicate raises or gives no bool per row.
    """
    if not rules:
        return table
    staged_count = table.columns[0].spec.shape[0]
    count = staged_count if table.kept is None else len(table.kept)
    masks = [np.empty(count, dtype=np.bool_) for _ in rules]
    step = max(1, WINDOW_BYTES // max(1, sum(column.row_bytes for column in table.columns)))
    for begin in range(0, count, step):
        end = min(begin + step, count)
        rows = {str(column.spec.column): column.chosen_rows(table.kept, begin, end) for column in table.columns}
        for rule, mask in zip(rules, masks, strict=True):
            mask[begin:end] = _ask(rule, table.facts.name, rows, end - begin)
    kept_by_all = np.logical_and.reduce(masks)
    records = tuple(
        {"kind": "keep_rows", "name": rule.predicate_name, "kept": int(mask.sum()), "of": count}
        for rule, mask in zip(rules, masks, strict=True)
    )
    return _with_rows(table, kept_by_all, records)


def _with_rows(table: StagedTable, mask: BOOL, records: tuple[dict[str, Any], ...]) -> StagedTable:
    facts = replace(table.facts, filters=(*table.facts.filters, *records))
    if mask.all():
        return replace(table, facts=facts)
    positions = np.arange(len(mask), dtype=np.int64) if table.kept is None else table.kept
    kept, dropped = positions[mask], positions[~mask]
    removed = table.removed
    if not facts.whole:
        ids = table.columns[0]
        assert ids.spec.column == ID_COLUMN
        rows = ids.chosen_rows(dropped, 0, len(dropped))
        removed = np.unique(np.concatenate([removed, rows.numpy()]))
    return replace(table, facts=facts, kept=kept, removed=removed)


class _Copies(Mapping[str, torch.Tensor]):
    """Columns by name, each copied when it is first asked for.

    A predicate that writes to its rows must reach neither the checkpoint nor the arena, which later saves reuse.
    """

    def __init__(self, rows: Mapping[str, torch.Tensor]) -> None:
        self._rows = rows
        self._copied: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._copied:
            self._copied[name] = self._rows[name].clone()
        return self._copied[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _ask(rule: KeepRows, table: str, rows: dict[str, torch.Tensor], count: int) -> BOOL:
    owner = f"filter {rule} of table {table!r}"
    try:
        answer = rule.predicate(_Copies(rows))
        if isinstance(answer, torch.Tensor) and answer.dtype is torch.bool:
            answer = answer.detach().cpu().numpy()
    except BaseException as error:  # On a thread of ours, sys.exit() in a predicate is no exit but an error too.
        raise FilterError(f"{owner} raised {type(error).__name__}: {one_line(error)}", hint=FILTER_HINT) from error
    if not isinstance(answer, torch.Tensor | np.ndarray):
        raise FilterError(f"{owner} returned nonsense", found=type(answer), expected="a bool tensor")
    if isinstance(answer, torch.Tensor) or answer.dtype != np.bool_ or answer.shape != (count,):
        found = (str(answer.dtype), tuple(answer.shape))
        raise FilterError(f"{owner} returned nonsense", found=found, expected=("torch.bool", (count,)))
    return answer
