"""Find out whether the other ranks of torch.distributed came too, where nobody has said who saves.

Rank 0 alone may save, or all ranks together, and the code of one rank does not show which. So ranks that open the same
directory count themselves in the default store:

1. A rank counts itself among those that have come to the present round of the directory.
2. When all have come, the round is complete: they save together. The last one begins the next round.
3. A rank that has waited MEETING_S closes the round, in the same counter, so that nobody comes afterwards. The first to
   do so decides, by what it finds there: all have come, or those who have save alone.
4. A rank that comes to a closed round is refused, as long as one that saves alone has the directory open. The last of
   these begins the next round.

Nothing is kept but the last two rounds. Every kind of store, in every version of torch, adds without waiting for a key,
so nothing else is asked of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

import xxhash

from asyncckpt.coordination.channel import Pauses
from asyncckpt.coordination.rank_store import LineBroken, StoreLine, default_store
from asyncckpt.errors import ConflictError, PeerError, Words, warn
from asyncckpt.model.own_rank import rank_in_group
from asyncckpt.model.store_url import Place

T = TypeVar("T")

MEETING_S = 10.0
PAUSE_S_MAX = 0.05
ANSWER_S_MAX = 30.0  # For one answer of the default store, which others use, too, and another host may serve.
CLOSE_S_MAX = 2.0
ROUND = "round"
KEYS = ("came", "complete", "alone", "ended", "over")
_CLOSED = 1 << 32  # Above all numbers of ranks, and below what a counter holds.
SPELLINGS = (
    "RankOptions(process_group=torch.distributed.group.WORLD) says that all ranks save together, "
    "RankOptions(alone=True) that each saves alone"
)
MADE_ALONE = "Make it on every rank, or with options={'ranks': RankOptions(alone=True)} on the one that saves alone"


class Meeting:
    """What one rank knows of the others. is_complete: all came. One that saves alone ends it with its directory."""

    def __init__(self, place: Any, *, rank: int, ranks_count: int) -> None:
        self.rank, self.ranks_count, self.is_complete = rank, ranks_count, False
        self._place, self._line, self._round = place, StoreLine(lambda: place), 0
        self._pid, self._is_alone, self._is_counted = os.getpid(), False, False

    def wait(self, path: Place, *, closes: bool) -> None:
        """Return when all have come, or MEETING_S have passed."""
        until = time.monotonic() + MEETING_S
        pauses = Pauses(pause_s_max=PAUSE_S_MAX)
        try:
            while (came := self._ask(self._come)) > self.ranks_count:
                if self._ask(self._is_held):
                    raise ConflictError(
                        f"this rank has come too late to save into {str(path)!r}: a rank of torch.distributed has "
                        f"waited {MEETING_S:g} s for all of them, and saves alone",
                        found=Words(f"rank {self.rank} of {self.ranks_count}"),
                        hint=SPELLINGS,
                    )
                if not pauses.pause(until):
                    raise self._failed()
            if came == self.ranks_count:
                self._ask(self._complete)
            outcome = self._ask(self._look)
            while outcome is None and pauses.pause(until):
                outcome = self._ask(self._look)
            if outcome is None and closes:
                outcome = self._ask(self._close)
                until = time.monotonic() + ANSWER_S_MAX
                while outcome is None and pauses.pause(until):  # Another rank has closed it, and says the outcome.
                    outcome = self._ask(self._look)
                if outcome is None:
                    raise self._failed()
        except BaseException:
            with suppress(LineBroken):
                self._line.ask(self._take_back)
            raise
        self.is_complete = bool(outcome)
        if closes and not self.is_complete:
            self._is_alone = True
            self._ask(lambda store: store.add(self._key("alone"), 1))

    def end(self) -> None:
        """Let ranks meet here again: this one has given the directory back. Idempotent; does nothing in a child."""
        if self._is_alone and self._pid == os.getpid():
            self._is_alone = False
            with suppress(LineBroken):  # The store is gone, and so is everybody who could come.
                self._line.ask(self._leave).wait(CLOSE_S_MAX)
        self._line.hang_up()

    def _failed(self) -> PeerError:
        """Return why there is no outcome: a rank has left before it was known. Later ranks start over."""
        self._ask(self._begin_next)
        return PeerError("the ranks cannot meet", rank=None, cause="a rank has left while they met")

    def _come(self, store: Any) -> int:
        self._round = store.add(ROUND, 0)
        came = int(store.add(self._key("came"), 1))
        self._is_counted = True
        return came

    def _take_back(self, store: Any) -> None:
        if self._is_counted:
            store.add(self._key("came"), -1)

    def _is_held(self, store: Any) -> bool:
        return bool(store.add(self._key("alone"), 0)) and store.add(ROUND, 0) == self._round

    def _complete(self, store: Any) -> None:
        store.add(self._key("complete"), 1)
        self._begin_next(store)

    def _look(self, store: Any) -> bool | None:
        """Return whether all have come, once that is decided."""
        is_complete, is_alone = store.add(self._key("complete"), 0), store.add(self._key("alone"), 0)
        if store.add(ROUND, 0) > self._round + 1:  # The answers are of keys that may have been removed.
            raise PeerError("the ranks cannot meet", rank=self.rank, cause="this rank was stopped while they met")
        return True if is_complete else False if is_alone else None

    def _close(self, store: Any) -> bool | None:
        closes_count, came = divmod(store.add(self._key("came"), _CLOSED), _CLOSED)
        outcome = self._look(store)
        # All have come if the last of them did before the first of all closed it: it says so.
        return False if outcome is None and closes_count == 1 and came < self.ranks_count else outcome

    def _leave(self, store: Any) -> None:
        if store.add(self._key("ended"), 1) >= store.add(self._key("alone"), 0):
            self._begin_next(store)

    def _begin_next(self, store: Any) -> None:
        if store.add(ROUND, 0) == self._round and store.add(self._key("over"), 1) == 1:
            store.add(ROUND, 1)
            for name in KEYS if self._round else ():
                store.delete_key(f"{self._round - 1}/{name}")

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _ask(self, call: Callable[[Any], T]) -> T:
        cause = f"it has said nothing for {ANSWER_S_MAX:g} s"
        try:
            answer = self._line.ask(call)
            if answer.wait(ANSWER_S_MAX):
                return answer.result()
        except LineBroken as error:
            cause = str(error)
        raise PeerError("the store of torch.distributed does not say who saves", rank=0, cause=cause, hint=SPELLINGS)


def meet(path: Place, *, closes: bool = True, what: str = "Saver") -> Meeting | None:
    """Wait for the other ranks of the default group to open a directory; None where there is no other rank.

    closes: those that have come after MEETING_S save alone. Otherwise others may still come. what: all ranks open.
    Raises ConflictError for a rank that comes too late, PeerError when the store is gone, UsageError in a forked child.
    """
    found = rank_in_group()
    if found is None or found[1] == 1:
        return None
    dist: Any = import_module("torch.distributed")
    name = xxhash.xxh3_128_hexdigest(f"{what} {path}".encode("utf-8", "surrogateescape"))
    place = dist.PrefixStore(f"asyncckpt/met/{name}", default_store())
    meeting = Meeting(place, rank=found[0], ranks_count=found[1])
    try:
        meeting.wait(path, closes=closes)
        if not meeting.is_complete:
            does = f"saves alone. {SPELLINGS}, without this wait" if closes else f"waits for them. {MADE_ALONE}"
            warn(  # Within, for it may be an error.
                f"asyncckpt: not all ranks of torch.distributed have made a {what} of {str(path)!r} within "
                f"{MEETING_S:g} s: rank {found[0]} of {found[1]} {does}"
            )
    except BaseException:
        meeting.end()
        raise
    if meeting.is_complete or not closes:
        meeting.end()
    return meeting
