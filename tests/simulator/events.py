"""Virtual time: a heap of things to happen."""

from __future__ import annotations

import heapq
from collections.abc import Callable

EVENTS_MAX = 200_000


class Events:
    """Runs what is due, in order of time, and of what was asked for first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, do: Callable[[], None]) -> None:
        assert when >= self.now
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, do))

    def run(self, *, until: float) -> None:
        """Until nothing is left to happen, or until a time; or so many events that it looks like an endless loop."""
        begun = self._count
        while self._heap and self._heap[0][0] <= until and self._count - begun < EVENTS_MAX:
            self.now, _, do = heapq.heappop(self._heap)
            do()
