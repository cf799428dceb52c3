"""What is in flight: in the process one save or load at a time, by the save lock; below it, in one Saver.

#   from      to         done by            when
#   -         asking     SaveLock.acquire   at once: from here on `release` takes the ticket back, wherever it is
#   asking    held       SaveLock.acquire   nothing is in flight; on_busy="queue": only saves of the background
#   asking    -          SaveLock.acquire   skipped, refused, or the deadline has passed
#   held      -          SaveLock.release   committed, failed or cancelled

Queued saves hold tickets after the first one; the background thread works them off in that order, so commits stay in
order. A save joins them only after saves whose state is captured: never while a load, a capture, a blocking save or a
DCP save may still change the state, or hold it. The staging of a state for DCP joins all but loads. None of them passes
a ticket that asks for longer, so a call that waits for all of them has its turn.

While a ticket is held, handovers of the interpreter lock are short.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncckpt.engine.process.background import background, check_may_wait
from asyncckpt.engine.process.future import CheckpointFuture
from asyncckpt.errors import DeadlineError, SaveCancelledError, SaveInProgressError, UsageError
from asyncckpt.model.result import SaveResult, SaverStatistics
from asyncckpt.model.store_url import Place
from asyncckpt.options import BusyPolicy, OnBusy
from asyncckpt.pipeline.threads import register_at_exit
from asyncckpt.signals import STEP_S, Guard, uninterrupted
from asyncckpt.staging.pool import pool
from asyncckpt.system import register_at_fork

Kind = Literal["save", "load", "staging"]

HANDOVER_S_MAX = 0.0002
_EXACT_S = 1e-6  # As the interpreter keeps it.


class Handovers:
    """The switch interval of the process. Belongs to the save lock, under whose guard it is used.

    A save or load takes the interpreter lock some forty times, for moments: around every call of the system and of the
    core. A thread that runs nothing but bytecode gives it up only after the switch interval, 5 ms by default. Beside
    such a thread a call of `save_async` took 40 ms instead of 1, a small load 150 ms, and the background a fifth of a
    second in which the disk had nothing to do. The interval counts only while a thread waits for the lock: a shorter
    one takes no time from a trainer that is alone.
    """

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


@dataclass(eq=False)
class Ticket:
    """One save or load in flight. `step` is None until it is known.

    thread: the one that asks for it, and has to go on for it to end, so that it cannot wait for that. None: all that is
    left of it is the background's. is_captured: it is a save, and the background has all that it needs, so that saves
    may queue after it.
    """

    kind: Kind
    path: Place | None
    step: int | None
    thread: int | None = None
    is_captured: bool = False
    begun: float = field(default_factory=time.monotonic)

    def may_queue_behind(self, other: Ticket) -> bool:
        """Return whether the state may be captured while the other one is held.

        For the staging of a state, which somebody else writes, that is all that does not change it.
        """
        return other.kind != "load" if self.kind == "staging" else other.is_captured

    def __str__(self) -> str:
        step = "the next step" if self.step is None else f"step {self.step}"
        place = "" if self.path is None else f" in {str(self.path)!r}"
        return f"{self.kind} of {step}{place}"


class SaveLock:
    """Process-wide; see the table above."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._changed = threading.Condition(self._guard)
        self._asking: list[Ticket] = []
        self._held: list[Ticket] = []
        self._handovers = Handovers()

    def acquire(
        self,
        ticket: Ticket,
        *,
        on_busy: OnBusy,
        deadline_s: float,
        before_wait: Callable[[Ticket], None] = lambda other: None,
    ) -> bool:
        """Take the lock; False when the call shall be skipped. However it ends, `release` may be called after it.

        before_wait: called with what is waited for; what it raises ends the call.
        SaveInProgressError, DeadlineError; UsageError for a wait that would have no end.
        """
        with self._changed:
            self._asking.append(ticket)
            try:
                may_hold = self._await_turn(ticket, on_busy, deadline_s, before_wait)
                if may_hold:
                    self._held.append(ticket)
                    self._handovers.shorten()
                return may_hold
            finally:
                if ticket in self._asking:  # Else this is a child, forked by a signal handler: see `forget`.
                    self._asking.remove(ticket)

    def check_may_wait(self) -> None:
        """Raise UsageError where a wait for what is in flight, in whatever way, would have no end."""
        with self._changed:
            if self._held:
                self._check_may_wait(self._held[0])

    def _await_turn(
        self, ticket: Ticket, on_busy: OnBusy, deadline_s: float, before_wait: Callable[[Ticket], None]
    ) -> bool:
        """Wait until a ticket may be held; under the lock. False: it shall be skipped."""
        until = time.monotonic() + deadline_s
        while (other := self._in_the_way(ticket, on_busy)) is not None:
            if on_busy == "skip":
                return False
            if on_busy == "raise":
                age_s = time.monotonic() - other.begun
                what = f"a {other} is still running, for {age_s:.1f} s so far"
                raise SaveInProgressError(what, hint="wait for it, or pass on_busy='wait', 'skip' or 'queue'")
            before_wait(other)
            self._check_may_wait(other)
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(f"a {other} did not end within {deadline_s} s")
            self._changed.wait(min(left_s, STEP_S))
            uninterrupted.look(self._changed)
        return True

    def _in_the_way(self, ticket: Ticket, on_busy: OnBusy) -> Ticket | None:
        """Return the oldest ticket that has to be given back, captured, or have its turn, before this one is held.

        A call in the middle of another one on its thread, by a signal handler, passes that one, which waits for it.
        """
        older = self._asking[: self._asking.index(ticket)]
        held = [other for other in self._held if on_busy != "queue" or not ticket.may_queue_behind(other)]
        return next(iter([*held, *(other for other in older if other.thread != ticket.thread)]), None)

    def _check_may_wait(self, other: Ticket) -> None:
        check_may_wait(f"a {other}", holding=self._guard)
        for ticket in self._held:
            if ticket.thread == threading.get_ident():
                raise UsageError(
                    f"cannot wait for a {ticket} in a signal handler, or in what it calls: it runs on this thread",
                    hint="pass on_busy='skip'",
                )

    def hand_over(self, ticket: Ticket, *, is_captured: bool = False) -> None:
        """Note that it goes on in the background; see Ticket."""
        with self._changed:
            ticket.thread, ticket.is_captured = None, is_captured
            self._changed.notify_all()

    def release(self, ticket: Ticket) -> None:
        """Give a ticket back, if it is held. Idempotent, so an interrupted caller may call it again."""
        with self._guard.again():
            if ticket in self._held:
                self._held.remove(ticket)
                if not self._held:
                    self._handovers.give_back()
                self._changed.notify_all()

    def in_flight(self) -> list[Ticket]:
        """Return the tickets held now, oldest first."""
        with self._changed:
            return list(self._held)

    def wait_until_free(self, seconds: float) -> bool:
        """Wait until nothing is in flight, for at most `seconds`; return whether it came to that."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, seconds)

    def ahead(self) -> list[Ticket]:
        """Return the tickets that a call on this thread would come after, oldest first."""
        with self._changed:
            return [*self._held, *(other for other in self._asking if other.thread != threading.get_ident())]

    @contextmanager
    def held(self, kind: Kind, path: Place | None, step: int | None, *, busy: BusyPolicy) -> Iterator[None]:
        """Hold the lock on this thread, for what it does in one call."""
        ticket = Ticket(kind=kind, path=path, step=step, thread=threading.get_ident())
        try:
            self.acquire(ticket, on_busy=busy.action, deadline_s=busy.deadline)
            yield
        finally:
            self.release(ticket)

    def forget(self) -> None:
        """Start over in a forked child."""
        self._handovers.give_back()
        self.__init__()  # type: ignore[misc]


save_lock = SaveLock()


# -- what one Saver has in flight, and how it ended --------------------------------------------------------------------


class RunningCalls:
    """The threads that use now what another thread may close, such as the directory of the Saver."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._changed = threading.Condition()

    @contextmanager
    def one_more(self, check_open: Callable[[], object]) -> Iterator[None]:
        """Be in such a call; raises what check_open raises when it is closed."""
        check_open()
        with self._changed:
            self._threads.append(threading.get_ident())
        try:
            check_open()  # Whoever closes it from now on waits for this call.
            yield
        finally:
            with self._changed:
                self._threads.remove(threading.get_ident())
                self._changed.notify_all()

    def has_current_thread(self) -> bool:
        return threading.get_ident() in self._threads

    def wait(self, what: str, timeout: float) -> None:
        """Wait until there is none; UsageError where that would have no end, DeadlineError."""
        with self._changed:
            if self._threads:
                check_may_wait(what)
            until = time.monotonic() + timeout
            while self._threads:
                if time.monotonic() >= until:
                    raise DeadlineError(f"{what} did not end within {timeout} s")
                self._changed.wait(STEP_S)
                uninterrupted.look(self._changed)


class OpenFutures:
    """The futures of one Saver that have not ended, or have an error that nobody has got. A forked child has none."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._futures: list[CheckpointFuture[Any]] = []
        self._pid = os.getpid()

    def watch(self, future: CheckpointFuture[Any]) -> None:
        with self._guard:
            self._futures.append(future)

    def take_error(self) -> BaseException | None:
        """Return the oldest error that nobody has got, for whoever raises it now."""
        if self._pid != os.getpid():
            return None
        error: BaseException | None = None
        with self._guard:
            failed = next((future for future in self._futures if future._unseen is not None), None)
            if failed is not None:
                error, failed._unseen = failed._unseen, None
            # Keep no future whose error somebody has: its traceback holds the whole save.
            self._futures = [one for one in self._futures if not one._inner.done() or one._unseen is not None]
        return error

    def raise_first(self) -> None:
        """Raise the oldest error that nobody has got."""
        error = self.take_error()
        if error is not None:
            raise error

    def wait(self, timeout: float) -> None:
        """Wait until nothing is in flight, whatever comes of it. DeadlineError."""
        until = time.monotonic() + timeout
        for future in self._in_flight():
            future._wait_done(timeout, until=until)

    def are_settled(self) -> bool:
        """Return whether nothing is in flight."""
        return not self._in_flight()

    def _in_flight(self) -> list[CheckpointFuture[Any]]:
        if self._pid != os.getpid():
            return []
        with self._guard:
            return [future for future in self._futures if not future._inner.done()]


class SaveCounts:
    """The statistics of one Saver. Futures hold it, and not the Saver, which would keep the user's state alive."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._sums: Counter[str] = Counter()

    def now(self, plans_made_count: int) -> SaverStatistics:
        """Return what was counted so far, with the plans made and the arenas of the process."""
        arenas = pool.statistics()
        with self._guard:
            sums: dict[str, Any] = dict(self._sums)
        return SaverStatistics(
            **sums,
            plans_made_count=plans_made_count,
            arenas_count=arenas.arenas_count,
            arena_bytes=arenas.touched_bytes,
            arena_touches_count=arenas.touches_count,
        )

    def add(self, result: SaveResult | None, error: BaseException | None) -> None:
        """Count the outcome of a save."""
        if result is None:
            added: dict[str, Any] = {"cancelled_count" if isinstance(error, SaveCancelledError) else "failed_count": 1}
        else:
            added = {
                "saves_count": not result.skipped,
                "skipped_count": result.skipped,
                "fallback_count": result.fallback is not None,
                "deltas_count": result.kind == "delta",
                "bytes_written": result.bytes_written,
                "rows_count": result.rows_count,
                "rows_copied": result.rows_copied,
                "stall_seconds": result.stall_seconds,
                "step_wait_seconds": result.step_wait_seconds,
            }
        with self._guard:
            for name, value in added.items():
                self._sums[name] += value


def _report_what_is_awaited() -> None:
    tickets = save_lock.in_flight()
    if background.is_busy and tickets:
        print(f"asyncckpt: the interpreter ends after the {', '.join(map(str, tickets))}", file=sys.stderr)


register_at_fork(after_in_child=save_lock.forget)
register_at_exit(_report_what_is_awaited)
