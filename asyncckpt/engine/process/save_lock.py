"""The save lock: one save or load at a time in the process.

#   from      to         done by            when
#   -         asking     SaveLock.acquire   at once: from here on `release` takes the ticket back, wherever it is
#   asking    held       SaveLock.acquire   nothing is in flight; on_busy="queue": only saves of the background
#   asking    -          SaveLock.acquire   skipped, refused, or the deadline has passed
#   held      -          SaveLock.release   committed, failed or cancelled

Queued saves hold tickets behind the first one; the background thread works them off in that order, so commits stay in
order. A save joins them only behind saves whose capture has ended: never while a load, or anything else that a thread
does in its own call (a capture, a DCP save), may still change the state, or hold it. The staging of a state for DCP
joins all but loads.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asyncckpt.engine.process.background import background, check_may_wait
from asyncckpt.errors import DeadlineError, SaveInProgressError, UsageError
from asyncckpt.guard import Guard
from asyncckpt.options import BusyPolicy, OnBusy
from asyncckpt.signals import STEP_S, uninterrupted

Kind = Literal["save", "load", "staging"]


@dataclass(eq=False)
class Ticket:
    """One save or load in flight. `step` is None until it is known.

    thread: the one whose call it still is, which so cannot wait for its end. None: it goes on in the background.
    """

    kind: Kind
    path: Path | None
    step: int | None
    thread: int | None = None
    begun: float = field(default_factory=time.monotonic)

    @property
    def is_queue(self) -> bool:
        """Whether saves may queue behind this one: it is a save, and the background has all that it needs."""
        return self.kind == "save" and self.thread is None

    def may_queue_behind(self, other: Ticket) -> bool:
        """Return whether the state may be captured while the other one is held.

        For the staging of a state, which somebody else writes, that is all that does not change it.
        """
        return other.kind != "load" if self.kind == "staging" else other.is_queue

    def __str__(self) -> str:
        age_s = time.monotonic() - self.begun
        step = "the next step" if self.step is None else f"step {self.step}"
        place = "" if self.path is None else f" in {str(self.path)!r}"
        return f"{self.kind} of {step}{place}, {age_s:.1f} s old"


class SaveLock:
    """Process-wide; see the table above."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._changed = threading.Condition(self._guard)
        self._asking: list[Ticket] = []
        self._held: list[Ticket] = []

    def acquire(self, ticket: Ticket, *, on_busy: OnBusy, deadline_s: float) -> bool:
        """Take the lock; False when the call shall be skipped. However it ends, `release` may be called behind it.

        SaveInProgressError, DeadlineError; UsageError for a wait that would have no end.
        """
        with self._changed:
            self._asking.append(ticket)
            try:
                may_hold = self._await_turn(ticket, on_busy, deadline_s)
                if may_hold:
                    self._held.append(ticket)
                return may_hold
            finally:
                self._asking.remove(ticket)

    def check_may_wait(self) -> None:
        """Raise UsageError where a wait for what is in flight, in whatever way, would have no end."""
        with self._changed:
            if self._held:
                self._check_may_wait(self._held[0])

    def _await_turn(self, ticket: Ticket, on_busy: OnBusy, deadline_s: float) -> bool:
        """Wait until a ticket may be held; under the lock. False: it shall be skipped."""
        until = time.monotonic() + deadline_s
        while (other := self._in_the_way(ticket, on_busy)) is not None:
            if on_busy == "skip":
                return False
            if on_busy == "raise":
                raise SaveInProgressError(
                    f"a {other} is in flight", hint="await it, or pass on_busy='wait', 'skip' or 'queue'"
                )
            self._check_may_wait(other)
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(f"a {other} did not end within {deadline_s} s")
            self._changed.wait(min(left_s, STEP_S))
            uninterrupted.look(self._changed)
        return True

    def _in_the_way(self, ticket: Ticket, on_busy: OnBusy) -> Ticket | None:
        """Return the oldest ticket that has to be given back, or go on in the background, before this one is held."""
        if on_busy != "queue":
            return self._held[0] if self._held else None
        return next((other for other in self._held if not ticket.may_queue_behind(other)), None)

    def _check_may_wait(self, other: Ticket) -> None:
        check_may_wait(f"a {other}", holding=self._guard)
        for ticket in self._held:
            if ticket.thread == threading.get_ident():
                raise UsageError(
                    f"waiting for a {ticket} on the thread that makes it would wait for ever",
                    hint="a signal handler, or what a save or load calls, cannot wait for it: pass on_busy='skip'",
                )

    def hand_over(self, ticket: Ticket) -> None:
        """Note that it goes on in the background. Saves may queue behind a save then, for its state is captured."""
        with self._changed:
            ticket.thread = None
            self._changed.notify_all()

    def release(self, ticket: Ticket) -> None:
        """Give a ticket back, if it is held. Idempotent, so an interrupted caller may call it again."""
        with self._guard.again():
            if ticket in self._held:
                self._held.remove(ticket)
                self._changed.notify_all()

    def is_held(self, ticket: Ticket) -> bool:
        """Return whether a ticket is held now."""
        with self._changed:
            return ticket in self._held

    def asking(self) -> list[Ticket]:
        """Return the tickets that are waited with now, oldest first."""
        with self._changed:
            return list(self._asking)

    def in_flight(self) -> list[Ticket]:
        """Return the tickets held now, oldest first."""
        with self._changed:
            return list(self._held)

    @contextmanager
    def held(self, kind: Kind, path: Path | None, step: int | None, *, busy: BusyPolicy) -> Iterator[None]:
        """Hold the lock on this thread, for what it does in one call."""
        ticket = Ticket(kind=kind, path=path, step=step, thread=threading.get_ident())
        try:
            self.acquire(ticket, on_busy=busy.action, deadline_s=busy.deadline)
            yield
        finally:
            self.release(ticket)

    def forget(self) -> None:
        """Start anew in a forked child."""
        self.__init__()  # type: ignore[misc]


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
