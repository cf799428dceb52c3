"""The machines of one rank and call as one: a participant, and on rank 0 the coordinator beside it.

The two on rank 0 talk by the same messages as everybody; they are handed over here, at once. What is left for the
driver are messages to other ranks, effects, and the end. Inputs are those of the two machines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from asyncckpt.coordination.actions import Action, Send
from asyncckpt.coordination.coordinator import AttemptStart, Coordinator
from asyncckpt.coordination.messages import Begin, Failed, Limits, Message, Outcome, Skipped
from asyncckpt.coordination.participant import COORDINATOR, Participant
from asyncckpt.format.strict_json import Json


class RankMachine:
    """What a rank does in one call. Sends that it returns go to other ranks only; `None` means all of them."""

    def __init__(self, rank: int, ranks_count: int, begin: Begin | Skipped | Failed, limits: Limits) -> None:
        self._rank = rank
        self._ranks_count = ranks_count
        self.participant = Participant(rank, begin, limits)
        self.coordinator = Coordinator(ranks_count, limits) if rank == COORDINATOR else None

    @property
    def has_ended(self) -> bool:
        return self.participant.has_ended and (self.coordinator is None or self.coordinator.has_ended)

    @property
    def outcome(self) -> Outcome:
        """How the call ended for this rank, once it has."""
        assert self.participant.outcome is not None
        return self.participant.outcome

    def start(self, now: float) -> list[Action]:
        actions = [] if self.coordinator is None else self.coordinator.start(now)
        return self._hand_over([*actions, *self.participant.start(now)], now)

    def receive(self, sender: int, message: Message, now: float) -> list[Action]:
        """Take a message of another rank; one that this rank cannot have got is ignored."""
        if self.coordinator is not None:
            is_other = COORDINATOR < sender < self._ranks_count
            return self._hand_over(self.coordinator.receive(sender, message, now), now) if is_other else []
        return self._hand_over(self.participant.receive(message, now), now) if sender == COORDINATOR else []

    def folder_made(self, start: AttemptStart, now: float) -> list[Action]:
        return self._hand_over(self._coordinator.folder_made(start, now), now)

    def folder_failed(self, cause: str, now: float) -> list[Action]:
        return self._hand_over(self._coordinator.failed(cause, now), now)

    def wrote(self, notes: Mapping[str, Json], now: float) -> list[Action]:
        return self._hand_over(self.participant.wrote(notes, now), now)

    def write_failed(self, cause: str, now: float) -> list[Action]:
        return self._hand_over(self.participant.failed(cause, now), now)

    def published(self, outcome: Outcome, now: float) -> list[Action]:
        return self._hand_over(self._coordinator.published(outcome, now), now)

    def looked(self, found: bool, now: float) -> list[Action]:
        return self._hand_over(self.participant.looked(found, now), now)

    def lost(self, cause: str, now: float) -> list[Action]:
        """The channel of this rank is gone, or what comes through it cannot be read."""
        machine = self.participant if self.coordinator is None else self.coordinator
        return self._hand_over(machine.lost(cause, now), now)

    def tick(self, now: float) -> list[Action]:
        machine = self.participant if self.coordinator is None else self.coordinator
        return self._hand_over(machine.tick(now), now)

    def next_tick(self) -> float:
        machine = self.participant if self.coordinator is None else self.coordinator
        return machine.next_tick()

    @property
    def _coordinator(self) -> Coordinator:
        assert self.coordinator is not None
        return self.coordinator

    def _hand_over(self, actions: list[Action], now: float) -> list[Action]:
        """Give each machine of rank 0 what the other one says to it, until only what concerns others is left."""
        if self.coordinator is None:
            return actions
        left: list[Action] = []
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            match action:
                case Send(None, message):
                    left.append(action)
                    answers = self.participant.receive(message, now)
                case Send(_, message):
                    answers = self._coordinator.receive(COORDINATOR, message, now)
                case _:
                    left.append(action)
                    answers = []
            waiting.extend(answers)
        return left
