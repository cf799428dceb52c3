"""Calls on an event loop: what would stop the loop is refused, or waited for beside it. And the end of a `with` block.

An asynchronous call copies on the loop's thread, for as long as the stall takes. What it would wait for, a save or a
load in flight or a free arena, may take minutes, so there it raises; `when_free` waits without stopping the loop.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import TypeVar

from asyncckpt.engine.process.background import background, check_may_wait
from asyncckpt.engine.process.save_lock import Ticket, save_lock
from asyncckpt.errors import DeadlineError, SaveInProgressError, UsageError, closing_beside
from asyncckpt.options import BusyPolicy
from asyncckpt.signals import Guard, check_timeout

C = TypeVar("C", bound="Closing")

BUSY_POLL_S = 0.02  # How often `when_free` looks.
_WOULD_STOP = "and waiting on this thread would stop its event loop"


def on_event_loop() -> bool:
    """Return whether a loop of the caller's runs on this thread."""
    return asyncio._get_running_loop() is not None and not background.is_current_thread()


def check_may_wait_for(other: Ticket) -> None:
    """Raise before an asynchronous call waits for the save lock: SaveInProgressError on an event loop."""
    if on_event_loop():
        raise SaveInProgressError(f"a {other} is running, {_WOULD_STOP}", hint="await when_free() before the call")


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


class WaitsUntilFree:
    """What may have to wait for saves and loads in flight."""

    _busy: BusyPolicy

    async def when_free(self, timeout: float | None = None) -> None:
        """Wait, without stopping the event loop, until no save or load of this process is in flight.

        A save_async or load_async that follows without another await finds it free, unless another thread was faster.
        DeadlineError after `timeout` seconds (None: the deadline of on_busy).
        """
        check_timeout(timeout)
        await when_free(self._busy.deadline if timeout is None else timeout)


class Closing(WaitsUntilFree, ABC):
    """What is closed at the end of a `with` or `async with` block."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close without stopping the event loop."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with closing_beside(error, "closing the Saver raised"):
            self.close()

    async def __aenter__(self: C) -> C:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        with closing_beside(error, "closing the Saver raised"):
            await self.aclose()
