"""Which rank this is, and its ways to the other ranks: one channel for all saves, and one for agreeing on loads.

Both are opened when first needed, and reopened if torch.distributed was initialised again. Nothing here is a collective
(decision 0015).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncckpt.arguments import check_int, check_type
from asyncckpt.coordination.agreement import GroupAgreement
from asyncckpt.engine.ranks.open_directory import open_ranks
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.errors import UsageError, must_be
from asyncckpt.format import limits
from asyncckpt.model.own_rank import rank_in_group


def which_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world size): those of torch.distributed where it is initialised, else the arguments.

    Raises UsageError: no rank at all, no ints, out of range, or other numbers than torch.distributed says. Source of
    the rule: RecSDK `Saver`.
    """
    of_group = rank_in_group()
    if rank is None and of_group is None:
        raise UsageError("rank is missing", hint="give it, or initialise torch.distributed first")
    own, world = of_group or (rank, 1 if world_size is None else world_size)
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and type(value) is not int:
            raise must_be(name, "an int", value)
    if rank not in (None, own) or world_size not in (None, world):
        what = "rank or world_size is not that of torch.distributed"
        raise UsageError(what, found=(rank, world_size), expected=(own, world), hint="make a new Saver")
    check_int("world_size", world, at_least=1, at_most=limits.RANKS_MAX - 1)
    check_int("rank", own, at_least=0, at_most=world - 1)
    assert own is not None
    return own, world


def which_saver(rank: int | None, world_size: int | None, *, in_turn: bool) -> tuple[int, int | None]:
    """Return what `which_rank` does, and None for a world size that nobody has said: the tables will say it.

    in_turn: the ranks are Savers of this one process, so torch.distributed must not say otherwise.
    """
    check_type("in_turn", in_turn, bool)
    if in_turn and rank_in_group() is not None:
        raise UsageError("ranks in turn are Savers of one process, and torch.distributed is initialised")
    if rank is None or world_size is not None or rank_in_group() is not None:
        return which_rank(rank, world_size)
    check_int("rank", rank, at_least=0, at_most=limits.RANKS_MAX - 2)
    return rank, None


class Peers:
    """The other ranks of one Saver, where torch.distributed connects them. All ranks make the same calls, in order."""

    def __init__(self, rank: int, world_size: int | None, *, deadline_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._deadline_s = deadline_s
        self._agreement = GroupAgreement(deadline=deadline_s)
        self._loads_count = 0
        self._ranks: Ranks | None = None
        self._opened_for: Any = None

    def for_saving(self, *, before_reopening: Callable[[], None]) -> Ranks | None:
        """Return the ranks that save together; None for one rank, and where files must do without torch.distributed.

        before_reopening: ends what uses the earlier channel. Raises PeerError when they do not find each other,
        UsageError when torch.distributed was initialised with other ranks.
        """
        if not self._are_connected():
            return None
        world = torch.distributed.group.WORLD
        if self._ranks is None or self._opened_for is not world:
            before_reopening()
            self._close_ranks()
            self._ranks, self._opened_for = open_ranks(None, peer_deadline_s=self._deadline_s), world
        return self._ranks

    def agree_on_load(self, what: str, error: BaseException | None, *, result: str = "") -> None:
        """Return when all ranks have come so far, with equal results.

        Raises error, or PeerError when another rank has failed, or has found another result.
        """
        agreement = self._agreement.get() if self._are_connected() else None
        if agreement is not None:
            call, self._loads_count = self._loads_count, self._loads_count + 1
            agreement.is_done(call, what, ended=True, error=error, blocking=True, result=result)
        elif error is not None:
            raise error

    def close(self) -> None:
        """End both channels."""
        self._close_ranks()
        self._agreement.close()

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.wait_announced()
            self._ranks.channel.close()
            self._ranks = None

    def _are_connected(self) -> bool:
        if self._world_size in (None, 1) or rank_in_group() is None:
            return False
        which_rank(self._rank, self._world_size)
        return True
