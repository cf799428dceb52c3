"""One rank's part in a save of all ranks: a state machine without clock, thread or I/O.

    from      to        on                                         does
    (new)     CALLED    start                                      sends BEGIN
    (new)     ENDED     start of a call that it skips or failed    sends SKIPPED or FAILED
    CALLED    WRITING   ATTEMPT                                    Write
    WRITING   PREPARED  wrote                                      sends PREPARED
    WRITING   ENDED     write_failed                               sends FAILED: aborted by this rank
    CALLED,   ENDED     a limit passes, the channel is lost        sends FAILED: aborted by rank 0
    WRITING
    PREPARED  LOOKING   a limit passes, the channel is lost        Look
    LOOKING   ENDED     looked                                     committed if found, else in doubt
    any       ENDED     OUTCOME of its attempt                     that outcome

What it must never do: say PREPARED for an attempt that was not sent to it, or after it has ended; conclude by itself,
after PREPARED may have been heard, that the save was aborted.

That is the participant. Rank 0 has the coordinator beside it; the two talk by the same messages as everybody. Every
input of either machine returns actions; `hand_over` takes out of these what one of the two says to the other. What is
left for the driver are messages to other ranks, effects, and the end.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping

from asyncckpt.coordination.actions import Action, Look, Send, Write
from asyncckpt.coordination.coordinator import Coordinator
from asyncckpt.coordination.messages import (
    COORDINATOR,
    Alive,
    AttemptMessage,
    Begin,
    Failed,
    Limits,
    Message,
    Outcome,
    Prepared,
    Skipped,
)
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Json


class ParticipantState(enum.Enum):
    CALLED = enum.auto()
    WRITING = enum.auto()
    PREPARED = enum.auto()
    LOOKING = enum.auto()
    ENDED = enum.auto()


class Participant:
    """The machine of one rank and call. Every input returns what is to be done; `now` is in seconds, of any origin."""

    def __init__(self, rank: int, begin: Begin | Skipped | Failed, limits: Limits, now: float) -> None:
        self.rank = rank
        self.state = ParticipantState.CALLED
        self.attempt: Attempt | None = None
        self.outcome: Outcome | None = None
        self._begin = begin
        self._limits = limits
        self._started, self._next_alive = now, now + limits.alive_s
        self._heard: float | None = None
        self._doubt = ""

    @property
    def has_ended(self) -> bool:
        return self.state is ParticipantState.ENDED

    def start(self) -> list[Action]:
        """Call once, first."""
        match self._begin:
            case Skipped(cause):
                self._end(Outcome("skipped", rank=self.rank, cause=cause))
            case Failed(cause):
                self._end(Outcome("aborted", rank=self.rank, cause=cause))
        return [Send(COORDINATOR, self._begin)]

    def receive(self, message: Message, now: float) -> list[Action]:
        """Take a message of the coordinator."""
        self._heard = now
        match message:
            case AttemptMessage(attempt) if self.state is ParticipantState.CALLED:
                self.state, self.attempt = ParticipantState.WRITING, attempt
                return [Write(message)]
            case Outcome() if self._concerns(message):
                return self._end(message)
            case _:
                return []  # Alive, a repetition, or of another attempt.

    def wrote(self, notes: Mapping[str, Json]) -> list[Action]:
        """Get prepared: the files are written and synced, and the part is left for who assembles the manifest."""
        if self.state is not ParticipantState.WRITING:
            return []
        assert self.attempt is not None
        self.state = ParticipantState.PREPARED
        return [Send(COORDINATOR, Prepared(self.attempt, notes))]

    def write_failed(self, cause: str) -> list[Action]:
        """Give up, for an error of this rank before it was prepared."""
        if self.state not in (ParticipantState.CALLED, ParticipantState.WRITING):
            return []
        return self._give_up(cause, rank=self.rank)

    def lost(self, cause: str) -> list[Action]:
        """Give up or look, for the channel to the coordinator is gone, or what comes through it cannot be read."""
        if self.state in (ParticipantState.CALLED, ParticipantState.WRITING):
            return self._give_up(cause, rank=COORDINATOR)
        if self.state is ParticipantState.PREPARED:
            assert self.attempt is not None
            self.state, self._doubt = ParticipantState.LOOKING, cause
            return [Look(self.attempt)]
        return []

    def looked(self, found: bool) -> list[Action]:
        """Take whether the manifest is there, durably; else it is not there yet, or could not be looked for."""
        if self.state is not ParticipantState.LOOKING:
            return []
        if found:
            return self._end(Outcome("committed", attempt=self.attempt))
        return self._end(Outcome("in_doubt", attempt=self.attempt, rank=COORDINATOR, cause=self._doubt))

    def tick(self, now: float) -> list[Action]:
        """Let time pass; due at `next_tick`."""
        if self.state in (ParticipantState.LOOKING, ParticipantState.ENDED):
            return []
        overdue = next((cause for when, cause in self._deadlines() if now >= when), None)
        if overdue is not None:
            return self.lost(overdue)
        if self.state is not ParticipantState.PREPARED and now >= self._next_alive:
            self._next_alive = now + self._limits.alive_s
            return [Send(COORDINATOR, Alive())]
        return []

    def next_tick(self) -> float:
        """Return when `tick` has something to do, at the latest; infinite when never."""
        if self.state in (ParticipantState.LOOKING, ParticipantState.ENDED):
            return math.inf
        alive = math.inf if self.state is ParticipantState.PREPARED else self._next_alive
        return min(alive, *(when for when, _ in self._deadlines()))

    def _deadlines(self) -> list[tuple[float, str]]:
        limits = self._limits
        if self._heard is None:
            first = (self._started + limits.begin_s, f"rank 0 did not begin this save within {limits.begin_s:g} s")
        else:
            first = (self._heard + limits.silence_s, f"rank 0 sent nothing for {limits.silence_s:g} s")
        whole_s = limits.begin_s + limits.save_s
        return [first, (self._started + whole_s, f"rank 0 sent no outcome within {whole_s:g} s")]

    def _concerns(self, outcome: Outcome) -> bool:
        """Return whether an outcome is of this attempt. Without one, nothing of this rank can have been committed."""
        if self.state is ParticipantState.CALLED:
            return outcome.state in ("aborted", "skipped")
        return not self.has_ended and outcome.attempt == self.attempt

    def _give_up(self, cause: str, *, rank: int) -> list[Action]:
        """End without having been prepared, so nobody can commit without hearing of it or waiting in vain."""
        self._end(Outcome("aborted", attempt=self.attempt, rank=rank, cause=cause))
        return [Send(COORDINATOR, Failed(cause))]

    def _end(self, outcome: Outcome) -> list[Action]:
        """End; nothing is left to do."""
        self.state, self.outcome = ParticipantState.ENDED, outcome
        return []


class RankMachine:
    """What a rank does in one call. Sends that `hand_over` leaves go to other ranks only; `None` means all of them."""

    def __init__(
        self, rank: int, ranks_count: int, begin: Begin | Skipped | Failed, limits: Limits, now: float
    ) -> None:
        self._ranks_count = ranks_count
        self.participant = Participant(rank, begin, limits, now)
        # It keeps all limits of rank 0: beside it, a participant has nothing to wait for.
        self._coordinator = Coordinator(ranks_count, limits, now) if rank == COORDINATOR else None

    @property
    def coordinator(self) -> Coordinator:
        """The one of rank 0, the only one that is asked for it."""
        assert self._coordinator is not None
        return self._coordinator

    @property
    def has_ended(self) -> bool:
        return self.participant.has_ended and (self._coordinator is None or self._coordinator.has_ended)

    @property
    def outcome(self) -> Outcome:
        """How the call ended for this rank, once it has."""
        assert self.participant.outcome is not None
        return self.participant.outcome

    def receive(self, sender: int, message: Message, now: float) -> list[Action]:
        """Take a message of another rank; one that this rank cannot have got is ignored."""
        if self._coordinator is not None:
            is_other = COORDINATOR < sender < self._ranks_count
            return self._coordinator.receive(sender, message, now) if is_other else []
        return self.participant.receive(message, now) if sender == COORDINATOR else []

    def lost(self, cause: str) -> list[Action]:
        """Let the machine know that the channel is gone, or that what comes through it cannot be read."""
        return (self._coordinator or self.participant).lost(cause)

    def tick(self, now: float) -> list[Action]:
        return (self._coordinator or self.participant).tick(now)

    def next_tick(self) -> float:
        return (self._coordinator or self.participant).next_tick()

    def hand_over(self, actions: list[Action], now: float) -> list[Action]:
        """Give each machine of rank 0 what the other one says to it, until only what concerns others is left."""
        if self._coordinator is None:
            return actions
        left: list[Action] = []
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            match action:
                case Send(None, message):
                    left.append(action)
                    waiting += self.participant.receive(message, now)
                case Send(_, message):
                    waiting += self._coordinator.receive(COORDINATOR, message, now)
                case _:
                    left.append(action)
        return left
