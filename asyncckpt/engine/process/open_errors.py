"""The outcomes of a Saver that nobody has asked for yet."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from asyncckpt.engine.process.future import CheckpointFuture
from asyncckpt.guard import Guard
from asyncckpt.signals import uninterrupted


class OpenErrors:
    """Futures of one Saver whose outcome was not reported yet. In a forked child there are none."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._futures: list[CheckpointFuture[Any]] = []
        self._pid = os.getpid()

    def watch(self, future: CheckpointFuture[Any]) -> None:
        with self._guard:
            self._futures.append(future)

    @uninterrupted
    def raise_first(self) -> None:
        """Raise the oldest error that was not reported; it will not be raised again."""
        try:
            for future in self._watched():
                error = future._claim.take()
                if error is not None:
                    uninterrupted.if_raised(partial(self.watch, future))
                    raise error
        finally:
            self._drop_settled()

    def wait(self, timeout: float) -> None:
        """Wait until nothing is in flight, whatever comes of it. DeadlineError."""
        in_flight = [future for future in self._watched() if not future.done()]
        for future in in_flight:
            future._check_can_end()
        until = time.monotonic() + timeout
        for future in in_flight:
            future._wait_done(timeout, until=until)

    def are_settled(self) -> bool:
        """Return whether nothing is in flight."""
        return all(future.done() for future in self._watched())

    def _watched(self) -> list[CheckpointFuture[Any]]:
        if self._pid != os.getpid():  # The guard may be held by a thread that is not here.
            return []
        with self._guard:
            return list(self._futures)

    def _drop_settled(self) -> None:
        """Keep no future whose outcome was reported: its error's traceback holds the whole save."""
        if self._pid == os.getpid():
            with self._guard:
                self._futures = [future for future in self._futures if not future.done() or future._claim.is_open]
