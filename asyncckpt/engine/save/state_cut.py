"""The live state of one step, held still while it is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.errors import closing_beside
from asyncckpt.format.tree import Node
from asyncckpt.model.table import CutVersion, Table, TableCut, hands_over, is_overlaid, tracks_rows
from asyncckpt.plan.save_plan import CutTable
from asyncckpt.plan.state import FlatState, flatten


@dataclass(frozen=True)
class ByPeers:
    """What other ranks write: numbers of leaves, and names of tables."""

    leaves: frozenset[int] = frozenset()
    tables: frozenset[str] = frozenset()


NOTHING_BY_PEERS = ByPeers()


@dataclass
class Cut:
    """The live state of one step, frozen: valid until `fence`.

    versions   of the cuts of all tables that have marks
    left_out   what other ranks write, and is not captured
    undecided  tables of which it is not known yet which rank writes them
    open_ids   tables of which other ranks may hold the same ids, as is found out before anything is written
    share      what the ranks of a save note of their cut; None of a Saver that saves alone
    """

    flat: FlatState = field(default_factory=FlatState)
    tables: list[CutTable] = field(default_factory=list)
    versions: Mapping[str, CutVersion] = field(default_factory=dict)
    left_out: ByPeers = NOTHING_BY_PEERS
    undecided: frozenset[str] = frozenset()
    open_ids: frozenset[str] = frozenset()
    share: object = None
    fenced: bool = False

    @staticmethod
    def begin(
        state: Mapping[str, Any],
        tables: Mapping[str, Table],
        features: Sequence[SaveFeature] = (),
        *,
        call: int | None = None,
        like: Node | None = None,
    ) -> Cut:
        """Flatten the dense state and freeze every table, except what features leave out.

        like: the tree of an earlier save of this state. call: see SaveFeature.flattened.
        """
        cut = Cut(flat=flatten(state, like))
        try:
            for feature in features:
                feature.flattened(cut, tables, call)
            if tables:  # These are waited for, and what is planned then is the state as it is now.
                cut.flat = cut.flat.held_still()
                cut._freeze(tables)
            for feature in features:
                feature.frozen(cut)
        except BaseException as error:
            with closing_beside(error, "giving up the cut raised"):
                cut.end(ok=False)
            raise
        return cut

    def _freeze(self, tables: Mapping[str, Table]) -> None:
        for name, table in sorted(tables.items(), key=lambda item: id(item[1])):  # See model/table.py.
            if name not in self.left_out.tables:
                schema, own = table.schema(), table.begin_cut()
                self.tables.append(CutTable(name=name, table=table, schema=schema, cut=own))
        places = {name: place for place, name in enumerate(tables)}
        self.tables.sort(key=lambda item: places[item.name])
        self.versions = {item.name: item.cut.version for item in self.tables if tracks_rows(item.cut)}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all live tensors: the dense ones, the storage of tables, their cache levels. Before the fence."""
        yield from self.flat.held
        for item in self.tables:
            for column in item.schema.columns:
                yield from levels_of(item.cut, column.name)

    def fence(self) -> None:
        """Let the live state change from here; nothing of the user's is held any longer."""
        if not self.fenced:
            self.fenced = True
            self.flat = FlatState()
            _call_all([item.cut.fence for item in self.tables])

    def hand_over(self) -> None:
        """Leave the tables to the background, after an interrupted wait for it."""
        for item in self.tables:
            if hands_over(item.cut):
                item.cut.hand_over()

    def end(self, *, ok: bool) -> None:
        """Fence, if that has not been done, and let every table know how the save ended."""
        try:
            self.fence()
        finally:
            tables, self.tables = self.tables, []
            _call_all([partial(item.cut.end, ok) for item in tables])


def levels_of(cut: TableCut, column: str) -> Iterator[torch.Tensor]:
    """Yield a column of the storage of a table, and that of its cache level where there is one."""
    yield cut.column(column)
    cached = cut.cached_column(column) if is_overlaid(cut) else None
    if cached is not None:
        yield cached


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    """Make every call, also if some raise; then raise an error of theirs."""
    if not calls:
        return
    with ExitStack() as left:
        for call in reversed(calls):
            left.callback(call)
