"""The machines of one rank and call as one: a participant, and on rank 0 the coordinator beside it.

The two on rank 0 talk by the same messages as everybody. Every input of either machine returns actions; `hand_over`
takes out of these what one of the two says to the other. What is left for the driver are messages to other ranks,
effects, and the end.
"""

from __future__ import annotations

from collections import deque

from asyncckpt.coordination.actions import Action, Send
from asyncckpt.coordination.coordinator import Coordinator
from asyncckpt.coordination.messages import Begin, Failed, Limits, Message, Outcome, Skipped
from asyncckpt.coordination.participant import COORDINATOR, Participant


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
