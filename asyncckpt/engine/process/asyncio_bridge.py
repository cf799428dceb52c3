"""Blocking work for a caller on an event loop: on worker threads, cancelled to its end, never half."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import TypeVar

from asyncckpt.engine.process.background import workers
from asyncckpt.engine.process.save_lock import Ticket, save_lock
from asyncckpt.errors import DeadlineError
from asyncckpt.options import BUSY_DEADLINE_S

T = TypeVar("T")
BUSY_POLL_S = 0.02  # How often a load looks whether another one, or a save, has ended.


async def acquire_save_lock(ticket: Ticket) -> None:
    """Take the save lock without blocking the loop. DeadlineError."""
    until = time.monotonic() + BUSY_DEADLINE_S
    while not save_lock.acquire(ticket, on_busy="skip", deadline_s=0):
        if time.monotonic() > until:
            raise DeadlineError(f"saves and loads in flight did not end within {BUSY_DEADLINE_S} s")
        await asyncio.sleep(BUSY_POLL_S)


def _nothing() -> None:
    pass


async def in_thread(
    function: Callable[[], T], *, on_cancel: Callable[[], None] = _nothing, on_refused: Callable[[], None] = _nothing
) -> T:
    """Run a function on a worker thread. When cancelled, call on_cancel and wait for its end, which comes soon.

    on_refused: called when no thread could be started for it.
    """
    try:
        future: concurrent.futures.Future[T] = workers.submit(function)
    except BaseException:
        on_refused()
        raise
    waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait([waiter])
        waiter.exception()  # Nobody else will ask.
        raise
