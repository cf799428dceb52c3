"""The live state of one step, held still while it is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from asyncckpt.engine.ranks.holdings import held_by, is_replicated
from asyncckpt.engine.ranks.replicas import NOTHING_BY_PEERS, ReplicaList, WrittenByPeers
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.errors import closing_beside
from asyncckpt.format.tree import Node
from asyncckpt.model.table import CutVersion, IdsHeld, Table, TableCut, hands_over, is_overlaid, tracks_rows
from asyncckpt.plan.regions import TableRows
from asyncckpt.plan.save_plan import CutTable
from asyncckpt.plan.state import FlatState, flatten


@dataclass
class RankShare:
    """This rank's part of a save of several ranks.

    call      the number of the save
    replicas  what other ranks may hold too
    left_out  what the cut leaves to other ranks; None: it is not known yet what they write, all is captured
    ids_held  what replicated tables hold, also those that are left out
    by_peers  what has been captured all the same, and other ranks write
    """

    ranks: Ranks
    call: int
    replicas: ReplicaList
    left_out: WrittenByPeers | None
    ids_held: dict[str, IdsHeld] = field(default_factory=dict)
    by_peers: WrittenByPeers = NOTHING_BY_PEERS

    @property
    def is_known(self) -> bool:
        return self.left_out is not None


@dataclass
class Cut:
    """The live state of one step, frozen: valid until `fence`.

    versions  of the cuts of all tables that have marks
    share     None of a Saver that saves alone
    """

    flat: FlatState
    tables: list[CutTable]
    versions: Mapping[str, CutVersion] = field(default_factory=dict)
    share: RankShare | None = None
    fenced: bool = False

    @staticmethod
    def begin(
        state: Mapping[str, Any],
        tables: Mapping[str, Table],
        ranks: Ranks | None,
        call: int | None,
        *,
        audit: bool = False,
        like: Node | None = None,
    ) -> Cut:
        """Flatten the dense state and freeze every table, but (unless `audit`) for what other ranks write.

        like: the tree of an earlier save of this state.
        """
        cut = Cut(flat=flatten(state, like), tables=[])
        try:
            left_out = None
            if ranks is not None:
                listed = ranks.replicas.list_of(cut.flat, tables)
                left_out = None if audit else ranks.replicas.by_peers(listed)
                cut.share = RankShare(ranks, -1 if call is None else call, listed, left_out)
            left = frozenset() if left_out is None else left_out.tables
            if tables:  # These are waited for, and what is planned then is the state as it is now.
                cut.flat = cut.flat.held_still()
            for name, table in sorted(tables.items(), key=lambda item: id(item[1])):  # See model/table.py.
                own: TableCut | None = None
                if name not in left:
                    schema, own = table.schema(), table.begin_cut()
                    cut.tables.append(CutTable(name=name, table=table, schema=schema, cut=own))
                if cut.share is not None and is_replicated(table):
                    cut.share.ids_held[name] = held_by(table, own)
            places = {name: place for place, name in enumerate(tables)}
            cut.tables.sort(key=lambda item: places[item.name])
            cut.versions = {item.name: item.cut.version for item in cut.tables if tracks_rows(item.cut)}
        except BaseException as error:
            with closing_beside(error, "giving up the cut raised"):
                cut.give_up()
            raise
        return cut

    @property
    def leaves_by_peers(self) -> frozenset[int]:
        """The leaves that are left to other ranks."""
        left_out = None if self.share is None else self.share.left_out
        return frozenset() if left_out is None else left_out.leaves

    def all_rows(self) -> tuple[TableRows, ...]:
        """Return every table, whole."""
        return tuple(map(TableRows, range(len(self.tables))))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all live tensors: the dense ones, the storage of tables, their cache levels. Before the fence."""
        yield from self.flat.held
        for item in self.tables:
            for column in item.schema.columns:
                yield item.cut.column(column.name)
                cached = item.cut.cached_column(column.name) if is_overlaid(item.cut) else None
                if cached is not None:
                    yield cached

    def fence(self) -> None:
        """Let the live state change from here; nothing of the user's is held any longer."""
        if not self.fenced:
            self.fenced = True
            self.flat = FlatState()
            _call_all([item.cut.fence for item in self.tables])

    def hand_over(self) -> None:
        """Leave the tables to the background, behind an interrupted wait for it."""
        for item in self.tables:
            if hands_over(item.cut):
                item.cut.hand_over()

    def give_up(self) -> None:
        """End without a save."""
        self.end(ok=False)

    def end(self, *, ok: bool) -> None:
        """Fence, if that has not been done, and let every table know how the save ended."""
        try:
            self.fence()
        finally:
            tables, self.tables = self.tables, []
            _call_all([partial(item.cut.end, ok) for item in tables])


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    """Make every call, also if some raise; then raise an error of theirs."""
    with ExitStack() as left:
        for call in reversed(calls):
            left.callback(call)
