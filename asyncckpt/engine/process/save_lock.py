"""The save lock: one save or load at a time in the process.

#   from      to         done by            when
#   -         waiting    SaveLock.acquire     on_busy="wait": until nothing is in flight
#   -         held       SaveLock.acquire     nothing is in flight, or on_busy="queue"
#   held      -          SaveLock.release     committed, failed or cancelled

Queued saves hold tickets behind the first one; the background thread works them off in that order, so commits stay in
order.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asyncckpt.engine.process.background import background, check_may_wait
from asyncckpt.errors import DeadlineError, SaveInProgressError, UsageError
from asyncckpt.guard import Guard
from asyncckpt.options import OnBusy
from asyncckpt.signals import STEP_S, uninterrupted


@dataclass(eq=False)
class Ticket:
    """One save or load in flight. `step` is None until it is known.

    thread: the one whose call it still is, which so cannot wait for its end. None: it goes on elsewhere.
    """

    kind: Literal["save", "load"]
    path: Path
    step: int | None
    thread: int | None = None
    begun: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        age_s = time.monotonic() - self.begun
        step = "the next step" if self.step is None else f"step {self.step}"
        return f"{self.kind} of {step} in {str(self.path)!r}, {age_s:.1f} s old"


class SaveLock:
    """Process-wide; see the table above."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._changed = threading.Condition(self._guard)
        self._held: list[Ticket] = []

    def acquire(self, ticket: Ticket, *, on_busy: OnBusy, deadline_s: float) -> bool:
        """Take the lock; False when the call shall be skipped.

        SaveInProgressError, DeadlineError; UsageError for a wait that would have no end.
        """
        until = time.monotonic() + deadline_s
        with self._changed:
            while self._held and on_busy != "queue":
                if on_busy == "skip":
                    return False
                if on_busy == "raise":
                    raise SaveInProgressError(
                        f"a {self._held[0]} is in flight",
                        hint="await it, or pass on_busy='wait', 'skip' or 'queue'",
                    )
                self._check_may_wait()
                if time.monotonic() >= until:
                    raise DeadlineError(f"a {self._held[0]} did not end within {deadline_s} s")
                self._changed.wait(STEP_S)
                uninterrupted.look()
            self._held.append(ticket)
            return True

    def check_may_wait(self) -> None:
        """Raise UsageError where a wait for what is in flight, in whatever way, would have no end."""
        with self._changed:
            if self._held:
                self._check_may_wait()

    def _check_may_wait(self) -> None:
        check_may_wait(f"a {self._held[0]}", holding=self._guard)
        for ticket in self._held:
            if ticket.thread == threading.get_ident():
                raise UsageError(
                    f"waiting for a {ticket} on the thread that makes it would wait for ever",
                    hint="a signal handler, or what a save or load calls, cannot wait for it: pass on_busy='skip'",
                )

    def release(self, ticket: Ticket) -> None:
        with self._changed:
            self._held.remove(ticket)
            self._changed.notify_all()

    def in_flight(self) -> list[Ticket]:
        """Return the tickets held now, oldest first."""
        with self._changed:
            return list(self._held)

    def forget(self) -> None:
        """Start anew in a forked child."""
        self._changed = threading.Condition(self._guard)
        self._held = []


save_lock = SaveLock()


def _report_what_is_awaited() -> None:
    tickets = save_lock.in_flight()
    if background.is_busy and tickets:
        print(f"asyncckpt: the interpreter ends after the {', '.join(map(str, tickets))}", file=sys.stderr)


os.register_at_fork(after_in_child=save_lock.forget)
# Runs before threads are joined; atexit would run after. Private, so its absence only costs the message.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(_report_what_is_awaited)
