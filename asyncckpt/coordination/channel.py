"""What carries messages and parts between the ranks of a job: the Protocol of all channels, and how often they look.

A channel may lose, repeat or delay a message (docs/ranks.md); it never changes one, and what was sent for one call
never shows up under another. A call is the number of a save, alike on all ranks.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import Protocol

from asyncckpt.errors import UsageError
from asyncckpt.signals import uninterrupted
from asyncckpt.system import register_at_fork

FIRST_S = 0.0005
GROWTH = 1.6


class Channel(Protocol):
    """One rank's way to the others. All methods block.

    `receive` belongs to one thread at a time; another thread may send, put and get meanwhile.
    """

    rank: int
    ranks_count: int

    def send(self, call: int, to: int | None, message: bytes) -> None:
        """Send to a rank, or (None, only from rank 0) to all others.

        PeerError or IOFailedError when the channel is gone.
        """

    def receive(self, call: int, timeout_s: float) -> list[tuple[int, bytes]]:
        """Return messages of a call for this rank that came since, as (sender, bytes), each once.

        At least one, or after `timeout_s` seconds an empty list. Messages of one sender come in their order.
        """

    def put(self, call: int, name: str, data: bytes) -> None:
        """Leave data of any size under a name for whoever gets it."""

    def get(self, call: int, name: str, timeout_s: float) -> bytes:
        """Return what any rank put under a name; DeadlineError when it does not come within `timeout_s` seconds."""

    def find(self, call: int, name: str, timeout_s: float) -> bytes | None:
        """Return what any rank has put under a name so far, this one before or any other; None when it is not there.

        DeadlineError when the channel does not answer within `timeout_s` seconds.
        """

    def forget(self, call: int) -> None:
        """Drop what this call and older ones left behind. Every rank does so when all have begun a newer one."""

    def close(self) -> None:
        """End this rank's side; never raises over another error."""


class Pauses:
    """The times at which to look again: soon at first, later while nothing comes. Used by one thread.

    pause_s_max  the longest pause; `first_s` the shortest, after something came.
    """

    def __init__(self, *, pause_s_max: float, first_s: float = FIRST_S) -> None:
        assert 0 < first_s <= pause_s_max
        self._first_s = first_s
        self._pause_s_max = pause_s_max
        self._pause_s = first_s
        self._next = time.monotonic()

    def are_over(self) -> bool:
        """Return whether it is time to look."""
        return time.monotonic() >= self._next

    def nothing_came(self) -> None:
        """Look again after a pause, and let the next one be longer."""
        self._next = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * GROWTH, self._pause_s_max)

    def something_came(self) -> None:
        """Look again at once, and soon after that: what comes rarely comes alone."""
        self._next = time.monotonic()
        self._pause_s = self._first_s

    def pause(self, until: float) -> bool:
        """Sleep to the next look, for nothing came; return False when `until` is reached first."""
        self.nothing_came()
        return self.wait_until(until)

    def wait_until(self, until: float) -> bool:
        """Sleep to the next look, but not past `until` (time.monotonic); return False when that is reached first."""
        now = time.monotonic()
        time.sleep(max(0.0, min(self._next, until) - now))
        uninterrupted.look()
        return self._next < until


_open: weakref.WeakSet[Channel] = weakref.WeakSet()


def close_at_exit(channel: Channel) -> None:
    """Close a channel at the end of the interpreter, after all threads of saves were joined, unless it is gone by then.

    A training script may end right after its last save has committed, without closing anything. The other ranks would
    then see their channel break instead of the last message.
    """
    _open.add(channel)


def check_own_process(pid: int) -> None:
    """Raise UsageError in a forked child of the process that has opened a channel: it is not a rank."""
    if pid != os.getpid():
        raise UsageError("this channel belongs to the parent process", hint="make a new Saver in the child")


def _close_all() -> None:
    for channel in list(_open):
        channel.close()


atexit.register(_close_all)
# A forked child shares the parent's connections; what it says on them would be nonsense.
register_at_fork(after_in_child=_open.clear)
