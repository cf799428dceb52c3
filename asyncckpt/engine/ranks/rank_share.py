"""This rank's part of a save of several ranks, as a feature of its Saver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncckpt.engine.features.chosen_blocks import write_chosen
from asyncckpt.engine.ranks.holdings import held_by, is_replicated, is_whole, slice_of
from asyncckpt.engine.ranks.replicas import NOTHING_WRITTEN, ReplicaList, WrittenByPeers
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.engine.save.state_cut import NOTHING_BY_PEERS, Cut
from asyncckpt.model.table import IdsHeld, Table
from asyncckpt.plan.leaf_memory import check_leaves


@dataclass
class RankShare:
    """This rank's part of one save.

    call      the number of the save
    replicas  what other ranks may hold too
    left_out  what the cut leaves to other ranks; None: it is not known yet what they write, all is captured
    ids_held  what replicated tables hold, also those that are left out
    by_peers  what has been captured all the same, and other ranks write
    """

    ranks: Ranks
    call: int
    tables: Mapping[str, Table]
    replicas: ReplicaList
    left_out: WrittenByPeers | None
    ids_held: dict[str, IdsHeld] = field(default_factory=dict)
    by_peers: WrittenByPeers = NOTHING_WRITTEN

    @property
    def is_known(self) -> bool:
        return self.left_out is not None

    def take(self, job: SaveJob, by_peers: WrittenByPeers) -> None:
        """Leave to other ranks what they write of all that was captured."""
        self.by_peers = by_peers
        job.by_peers = by_peers or NOTHING_BY_PEERS


def share_of(job: SaveJob) -> RankShare:
    assert isinstance(job.cut.share, RankShare)
    return job.cut.share


class SharesWithRanks(SaveFeature):
    """What a Saver of several ranks does at each save. audit: each rank captures all that it holds."""

    def __init__(self, ranks: Ranks, *, audit: bool) -> None:
        self._ranks, self._audit = ranks, audit

    def begin(self, job: SaveJob) -> None:
        from asyncckpt.engine.ranks.in_turn import save_in_turn
        from asyncckpt.engine.ranks.rank_save import save_with_ranks

        job.write = write_chosen
        job.commit = save_in_turn if self._ranks.in_turn else save_with_ranks

    def flattened(self, cut: Cut, tables: Mapping[str, Table], call: int | None) -> None:
        try:
            listed = self._ranks.replicas.list_of(cut.flat, tables)
        except RuntimeError:  # A tensor has no sizes.
            check_leaves(cut.flat)
            raise
        left_out = None if self._audit else self._ranks.replicas.by_peers(listed)
        cut.share = RankShare(self._ranks, -1 if call is None else call, tables, listed, left_out)
        if left_out is not None:
            cut.left_out = left_out
            return
        cut.undecided = frozenset(name for name, table in tables.items() if is_whole(table))
        # The ids of tables with a rule of their own are compared before anything is written.
        parts = ((name, table) for name, table in tables.items() if name not in cut.undecided)
        cut.open_ids = frozenset(name for name, table in parts if not slice_of(table).is_known)

    def frozen(self, cut: Cut) -> None:
        assert isinstance(cut.share, RankShare)
        cuts = {item.name: item.cut for item in cut.tables}
        for name, table in cut.share.tables.items():
            if is_replicated(table):
                cut.share.ids_held[name] = held_by(table, cuts.get(name))

    def skipped(self, call: int | None) -> None:
        assert call is not None
        self._ranks.announce_skipped(call)
