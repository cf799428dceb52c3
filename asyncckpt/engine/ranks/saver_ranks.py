"""The ranks that save together with this one: the way to them, deadlines, and the numbers of their calls."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from asyncckpt.coordination.channel import Channel
from asyncckpt.coordination.messages import Limits
from asyncckpt.engine.ranks.replicas import Replicas
from asyncckpt.pipeline.threads import IdleEndingThreads

TALKERS_MAX = 3  # One sends, one receives, one waits for what another rank has left.

# Sending and receiving block; the threads end when nothing has been said for a while, like the workers.
talkers = IdleEndingThreads("asyncckpt-ranks", TALKERS_MAX)


@dataclass
class CallNumbers:
    """The numbers of calls, alike on all ranks. next_number: of the next call."""

    next_number: int = 1

    def take(self) -> int:
        number, self.next_number = self.next_number, self.next_number + 1
        return number


@dataclass
class Ranks:
    """What one Saver of several ranks needs beside its target. All ranks make the same calls in the same order.

    announcing: done when the others have heard of a call in which this rank does not save.
    is_shared: the same ranks save to other directories too (`beside`), over one channel, which is not closed here.
    """

    channel: Channel
    limits: Limits
    replicas: Replicas
    announcing: list[threading.Event] = field(default_factory=list)
    calls: CallNumbers = field(default_factory=CallNumbers)
    is_shared: bool = False

    @property
    def rank(self) -> int:
        return self.channel.rank

    @property
    def ranks_count(self) -> int:
        return self.channel.ranks_count

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def wait_announced(self) -> None:
        """Before the channel is closed: what the others are still to hear is on its way."""
        for announced in self.announcing:
            announced.wait(self.limits.begin_s)
        self.announcing.clear()

    def next_call(self) -> int:
        """The number of a save that has just been asked for, alike on all ranks."""
        return self.calls.take()

    def beside(self) -> Ranks:
        """The same ranks for one more directory."""
        return replace(self, is_shared=True)

    def close(self) -> None:
        """End the channel, unless other directories need it."""
        if not self.is_shared:
            self.channel.close()
