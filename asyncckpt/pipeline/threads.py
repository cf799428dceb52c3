"""Threads of our own for the background.

concurrent.futures' executors refuse work once the interpreter has begun to end, which is just when a save in flight
must be finished. These threads are not daemons, so the interpreter joins them, and they end as soon as they have
nothing to do, so it never waits in vain. Each has a name; none dies with an unreported error, because every error goes
into a Future.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from asyncckpt.errors import IOFailedError

P = ParamSpec("P")
T = TypeVar("T")


class IdleEndingThreads(Executor):
    """At most `threads_max` threads, made when there is work, gone when there is none."""

    def __init__(self, name: str, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._guard = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._threads_count = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run fn(*args, **kwargs) on one of the threads. IOFailedError when there is none and none can be started."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._guard:
            self._waiting.append(work)
            start = self._threads_count < self._threads_max
            self._threads_count += start
        if start:
            try:
                start_thread(self._run, self._name)
            except BaseException:
                with self._guard:
                    self._threads_count -= 1
                    if self._threads_count == 0:  # Else the other ones will do it.
                        self._waiting.remove(work)
                        raise
        return future

    def _run(self) -> None:
        while True:
            with self._guard:
                if not self._waiting:
                    self._threads_count -= 1
                    return
                work = self._waiting.popleft()
            work()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to do: the threads end by themselves."""

    def forget(self) -> None:
        """Start anew in a forked child, where the threads do not exist."""
        self._guard = threading.Lock()
        self._waiting = deque()
        self._threads_count = 0


def start_thread(function: Callable[[], Any], name: str) -> threading.Thread:
    """Start a named non-daemon thread; IOFailedError when the system gives none."""
    thread = threading.Thread(target=function, name=name, daemon=False)
    try:
        thread.start()
    except RuntimeError as error:
        raise IOFailedError(
            f"thread {name!r} cannot be started: {error}", hint="see ulimit -u, and free memory"
        ) from error
    return thread
