"""Short handovers of the interpreter lock, while a save or load is in flight.

Each takes that lock some forty times, for moments: around every call of the system and of the core. A thread that runs
nothing but bytecode gives it up only after the switch interval, 5 ms by default. Beside such a thread a call of
`save_async` took 40 ms instead of 1, a small load 150 ms, and the background a fifth of a second in which the disk had
nothing to do. The interval counts only while a thread waits for the lock: a shorter one takes no time from a trainer
that is alone.
"""

from __future__ import annotations

import sys

HANDOVER_S_MAX = 0.0002
_EXACT_S = 1e-6  # As the interpreter keeps it.


class Handovers:
    """The switch interval of the process. Belongs to the save lock, under whose guard it is used."""

    def __init__(self) -> None:
        self._usual_s: float | None = None

    def shorten(self) -> None:
        """Shorten it, unless it is short already. Idempotent."""
        before = sys.getswitchinterval()
        if self._usual_s is None and before > HANDOVER_S_MAX + _EXACT_S:
            self._usual_s = before
            sys.setswitchinterval(HANDOVER_S_MAX)

    def give_back(self) -> None:
        """Set what was before, unless the user has set another one meanwhile. Idempotent."""
        usual = self._usual_s
        if usual is not None and abs(sys.getswitchinterval() - HANDOVER_S_MAX) < _EXACT_S:
            sys.setswitchinterval(usual + _EXACT_S / 2)  # It cuts off what is below; 0.6 ms would become 0.599.
        self._usual_s = None  # Last: a child that another thread forks before gives it back itself.
