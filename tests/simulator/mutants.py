"""Machines that are wrong in one way each. The simulator must find every one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from unittest import mock

import asyncckpt.coordination.rank_machine as rank_machine
from asyncckpt.coordination.actions import Action, Publish, Send
from asyncckpt.coordination.coordinator import Coordinator, CoordinatorState
from asyncckpt.coordination.messages import Begin, Failed, Message, Outcome, Prepared, Skipped
from asyncckpt.coordination.rank_machine import Participant, ParticipantState
from asyncckpt.format.strict_json import Json


class CommitsWithoutOne(Coordinator):
    """One PREPARED less is enough."""

    def _prepare(self, rank: int, message: Prepared) -> list[Action]:
        actions = super()._prepare(rank, message)
        if not actions and len(self._prepared) == self._ranks_count - 1:
            assert self.attempt is not None
            self.state = CoordinatorState.PUBLISHING
            return [Publish(self.attempt, dict(self._prepared))]
        return actions


class CountsPreparedOfAnyAttempt(Coordinator):
    """PREPARED counts, whatever it was for."""

    def receive(self, rank: int, message: Message, now: float) -> list[Action]:
        if isinstance(message, Prepared) and self.attempt is not None:
            message = Prepared(self.attempt, message.notes)
        return super().receive(rank, message, now)


class DecidesAgain(Coordinator):
    """A FAILED that comes while it publishes still aborts."""

    def receive(self, rank: int, message: Message, now: float) -> list[Action]:
        if self.state is CoordinatorState.PUBLISHING and isinstance(message, Failed):
            return [Send(None, Outcome("aborted", self.attempt, rank, message.cause))]
        return super().receive(rank, message, now)


class GivesUpWhilePublishing(Coordinator):
    """The limit of a save also ends its publication."""

    def tick(self, now: float) -> list[Action]:
        is_late = now >= self._started + self._limits.silence_s
        if self.state is CoordinatorState.PUBLISHING and self.outcome is None and is_late:
            return self._abort(0, "too slow")
        return super().tick(now)

    def published(self, outcome: Outcome) -> list[Action]:
        return [] if self.outcome is not None else super().published(outcome)


class TakesDoubtForFailure(Coordinator):
    """What may be published is treated as if it were not."""

    def published(self, outcome: Outcome) -> list[Action]:
        if outcome.state == "in_doubt":
            outcome = Outcome("aborted", outcome.attempt, outcome.rank, outcome.cause)
        return super().published(outcome)


class ComparesNothing(Coordinator):
    """Ranks may save different steps."""

    def _begun(self, rank: int, begin: Begin) -> list[Action]:
        first = next(iter(self._begins.values()), begin)
        return super()._begun(rank, Begin(first.step, begin.kind, first.facts, begin.notes))


class SkipsAlone(Coordinator):
    """A rank that skips is taken for one that has begun, and for one that has written."""

    def receive(self, rank: int, message: Message, now: float) -> list[Action]:
        if isinstance(message, Skipped):
            self._ranks_count -= 1
            return []
        return super().receive(rank, message, now)


class WaitsForEver(Coordinator):
    """No limit is kept."""

    def _overdue(self, now: float) -> tuple[int, str] | None:
        return None


class ForgetsTheOthers(Coordinator):
    """What it decides is told to nobody else."""

    def _decide(self, outcome: Outcome) -> list[Action]:
        return [action for action in super()._decide(outcome) if not isinstance(action, Send)] or [
            Send(0, Failed("nobody is told"))
        ]


class AbortsByItself(Participant):
    """After PREPARED, silence is taken for an abort."""

    def lost(self, cause: str) -> list[Action]:
        if self.state is ParticipantState.PREPARED:
            return self._give_up(cause, rank=0)
        return super().lost(cause)


class TakesAbsenceForAbort(Participant):
    """A manifest that is not there yet is taken for one that never comes."""

    def looked(self, found: bool) -> list[Action]:
        if self.state is ParticipantState.LOOKING and not found:
            return self._end(Outcome("aborted", self.attempt, 0, self._doubt))
        return super().looked(found)


class BelievesWithoutLooking(Participant):
    """After PREPARED, silence is taken for a commit."""

    def lost(self, cause: str) -> list[Action]:
        if self.state is ParticipantState.PREPARED:
            return self._end(Outcome("committed", self.attempt))
        return super().lost(cause)


class IsPreparedWithoutFiles(Participant):
    """It says PREPARED although its write failed."""

    def write_failed(self, cause: str) -> list[Action]:
        return self.wrote({})


class IsPreparedAfterTheEnd(Participant):
    """It gives up, and when its files are written after all, says PREPARED."""

    def wrote(self, notes: Mapping[str, Json]) -> list[Action]:
        if self.has_ended and self.attempt is not None:
            return [Send(0, Prepared(self.attempt, notes))]
        return super().wrote(notes)


class BelievesAnyOutcome(Participant):
    """An outcome counts, whatever attempt it is of."""

    def _concerns(self, outcome: Outcome) -> bool:
        return not self.has_ended


class HopesForEver(Participant):
    """It waits for the coordinator without limit."""

    def _deadlines(self) -> list[tuple[float, str]]:
        return [(float("inf"), "")]


MUTANTS: tuple[type[Coordinator] | type[Participant], ...] = (
    CommitsWithoutOne,
    CountsPreparedOfAnyAttempt,
    DecidesAgain,
    GivesUpWhilePublishing,
    TakesDoubtForFailure,
    ComparesNothing,
    SkipsAlone,
    WaitsForEver,
    ForgetsTheOthers,
    AbortsByItself,
    TakesAbsenceForAbort,
    BelievesWithoutLooking,
    IsPreparedWithoutFiles,
    IsPreparedAfterTheEnd,
    BelievesAnyOutcome,
    HopesForEver,
)


@contextlib.contextmanager
def installed(mutant: type[Coordinator] | type[Participant]) -> Iterator[None]:
    """Let every rank run with this machine instead of the right one."""
    name = "Coordinator" if issubclass(mutant, Coordinator) else "Participant"
    with mock.patch.object(rank_machine, name, mutant):
        yield
