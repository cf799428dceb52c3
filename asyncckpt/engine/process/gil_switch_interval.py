"""Short waits for the interpreter lock while a save is in the background.

A save takes the lock some forty times, for moments, and a trainer that runs nothing but bytecode gives it up only after
the switch interval, 5 ms by default: together a fifth of a second, in which the disk has nothing to do. The interval
counts only while a thread waits for the lock, so a shorter one takes no time from a trainer that is alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HANDOVER_S_MAX = 0.0002
_usual_s: list[float] = []  # What to give back to a child that is forked meanwhile: it has no background.


@contextmanager
def short_handovers() -> Iterator[None]:
    """Have waits for the interpreter lock end within HANDOVER_S_MAX; one thread of the process at a time."""
    before = sys.getswitchinterval()
    if before <= HANDOVER_S_MAX:
        yield
        return
    sys.setswitchinterval(HANDOVER_S_MAX)
    ours = sys.getswitchinterval()
    _usual_s.append(before)
    try:
        yield
    finally:
        _usual_s.clear()
        if sys.getswitchinterval() == ours:  # Else the user has set another one meanwhile.
            sys.setswitchinterval(before)


def _give_back_in_child() -> None:
    if _usual_s:
        sys.setswitchinterval(_usual_s.pop())


os.register_at_fork(after_in_child=_give_back_in_child)
