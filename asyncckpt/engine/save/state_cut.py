"""The live state of one step, held still while it is captured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.format.strict_json import Json
from asyncckpt.format.values import encode_value
from asyncckpt.model.abilities import is_overlaid, tracks_rows
from asyncckpt.model.table import CutVersion, Table
from asyncckpt.plan.save_plan import CutTable
from asyncckpt.plan.state import FlatState, flatten


@dataclass
class Cut:
    """The live state of one step, frozen: valid until `fence`."""

    flat: FlatState
    tables: list[CutTable]
    fenced: bool = False

    @staticmethod
    def begin(
        state: Mapping[str, Any],
        tables: Mapping[str, Table],
        *,
        leave_out: Callable[[FlatState], Collection[str]] = lambda flat: (),
    ) -> Cut:
        """Flatten the dense state and freeze every table. leave_out: names of tables to leave alone."""
        cut = Cut(flat=flatten(state), tables=[])
        try:
            left_out = leave_out(cut.flat)
            for name, table in tables.items():
                if name in left_out:
                    continue
                schema = table.schema()
                cut.tables.append(CutTable(name=name, table=table, schema=schema, cut=table.begin_cut()))
        except BaseException:
            cut.fence()
            cut.end(ok=False)
            raise
        return cut

    def versions(self) -> dict[str, CutVersion]:
        """The version of every table's cut that has one. Before the fence."""
        return {item.name: item.cut.version for item in self.tables if tracks_rows(item.cut)}

    def values(self) -> tuple[Json, ...]:
        return tuple(encode_value(value, owner="of the state") for value in self.flat.values)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All live tensors: of the dense state, of the storage of tables, of their cache levels. Before the fence."""
        yield from self.flat.held
        for item in self.tables:
            for column in item.schema.columns:
                yield item.cut.column(column.name)
                cached = item.cut.cached_column(column.name) if is_overlaid(item.cut) else None
                if cached is not None:
                    yield cached

    def fence(self) -> None:
        """The live state may change from here; nothing of the user's is held any longer."""
        if not self.fenced:
            self.fenced = True
            self.flat = FlatState()
            for item in self.tables:
                item.cut.fence()

    def end(self, *, ok: bool) -> None:
        """Tell every table how the save ended."""
        tables, self.tables = self.tables, []
        for item in tables:
            item.cut.end(ok)
