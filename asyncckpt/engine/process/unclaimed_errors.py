"""Errors of background saves that nobody has asked for yet: raised by the next call, or printed at exit; never lost."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Any

from asyncckpt.engine.process.future import CheckpointFuture
from asyncckpt.errors import DeadlineError


class OpenErrors:
    """Futures of one Saver whose outcome somebody still has to hear of."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._futures: list[CheckpointFuture[Any]] = []

    def watch(self, future: CheckpointFuture[Any]) -> None:
        with self._guard:
            self._futures.append(future)
        _reporters.add(self)

    def raise_first(self) -> None:
        """Raise the oldest error that nobody was told of; it will not be raised again."""
        with self._guard:
            futures = list(self._futures)
        try:
            for future in futures:
                error = future.take_unclaimed_error()
                if error is not None:
                    raise error
        finally:
            self._drop_settled()

    def _drop_settled(self) -> None:
        """Keep no future longer than somebody may want to hear of it: its error's traceback holds the whole save."""
        with self._guard:
            self._futures = [f for f in self._futures if not f.done() or _is_open(f)]
            if not self._futures:
                _reporters.discard(self)

    def in_flight(self) -> list[CheckpointFuture[Any]]:
        with self._guard:
            return [future for future in self._futures if not future.done()]

    def wait(self, timeout: float) -> None:
        """Wait until nothing is in flight, whatever comes of it. DeadlineError."""
        for future in self.in_flight():
            future._check_can_end()
        until = time.monotonic() + timeout
        for future in self.in_flight():
            try:
                future._inner.exception(max(0.0, until - time.monotonic()))
            except TimeoutError:
                raise DeadlineError(f"{future!r} did not end within {timeout} s") from None

    def forget(self) -> None:
        """In a forked child, these are the parent's to wait for and to hear of."""
        self._guard = threading.Lock()
        self._futures = []

    def report(self) -> None:
        """Print what nobody was told of."""
        for future in self._futures:
            error = future.take_unclaimed_error()
            if error is not None:
                print(f"asyncckpt: {future!r} failed and nobody asked: {error}", file=sys.stderr)


_reporters: set[OpenErrors] = set()


def _is_open(future: CheckpointFuture[Any]) -> bool:
    return future._inner.exception() is not None and not future._claimed


def _forget_in_child() -> None:
    for reporter in _reporters:
        reporter.forget()
    _reporters.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _report_all() -> None:
    # Runs after the background thread was joined, so every outcome is known.
    for reporter in _reporters:
        reporter.report()
