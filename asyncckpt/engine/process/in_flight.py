"""The calls that use something which another thread may close meanwhile, such as the directory of a Saver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncckpt.engine.process.background import check_may_wait
from asyncckpt.errors import DeadlineError
from asyncckpt.signals import STEP_S, uninterrupted


class RunningCalls:
    """The threads that are in such a call now."""

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
