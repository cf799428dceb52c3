"""Who gets the error of a future: exactly one of those below.

1. Whoever asks the future: a thread in `result` or `exception`, an `await`, a done callback. An asker registers before
   it waits, and claims the error when it returns or raises it. One that leaves without the error (cancelled, timed out,
   interrupted) claims nothing. A loop that is closed asks no more.
2. Else the next call on the Saver, `wait_idle` or `close`, which `take` an error that nobody has claimed. While an
   asker is registered they leave it to that one; they wait a moment for callbacks that still run.
3. Else it is printed, when the future is collected or the interpreter ends.

To ask a future is always answered, also again. The error of a cancelled save is only for those who ask.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from asyncckpt.errors import DeadlineError, SaveCancelledError
from asyncckpt.guard import Guard
from asyncckpt.signals import uninterrupted

CALLBACKS_S_MAX = 1.0  # How long `take` waits for done callbacks, which may ask: they may wait for its thread.


class ErrorClaim:
    """The claim to the error of one future, `inner`."""

    def __init__(self, inner: concurrent.futures.Future[Any]) -> None:
        self._inner = inner
        self._guard = Guard()  # Entered again by whom a signal handler or a destructor calls.
        self._is_claimed = False
        self._threads_count = 0
        self._loops: list[asyncio.Future[None]] = []  # What each `await` waits for; it holds no error.
        self._callbacks_count = 0
        self._called = threading.Event()  # No callback is left to be called.
        self._called.set()
        self._calling: int | None = None  # The thread that calls them.

    @property
    def is_open(self) -> bool:
        """Whether there is an error, of no cancelled save, that nobody has got. Takes no lock."""
        if self._is_claimed or not self._inner.done():
            return False
        error = self._inner.exception(0)
        return error is not None and not isinstance(error, SaveCancelledError)

    @uninterrupted
    def _is_done(self) -> bool:
        return self._inner.done()

    def claim(self) -> bool:
        """Note that whoever calls this raises or returns the error now; return whether nobody has before."""
        with self._guard.again():
            is_first, self._is_claimed = not self._is_claimed, True
            if is_first:
                uninterrupted.if_raised(self._give_back)
            return is_first

    def _give_back(self) -> None:
        """Note that whoever has claimed the error has not got it after all: a signal has ended that call."""
        self._is_claimed = False

    def close(self) -> None:
        """Note that the error has been printed. Takes no lock."""
        self._is_claimed = True

    @uninterrupted
    def take(self) -> BaseException | None:
        """Return the error to raise it without having been asked, once; None while somebody asks for it."""
        if not self.is_open:
            return None
        if self._calling != threading.get_ident():
            self._called.wait(CALLBACKS_S_MAX)
        with self._guard.again():
            loops_ask = any(not (woken.cancelled() or woken.get_loop().is_closed()) for woken in self._loops)
            if not self.is_open or self._threads_count or loops_ask or self._calling == threading.get_ident():
                return None
            self.claim()
        return self._inner.exception(0)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Be registered as a thread that asks."""
        with self._guard.again():
            self._threads_count += 1
        try:
            yield
        finally:
            with self._guard.again():
                self._threads_count -= 1

    async def until_done(self, deadline_s: float, what: str) -> None:
        """Wait, registered, on the running loop. DeadlineError."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(deadline_s, _wake, woken)
        try:
            self._ask(woken)
            if not self._is_done():
                await woken
            if not self._is_done():
                raise DeadlineError(f"{what} did not end within {deadline_s} s")
            self._is_claimed = True
        finally:
            self._leave(woken)
            timer.cancel()

    def _ask(self, woken: asyncio.Future[None]) -> None:
        with self._guard.again():
            self._loops.append(woken)

    @uninterrupted
    def _leave(self, woken: asyncio.Future[None]) -> None:
        with self._guard.again(), contextlib.suppress(ValueError):
            self._loops.remove(woken)

    def wake_loops(self) -> None:
        """Wake those who await, when `inner` is done."""
        with self._guard.again():
            loops = tuple(self._loops)
        for woken in loops:
            with contextlib.suppress(RuntimeError):  # Its loop is closed.
                woken.get_loop().call_soon_threadsafe(_wake, woken)

    def add_callback(self, call: Callable[[], object]) -> None:
        """Register a callback, which must not raise: it is called when the future is done, now if that is so."""
        with self._guard.again():
            self._callbacks_count += 1
            self._called.clear()

        def run(_: object) -> None:
            self._calling = threading.get_ident()
            try:
                call()
            finally:
                with self._guard.again():
                    self._calling = None
                    self._callbacks_count -= 1
                    if not self._callbacks_count:
                        self._called.set()

        self._inner.add_done_callback(run)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
