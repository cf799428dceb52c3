"""A thing that happens once, whichever thread comes first."""

from __future__ import annotations

import threading


class Once:
    """Says True to the first caller only, from whichever thread; `done` says whether there was one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.done = False

    def first(self) -> bool:
        """Return whether this is the first call."""
        with self._lock:
            is_first, self.done = not self.done, True
            return is_first
