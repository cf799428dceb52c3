"""What one save is asked to do, and the state it works on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.commit.retention import KnownHeads
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.future import SaveFuture
from asyncckpt.engine.lock import Ticket
from asyncckpt.errors import IndeterminateError
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import Node
from asyncckpt.format.values import encode_value
from asyncckpt.model.table import Table
from asyncckpt.options import SaveOptions
from asyncckpt.pipeline.filters import FilterFunction
from asyncckpt.plan.save_plan import CutTable, PlanCache, SavePlan
from asyncckpt.plan.state import FlatState, flatten
from asyncckpt.staging.arena import Arena


@dataclass(frozen=True)
class SaveTarget:
    """Where a Saver saves to and how; the same for all its saves. `protected` are steps that retention must keep."""

    root: CheckpointRoot
    options: SaveOptions
    plans: PlanCache
    tables: Mapping[str, Table]
    filter_func: FilterFunction
    state: Callable[[], Mapping[str, Any]]
    protected: Callable[[], Collection[int]]
    heads: KnownHeads
    in_doubt: list[IndeterminateError] = field(default_factory=list)

    def check_not_in_doubt(self) -> None:
        """After a commit whose durability is unknown nothing more is committed here until the directory is reopened."""
        if self.in_doubt:
            raise IndeterminateError(
                f"an earlier commit of this Saver is in doubt: {self.in_doubt[0].what}",
                resolve=self.in_doubt[0].resolve,
                hint="close this Saver, call resolve(), and open a new one",
            )


@dataclass
class Cut:
    """The live state of one step, frozen: valid until `fence`."""

    flat: FlatState
    tables: list[CutTable]
    fenced: bool = False

    @staticmethod
    def begin(target: SaveTarget) -> Cut:
        """Flatten the dense state and freeze every table."""
        cut = Cut(flat=flatten(target.state()), tables=[])
        try:
            for name, table in target.tables.items():
                schema = table.schema()
                cut.tables.append(CutTable(name=name, table=table, schema=schema, cut=table.begin_cut()))
        except BaseException:
            cut.fence()
            cut.end(ok=False)
            raise
        return cut

    def values(self) -> tuple[Json, ...]:
        return tuple(encode_value(value, owner="of the state") for value in self.flat.values)

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


@dataclass
class SaveJob:
    """One save on its way through the background. `arena` is None for a blocking save, which keeps its cut unfenced."""

    target: SaveTarget
    ticket: Ticket
    future: SaveFuture
    step: int
    plan: SavePlan
    tree: Node
    values: tuple[Json, ...]
    metadata: Json
    cut: Cut
    arena: Arena | None
    fallback: str | None
    begun: float = field(default_factory=time.perf_counter)
    stall_seconds: float = 0.0
