"""The network between the ranks: delays, losses, repetitions, other orders, strangers."""

from __future__ import annotations

import random
from collections.abc import Callable

from asyncckpt.coordination.messages import Failed, Message, Outcome, Prepared, decode, encode
from tests.simulator.events import Events
from tests.simulator.schedule import LIMITS, JobSchedule

Deliver = Callable[[int, int, int, Message], None]  # (call, sender, to, message)


class Network:
    """Carries messages by the rules of a schedule."""

    def __init__(self, schedule: JobSchedule, events: Events, rng: random.Random, deliver: Deliver) -> None:
        self._schedule, self._events, self._rng, self._deliver = schedule, events, rng, deliver
        self._latest: dict[tuple[int, int], float] = {}
        self._is_cut: set[int] = set()

    def cut(self, rank: int) -> None:
        """From now on nothing comes to or from this rank."""
        self._is_cut.add(rank)

    def send(self, call: int, sender: int, to: int, message: Message, *, departs: float) -> None:
        schedule, rng = self._schedule, self._rng
        if schedule.encodes:
            message = decode(encode(message), sender=sender)
        self._carry(call, sender, to, message, departs)
        if rng.random() < schedule.duplicate:
            self._carry(call, sender, to, message, departs + rng.random() * 2 * LIMITS.silence_s, in_order=False)
        if isinstance(message, (Failed, Prepared, Outcome)) and rng.random() < schedule.stray:
            self._carry(call + 1, sender, to, message, departs + rng.random() * LIMITS.silence_s, in_order=False)

    def _carry(
        self, call: int, sender: int, to: int, message: Message, departs: float, *, in_order: bool = True
    ) -> None:
        if sender in self._is_cut or to in self._is_cut:
            return
        arrives: float | None = departs + self._delay()
        for partition in self._schedule.partitions:
            is_between = (sender in partition.side) != (to in partition.side)
            if arrives is not None and is_between and partition.begin <= departs < partition.end:
                arrives = None if partition.loses else max(arrives, partition.end)
        if arrives is None:
            return
        if in_order and self._schedule.keeps_order:
            arrives = self._latest[sender, to] = max(arrives, self._latest.get((sender, to), 0.0))
        self._events.at(arrives, lambda: self._deliver(call, sender, to, message))

    def _delay(self) -> float:
        least, most = self._schedule.delay_s
        seconds = self._rng.uniform(least, most)
        if self._schedule.long_delay and self._rng.random() < self._schedule.long_delay:
            seconds += self._rng.random() * 2 * LIMITS.begin_s
        return seconds
