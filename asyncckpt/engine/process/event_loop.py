"""Calls on an event loop: what would stop the loop is refused, or waited for beside it.

An asynchronous call copies on the loop's thread, for as long as the stall takes. What it would wait for, a save or a
load in flight or a free arena, may take minutes, so there it raises; `when_free` waits without stopping the loop.
"""

from __future__ import annotations

import asyncio
import time

from asyncckpt.engine.process.background import background, check_may_wait
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.errors import DeadlineError, SaveInProgressError
from asyncckpt.guard import Guard
from asyncckpt.options import BusyPolicy, OnBusy

BUSY_POLL_S = 0.02  # How often `when_free` looks.
_WOULD_STOP = "and a wait on this thread would stop its event loop"


def on_event_loop() -> bool:
    """Return whether a loop of the caller's runs on this thread."""
    return asyncio._get_running_loop() is not None and not background.is_current_thread()


def action_here(busy: BusyPolicy) -> OnBusy:
    """Return what an asynchronous call does while the save lock is held. SaveInProgressError where it must not wait."""
    if busy.action not in ("wait", "queue") or not on_event_loop():
        return busy.action
    for ticket in save_lock.in_flight():
        # A save queues at once behind saves of the background.
        if busy.action == "wait" or not ticket.is_queue:
            what = f"a {ticket} is in flight, {_WOULD_STOP}"
            raise SaveInProgressError(what, hint="await when_free() before the call")
    return "raise" if busy.action == "wait" else "queue"


def check_may_wait_here(what: str, *, holding: Guard | None = None) -> None:
    """Raise before an asynchronous call waits: SaveInProgressError on an event loop; see check_may_wait."""
    check_may_wait(what, holding=holding)
    if on_event_loop():
        raise SaveInProgressError(f"{what} is not free, {_WOULD_STOP}", hint="await the oldest save before the call")


async def when_free(deadline_s: float) -> None:
    """Wait until nothing holds the save lock, without stopping the loop. DeadlineError; UsageError as in a wait."""
    until = time.monotonic() + deadline_s
    while in_flight := save_lock.in_flight():
        save_lock.check_may_wait()
        if time.monotonic() >= until:
            raise DeadlineError(f"a {in_flight[0]} did not end within {deadline_s:g} s")
        await asyncio.sleep(BUSY_POLL_S)
