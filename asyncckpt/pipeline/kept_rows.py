"""Ask the predicates of `keep_rows` which rows of a table to keep, window by window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import FilterError
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.pipeline.filter_rules import KeepRows
from asyncckpt.pipeline.filter_types import StagedTable

BOOL = NDArray[np.bool_]

WINDOW_BYTES = 64 << 20


def keep_rows(table: StagedTable, rules: Sequence[KeepRows]) -> StagedTable:
    """The table with the rows that all rules keep, and with records of that in its facts.

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

    A predicate that writes to its rows must reach neither the checkpoint nor the arena, which later saves build upon.
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
    except BaseException as error:  # On a thread of ours, sys.exit() in a predicate is no exit but an error too.
        raise FilterError(f"{owner} raised {type(error).__name__}: {error}") from error
    if isinstance(answer, torch.Tensor):
        found = (str(answer.dtype), tuple(answer.shape))
        answer = answer.detach().cpu().numpy() if answer.dtype is torch.bool else None
    elif isinstance(answer, np.ndarray):
        found = (str(answer.dtype), answer.shape)
    else:
        raise FilterError(f"{owner} returned nonsense", found=type(answer).__name__, expected="a bool tensor")
    if answer is None or answer.dtype != np.bool_ or answer.shape != (count,):
        raise FilterError(f"{owner} returned nonsense", found=found, expected=("torch.bool", (count,)))
    return np.asarray(answer, dtype=np.bool_)
