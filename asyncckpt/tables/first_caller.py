"""Find the first of several callers, for what must happen once."""

from __future__ import annotations

import threading


class FirstCaller:
    """Says which call is the first, from any thread; `done` says whether there was one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.done = False

    def first(self) -> bool:
        """Return whether this is the first call."""
        with self._lock:
            is_first, self.done = not self.done, True
            return is_first
