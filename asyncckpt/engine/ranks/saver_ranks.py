"""The ranks that save together with this one: the way to them, deadlines, the numbers of their calls; and what they are
sent of a call in which this rank does not save, because it was skipped, or failed before it began."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from asyncckpt.coordination.channel import Channel
from asyncckpt.coordination.driver import run_call
from asyncckpt.coordination.messages import Failed, Limits, Skipped, cause_of
from asyncckpt.engine.process.background import Job, background, talkers
from asyncckpt.engine.process.log import log_warning
from asyncckpt.engine.ranks.replicas import Replicas
from asyncckpt.engine.ranks.writers import Decisions
from asyncckpt.signals import wait_in_steps


@dataclass
class Ranks:
    """What Savers of several ranks need beside their targets. All ranks make the same calls in the same order.

    decisions: of rank 0. announcing: done when the others have heard of a call in which this rank does not save.
    call: the number of the next one, alike on all ranks. in_turn: they save one after the other, and say nothing to
    each other (in_turn.py): then the channel only says which rank this is.
    """

    channel: Channel
    limits: Limits
    replicas: Replicas
    decisions: Decisions = field(default_factory=Decisions)
    announcing: list[threading.Event] = field(default_factory=list)
    call: int = 1
    pid: int = field(default_factory=os.getpid)
    in_turn: bool = False

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
        """Wait until what the others are still to hear is on its way. Before the channel is closed."""
        for announced in self.announcing:
            wait_in_steps(announced.wait, self.limits.begin_s)
        self.announcing.clear()

    def next_call(self) -> int:
        """Return the number of a save that has just been asked for."""
        self.call += 1
        return self.call - 1

    def announce_failed(self, call: int, error: BaseException) -> None:
        """Abort on all ranks a save that this one cannot make."""
        _announce(self, call, Failed(cause_of(error)))

    def announce_skipped(self, call: int, why: str = "a save or load was in flight") -> None:
        """Let all ranks skip a save that this one skips."""
        _announce(self, call, Skipped(why))


def _announce(ranks: Ranks, call: int, message: Skipped | Failed) -> None:
    """Announce it after what is in flight: the others come to this call no sooner either.

    A forked child, which ends in the middle of a call of its parent's, has nothing to announce.
    """
    if ranks.in_turn or ranks.pid != os.getpid():
        return
    sent = threading.Event()
    ranks.announcing[:] = [*(item for item in ranks.announcing if not item.is_set()), sent]

    async def run() -> None:
        try:
            await run_call(ranks.channel, call, message, None, ranks.limits, threads=talkers)
        except Exception as error:
            lose(error)
        finally:
            sent.set()

    def lose(error: BaseException) -> None:
        """Give up: the others will find out when they have waited for too long."""
        sent.set()
        log_warning("other ranks could not be informed of save number %d: %s", call, error)

    try:
        background.submit(Job(run=run, fail=lose))
    except Exception as error:
        lose(error)
