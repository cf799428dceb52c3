"""Pauses between two looks at a place where something may have come: short at first, growing while nothing comes."""

from __future__ import annotations

import time

from asyncckpt.signals import uninterrupted

FIRST_S = 0.0005
GROWTH = 1.6


class Pauses:
    """The times at which to look again. Used by one thread.

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
