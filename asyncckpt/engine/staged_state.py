"""The state of a save as row filters see it: tables column by column, wherever their rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from asyncckpt.engine.filtering import Fetch, Filtered, filtered_tables, is_elsewhere
from asyncckpt.engine.job import SaveJob
from asyncckpt.engine.printing import Selections
from asyncckpt.model.block import REMOVED_COLUMN, BlockSpec, TableFacts
from asyncckpt.model.row_runs import positions
from asyncckpt.model.table import Role
from asyncckpt.native import U8
from asyncckpt.pipeline.row_filters import StagedColumn, StagedDense, StagedTable
from asyncckpt.plan.region_files import captured_specs
from asyncckpt.plan.table_rows import NO_IDS, CapturedTable
from asyncckpt.snapshot.capture import as_tensor
from asyncckpt.snapshot.overlay import Overlay, rows_of_cut

Rows = Callable[[int, int], torch.Tensor]


def staged_tables(job: SaveJob, filtered: Filtered, selections: Selections) -> list[StagedTable]:
    """All tables: those in regions, then those of the plan as the user's filter function has left them."""
    tables = []
    for captured in job.staged.tables if job.staged is not None else ():
        if captured.facts.name in job.elsewhere.tables:
            continue
        tables.append(_from_region(job, captured, selections))
    return tables + _from_plan(job, filtered)


def staged_dense(job: SaveJob, filtered: Filtered) -> list[StagedDense]:
    """All blocks of dense tensors."""
    return [
        StagedDense(spec=part.spec, tensor=part.whole)
        for part in _parts(job, filtered)
        if part.spec.role is Role.DENSE and not is_elsewhere(job, part.number)
    ]


# -- tables in regions -------------------------------------------------------------------------------------------------


def _from_region(job: SaveJob, captured: CapturedTable, selections: Selections) -> StagedTable:
    assert job.staged is not None
    image = job.staged.arena.view()
    columns = tuple(
        StagedColumn(spec=spec, rows=partial(_region_rows, image, captured, spec))
        for spec in captured_specs(captured)
        if spec.column != REMOVED_COLUMN
    )
    chosen = selections.rows.get(captured.region.table)
    if chosen is not None:
        facts = replace(captured.facts, whole=False)
        return StagedTable(facts=facts, columns=columns, kept=chosen.positions, removed=chosen.removed)
    removed = NO_IDS
    if captured.region.removed is not None:
        begin = captured.region.removed.offset
        removed = image[begin : begin + 8 * captured.facts.removed_count].view(np.int64)
    return StagedTable(facts=captured.facts, columns=columns, kept=None, removed=removed)


def _region_rows(image: U8, captured: CapturedTable, spec: BlockSpec, begin: int, end: int) -> torch.Tensor:
    region = captured.region.column(str(spec.column))
    raw = image[region.offset + begin * region.row_bytes : region.offset + end * region.row_bytes]
    return as_tensor(raw, replace(spec, shape=(end - begin, *spec.shape[1:])))


# -- tables of the plan ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Block `number` of the plan: its rows [begin, end) by `rows`, all of it by `whole`."""

    number: int
    spec: BlockSpec
    rows: Rows
    whole: Callable[[], torch.Tensor]


def _parts(job: SaveJob, filtered: Filtered) -> list[_Part]:
    fetches = filtered.fetches or [Fetch(job, number) for number in range(len(job.plan.image.blocks))]
    if filtered.blocks is None:
        specs = [placed.spec for placed in job.plan.image.blocks]
        return [_part(job, number, spec, fetches[number]) for number, spec in enumerate(specs)]
    parts = []
    for block in filtered.blocks:
        if block.data is None:
            parts.append(_part(job, block.number, block.spec, fetches[block.number]))
        else:
            data = block.data
            parts.append(_Part(block.number, block.spec, rows=partial(_slice, data), whole=partial(_plain, data)))
    return parts


def _part(job: SaveJob, number: int, spec: BlockSpec, fetch: Fetch) -> _Part:
    if job.staged is not None or fetch.copied is not None or number not in job.plan.columns:
        return _Part(number, spec, rows=lambda begin, end: fetch()[begin:end], whole=fetch)
    table, column = job.plan.columns[number]
    cut = job.cut.tables[table].cut
    overlay = Overlay.of(cut)

    def rows(begin: int, end: int) -> torch.Tensor:
        return rows_of_cut(cut, overlay, column, spec.row_begin + begin, spec.row_begin + end)

    return _Part(number, spec, rows=rows, whole=fetch)


def _from_plan(job: SaveJob, filtered: Filtered) -> list[StagedTable]:
    by_table: dict[str, dict[str, list[_Part]]] = {}
    for part in _parts(job, filtered):
        if part.spec.table is not None and not is_elsewhere(job, part.number):
            by_table.setdefault(part.spec.table, {}).setdefault(str(part.spec.column), []).append(part)
    facts = {item.name: item for item in job.plan.tables}
    if filtered.blocks is not None:
        facts = {item.name: item for item in filtered_tables(job, filtered.blocks)}
    return [_planned_table(job, facts[name], list(columns.values())) for name, columns in by_table.items()]


def _planned_table(job: SaveJob, facts: TableFacts, columns: Sequence[list[_Part]]) -> StagedTable:
    number = job.plan.columns[columns[0][0].number][0]
    chosen, cut = job.choice.tables[number], job.cut.tables[number].cut
    staged = sorted((_column(parts) for parts in columns), key=lambda column: column.spec.role is not Role.ID)
    if chosen.rows is None:
        return StagedTable(facts=facts, columns=tuple(staged), kept=None, removed=NO_IDS)
    kept = positions(cut.runs, chosen.rows)
    facts = replace(facts, whole=False)
    return StagedTable(facts=facts, columns=tuple(staged), kept=kept, removed=chosen.removed)


def _column(parts: Sequence[_Part]) -> StagedColumn:
    """Join the parts of a column."""
    parts = sorted(parts, key=lambda part: part.spec.row_begin)
    first = parts[0].spec
    if not first.is_part:
        return StagedColumn(spec=first, rows=parts[0].rows)
    assert first.whole_shape is not None
    stored = (first.whole_shape[0], *first.stored_shape[1:])
    spec = replace(first, shape=first.whole_shape, stored_shape=stored, row_begin=0, whole_shape=None)
    return StagedColumn(spec=spec, rows=partial(_joined_rows, parts))


def _joined_rows(parts: Sequence[_Part], begin: int, end: int) -> torch.Tensor:
    found = []
    for part in parts:
        first = part.spec.row_begin
        low, high = max(begin, first), min(end, first + part.spec.shape[0])
        if low < high:
            found.append(part.rows(low - first, high - first))
    if len(found) == 1:
        return found[0]
    return torch.cat(found) if found else parts[0].rows(0, 0)


def _plain(data: torch.Tensor) -> torch.Tensor:
    return data.detach().cpu().contiguous()


def _slice(data: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return _plain(data[begin:end])
