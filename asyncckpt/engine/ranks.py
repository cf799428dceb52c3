"""The ranks that save together with this one: the way to them, deadlines, and the numbers of their calls."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncckpt.coordination.channel import Channel
from asyncckpt.coordination.limits import Limits
from asyncckpt.engine.replicas import Replicas
from asyncckpt.pipeline.threads import IdleEndingThreads

TALKERS_MAX = 3  # One sends, one receives, one waits for what another rank has left.

# Sending and receiving block; the threads end when nothing has been said for a while, like the workers.
talkers = IdleEndingThreads("asyncckpt-ranks", TALKERS_MAX)


@dataclass
class Ranks:
    """What one Saver of several ranks needs beside its target. All ranks make the same calls in the same order.

    telling: done when the others have been told of a call in which this rank does not save.
    """

    channel: Channel
    limits: Limits
    replicas: Replicas
    telling: list[threading.Event] = field(default_factory=list)
    _calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def rank(self) -> int:
        return self.channel.rank

    @property
    def ranks_count(self) -> int:
        return self.channel.ranks_count

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def wait_told(self) -> None:
        """Before the channel is closed: what the others are still to be told is on its way."""
        for told in self.telling:
            told.wait(self.limits.begin_s)
        self.telling.clear()

    def next_call(self) -> int:
        """The number of a save that has just been asked for, alike on all ranks."""
        return next(self._calls)
