"""Rank 0's second part in a save of all ranks: it decides. A state machine without clock, thread or I/O.

    from        to          on                                     does
    (new)       GATHERING   the call of rank 0
    GATHERING   MAKING      BEGIN of the last rank, all alike      MakeFolder
    GATHERING   ENDED       SKIPPED                                announces that the call is skipped
    MAKING      WRITING     folder_made                            sends ATTEMPT to all
    WRITING     PUBLISHING  PREPARED of the last rank              Publish
    PUBLISHING  ENDED       published                              announces the outcome
    GATHERING,  ENDED       FAILED, a limit passes, ranks differ,  announces that it is aborted, by whom and
    WRITING                 the channel is lost                    why; AbandonAttempt
    MAKING      CLEARING    the same                               announces it; the folder may be there in a moment
    MAKING      ENDED       folder_failed                          announces it
    CLEARING    ENDED       folder_made, folder_failed             AbandonAttempt

It decides once. From PUBLISHING on nothing but the result of Publish decides, for the manifest may be there already.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

from asyncckpt.coordination.actions import AbandonAttempt, Action, MakeFolder, Publish, Send
from asyncckpt.coordination.messages import (
    COORDINATOR,
    Alive,
    AttemptMessage,
    Begin,
    Failed,
    Kind,
    Limits,
    Message,
    Outcome,
    Prepared,
    Skipped,
)
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Json

RANKS_NAMED_MAX = 8


class CoordinatorState(enum.Enum):
    GATHERING = enum.auto()
    MAKING = enum.auto()
    CLEARING = enum.auto()
    WRITING = enum.auto()
    PUBLISHING = enum.auto()
    ENDED = enum.auto()


class Coordinator:
    """The machine of one call. Its inputs return what is to be done; `now` is in seconds, of any origin."""

    def __init__(self, ranks_count: int, limits: Limits, now: float) -> None:
        self.state = CoordinatorState.GATHERING
        self.attempt: Attempt | None = None
        self.outcome: Outcome | None = None
        self._ranks_count = ranks_count
        self._limits = limits
        self._begins: dict[int, Begin] = {}
        self._prepared: dict[int, Prepared] = {}
        self._heard: dict[int, float] = {}
        self._started, self._next_alive = now, now + limits.alive_s

    @property
    def has_ended(self) -> bool:
        return self.state is CoordinatorState.ENDED

    def receive(self, rank: int, message: Message, now: float) -> list[Action]:
        """Take a message of a participant."""
        if not self._is_undecided:
            return []
        self._heard[rank] = now
        match message:
            case Begin() if self.state is CoordinatorState.GATHERING and rank not in self._begins:
                return self._begun(rank, message)
            case Skipped(cause) if self.state is CoordinatorState.GATHERING:
                return self._decide(Outcome("skipped", rank=rank, cause=cause))
            case Failed(cause):
                return self._abort(rank, cause)
            case Prepared(attempt) if self.state is CoordinatorState.WRITING and attempt == self.attempt:
                return self._prepare(rank, message)
            case _:
                return []  # Alive, a repetition, or of another attempt.

    def folder_made(self, attempt: Attempt, notes: Mapping[str, Json]) -> list[Action]:
        """Take the attempt, whose folder is durable. notes: for all ranks."""
        self.attempt = attempt
        if self.state is CoordinatorState.CLEARING:
            return self._clear()
        assert self.state is CoordinatorState.MAKING
        self.state = CoordinatorState.WRITING
        return [Send(None, AttemptMessage(attempt, self._kind(), notes))]

    def folder_failed(self, cause: str, *, rank: int | None = COORDINATOR) -> list[Action]:
        """End without an attempt: its folder could not be made, or (rank None) the ranks contradict each other."""
        actions = self._abort(rank, cause) if self.state is CoordinatorState.MAKING else []
        assert self.state is CoordinatorState.CLEARING
        return [*actions, *self._clear()]

    def published(self, outcome: Outcome) -> list[Action]:
        """Take how Publish ended: committed, aborted (certainly not there) or in doubt. Data stays unless aborted."""
        assert self.state is CoordinatorState.PUBLISHING
        return self._decide(outcome)

    def lost(self, cause: str) -> list[Action]:
        """Abort, for the channel to the others is gone, or what comes through it cannot be read."""
        return self._abort(COORDINATOR, cause) if self._is_undecided else []

    def tick(self, now: float) -> list[Action]:
        """Let time pass; due at `next_tick`."""
        if self.state in (CoordinatorState.CLEARING, CoordinatorState.ENDED):
            return []
        if self._is_undecided:
            overdue = self._overdue(now)
            if overdue is not None:
                return self._abort(*overdue)
        if now >= self._next_alive:
            self._next_alive = now + self._limits.alive_s
            return [Send(None, Alive())]
        return []

    def next_tick(self) -> float:
        """Return when `tick` has something to do, at the latest; infinite when never.

        Silence is looked for as often as life is shown: every look goes through all ranks.
        """
        if self.state in (CoordinatorState.CLEARING, CoordinatorState.ENDED):
            return math.inf
        limits = self._limits
        begin = self._started + limits.begin_s if self.state is CoordinatorState.GATHERING else math.inf
        save = self._started + limits.save_s if self._is_undecided else math.inf
        return min(self._next_alive, begin, save)

    @property
    def _is_undecided(self) -> bool:
        return self.state in (CoordinatorState.GATHERING, CoordinatorState.MAKING, CoordinatorState.WRITING)

    def _begun(self, rank: int, begin: Begin) -> list[Action]:
        if self._begins:
            first = next(iter(self._begins))
            difference = _difference(first, self._begins[first], rank, begin)
            if difference is not None:
                return self._abort(None, difference)
        self._begins[rank] = begin
        if len(self._begins) < self._ranks_count:
            return []
        self.state = CoordinatorState.MAKING
        return [MakeFolder(dict(sorted(self._begins.items())))]

    def _prepare(self, rank: int, message: Prepared) -> list[Action]:
        assert self.attempt is not None
        self._prepared.setdefault(rank, message)
        if len(self._prepared) < self._ranks_count:
            return []
        self.state = CoordinatorState.PUBLISHING
        return [Publish(self.attempt, dict(sorted(self._prepared.items())))]

    def _kind(self) -> Kind:
        """Ranks that hold a whole table may save beside ranks that hold changes; then all together is a delta."""
        return "delta" if any(begin.kind == "delta" for begin in self._begins.values()) else "full"

    def _overdue(self, now: float) -> tuple[int, str] | None:
        """(rank at fault, cause) when a limit has passed."""
        limits = self._limits
        come = self._begins if self.state is CoordinatorState.GATHERING else self._prepared
        waiting = [rank for rank in range(self._ranks_count) if rank not in come]
        if self.state is CoordinatorState.GATHERING and now >= self._started + limits.begin_s:
            cause = f"{_named(waiting)} did not begin this save within {limits.begin_s:g} s of rank 0"
            return waiting[0], cause
        if now >= self._started + limits.save_s:
            cause = f"{_named(waiting)} did not get ready within {limits.save_s:g} s"
            return (waiting[0] if waiting else COORDINATOR), cause
        for rank, heard in self._heard.items():
            if rank != COORDINATOR and rank not in self._prepared and now >= heard + limits.silence_s:
                return rank, f"rank {rank} sent nothing for {limits.silence_s:g} s"
        return None

    def _abort(self, rank: int | None, cause: str) -> list[Action]:
        return self._decide(Outcome("aborted", attempt=self.attempt, rank=rank, cause=cause))

    def _decide(self, outcome: Outcome) -> list[Action]:
        assert self.outcome is None
        self.outcome = outcome
        if self.state is CoordinatorState.MAKING:
            self.state = CoordinatorState.CLEARING  # The folder is on its way; what ends that ends this machine.
            return [Send(None, outcome)]
        return [Send(None, outcome), *self._clear()]

    def _clear(self) -> list[Action]:
        assert self.outcome is not None
        self.state = CoordinatorState.ENDED
        if self.attempt is None or self.outcome.state != "aborted":
            return []
        return [AbandonAttempt(self.attempt)]


def _difference(first: int, expected: Begin, rank: int, found: Begin) -> str | None:
    """Return what two ranks contradict each other in, as a sentence; None when they agree."""
    expected_facts = {"step": str(expected.step), **expected.facts}
    found_facts = {"step": str(found.step), **found.facts}
    for name in sorted(expected_facts.keys() | found_facts.keys()):
        if expected_facts.get(name) != found_facts.get(name):
            values = f"{expected_facts.get(name)!r} on rank {first}, {found_facts.get(name)!r} on rank {rank}"
            return f"ranks {first} and {rank} save together but differ in {name}: {values}"
    return None


def _named(ranks: list[int]) -> str:
    """Ranks for a message, not more than can be read."""
    names = ", ".join(map(str, ranks[:RANKS_NAMED_MAX]))
    more = f" and {len(ranks) - RANKS_NAMED_MAX} more" if len(ranks) > RANKS_NAMED_MAX else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}{more}"
