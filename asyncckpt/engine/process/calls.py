"""The calls that use a Saver's directory now: closing waits for those of other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from asyncckpt.engine.process.background import check_may_wait
from asyncckpt.errors import DeadlineError
from asyncckpt.signals import STEP_S, uninterrupted


class Calls:
    """Which threads are in a call. Nothing here survives a fork: the child's calls are refused before."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._changed = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a call of this thread."""
        with self._changed:
            self._threads.append(threading.get_ident())
        try:
            yield
        finally:
            with self._changed:
                self._threads.remove(threading.get_ident())
                self._changed.notify_all()

    def is_in_one(self) -> bool:
        """Return whether this thread is in a call."""
        return threading.get_ident() in self._threads

    def wait_for_all(self, what: str, timeout: float) -> None:
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
