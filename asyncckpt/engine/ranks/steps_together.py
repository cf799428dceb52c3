"""What ranks say to each other beside their saves: which step all of them restore, and behind which all of them stop.

Both are left on the channel under a call that is never forgotten.

To stop: all ranks count their steps alike, and one that is asked to stop in step n leaves the word that all stop in
step n + 1. In synchronous training no rank ends that step before this one has begun it, behind its word, so all find
the word there and none has passed it. Ranks that are asked in the same step say the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from asyncckpt.coordination.messages import cause_of
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.errors import ConflictError, DeadlineError, PeerError
from asyncckpt.format.strict_json import Fields, Json, dumps, loads
from asyncckpt.options import RESTORE_DEADLINE_S

STANDING = 10**11  # Above the numbers of all calls.
T = TypeVar("T")


class StepsTogether:
    """One rank's part in it; with one rank everything is decided here. All ranks call everything alike."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._steps_count = 0
        self._stops_count = 0
        self._talks_count = 0

    def stop(self, asked: str) -> str:
        """Return why all ranks stop behind the step that has just ended, "" if they do not. asked: why this rank would.

        PeerError when rank 0 is gone.
        """
        ranks = self._ranks
        if ranks is None:
            return asked
        self._steps_count += 1
        name = f"stop/{self._stops_count}"
        found = self._find(ranks, name)
        if found is None and asked:
            with contextlib.suppress(ConflictError):  # Another rank has just said it.
                ranks.channel.put(STANDING, name, dumps({"step": self._steps_count + 1, "why": asked}))
            found = self._find(ranks, name)  # Now it is there, for all ranks.
        if found is None or found.integer("step") > self._steps_count:
            return ""
        self._stops_count += 1
        return found.text("why")

    def decided(self, decide: Callable[[], Json]) -> Json:
        """Return what rank 0 decides; PeerError on the others where that has failed."""
        return self._by_rank_0(self._next_name(), decide, "rank 0 cannot restore")

    def all_done(self, work: Callable[[], T]) -> T:
        """Do this rank's part and return when all ranks have done theirs; PeerError when another one has failed."""
        ranks = self._ranks
        if ranks is None:
            return work()
        name = self._next_name()
        try:
            result = work()
        except BaseException as error:
            ranks.channel.put(STANDING, f"{name}/{ranks.rank}", cause_of(error).encode())
            if ranks.is_coordinator:
                ranks.channel.put(STANDING, name, dumps({"rank": 0, "cause": cause_of(error)}))
            raise
        ranks.channel.put(STANDING, f"{name}/{ranks.rank}", b"")
        self._by_rank_0(name, lambda: self._check_others(ranks, name), "a rank has not restored its part")
        return result

    def _check_others(self, ranks: Ranks, name: str) -> Json:
        for rank in range(1, ranks.ranks_count):
            cause = self._get(ranks, f"{name}/{rank}", rank).decode()
            if cause:
                raise PeerError(f"rank {rank} cannot restore", rank=rank, cause=cause)
        return None

    def _by_rank_0(self, name: str, decide: Callable[[], Json], what: str) -> Json:
        ranks = self._ranks
        if ranks is None:
            return decide()
        if ranks.is_coordinator:
            try:
                decision = decide()
            except BaseException as error:
                rank = error.rank if isinstance(error, PeerError) else 0
                ranks.channel.put(STANDING, name, dumps({"rank": rank, "cause": cause_of(error)}))
                raise
            ranks.channel.put(STANDING, name, dumps({"decision": decision}))
            return decision
        answer = _fields(self._get(ranks, name, 0))
        cause = answer.optional_text("cause")
        if cause is not None:
            raise PeerError(what, rank=answer.optional_integer("rank"), cause=cause)
        return answer.value("decision")

    def _get(self, ranks: Ranks, name: str, rank: int) -> bytes:
        try:
            return ranks.channel.get(STANDING, name, RESTORE_DEADLINE_S)
        except DeadlineError as error:
            raise PeerError("no word about what is restored", rank=rank, cause=str(error)) from error

    def _find(self, ranks: Ranks, name: str) -> Fields | None:
        raw = ranks.channel.find(STANDING, name, ranks.limits.silence_s)
        return None if raw is None else _fields(raw)

    def _next_name(self) -> str:
        self._talks_count += 1
        return f"restore/{self._talks_count}"


def _fields(raw: bytes) -> Fields:
    owner = "what ranks say about a step"
    return Fields(loads(raw, owner=owner), owner=owner, where="message")
