"""Calls on an event loop: what would stop the loop is refused, or waited for beside it.

An asynchronous call copies on the loop's thread, for as long as the stall takes. What it would wait for, a save or a
load in flight or a free arena, may take minutes, so there it raises; `when_free` waits without stopping the loop.
"""

from __future__ import annotations

import asyncio
import time

from asyncckpt.engine.process.background import background, check_may_wait
from asyncckpt.engine.process.save_lock import Ticket, save_lock
from asyncckpt.errors import DeadlineError, SaveInProgressError, UsageError
from asyncckpt.guard import Guard

BUSY_POLL_S = 0.02  # How often `when_free` looks.
_WOULD_STOP = "and a wait on this thread would stop its event loop"


def on_event_loop() -> bool:
    """Return whether a loop of the caller's runs on this thread."""
    return asyncio._get_running_loop() is not None and not background.is_current_thread()


def check_may_wait_for(other: Ticket) -> None:
    """Raise before an asynchronous call waits for the save lock: SaveInProgressError on an event loop."""
    if on_event_loop():
        raise SaveInProgressError(f"a {other} is in flight, {_WOULD_STOP}", hint="await when_free() before the call")


def check_may_wait_here(what: str, *, holding: Guard | None = None) -> None:
    """Raise before an asynchronous call waits: SaveInProgressError on an event loop; see check_may_wait."""
    check_may_wait(what, holding=holding)
    if on_event_loop():
        raise SaveInProgressError(f"{what} is not free, {_WOULD_STOP}", hint="await the oldest save before the call")


def check_may_block_here(why: str) -> None:
    """Raise before an asynchronous call becomes a blocking one: UsageError on an event loop."""
    if on_event_loop():
        what = f"{why}, {_WOULD_STOP}"
        raise UsageError(what, hint="raise the limit, or save on another thread: await asyncio.to_thread(saver.save)")


async def when_free(deadline_s: float) -> None:
    """Wait until nothing holds the save lock, without stopping the loop. DeadlineError; UsageError as in a wait."""
    until = time.monotonic() + deadline_s
    while ahead := save_lock.ahead():
        save_lock.check_may_wait()
        if time.monotonic() >= until:
            raise DeadlineError(f"a {ahead[0]} did not end within {deadline_s:g} s")
        await asyncio.sleep(BUSY_POLL_S)
