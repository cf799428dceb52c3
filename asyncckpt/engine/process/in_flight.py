"""What a Saver has in flight, and how it ended: its calls, the futures that nobody has asked yet, its statistics."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from asyncckpt.engine.process.background import check_may_wait
from asyncckpt.engine.process.future import CheckpointFuture
from asyncckpt.errors import DeadlineError, SaveCancelledError
from asyncckpt.guard import Guard
from asyncckpt.model.result import SaveResult, SaverStatistics
from asyncckpt.signals import STEP_S, uninterrupted
from asyncckpt.staging.pool import pool


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
            # Keep no future whose outcome was reported: its error's traceback holds the whole save.
            if self._pid == os.getpid():
                with self._guard:
                    self._futures = [future for future in self._futures if not future.done() or future._claim.is_open]

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
