"""The background: one asyncio loop in one named thread that works off saves in the order they came.

The thread is not a daemon and ends when it has nothing left to do, so the interpreter's exit joins a save in flight and
never waits for an idle thread. Blocking stages run on `workers`, for the same reason not on asyncio's own executor.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from asyncckpt.errors import UsageError
from asyncckpt.pipeline.threads import IdleEndingThreads, start_thread

THREAD_NAME = "asyncckpt-background"
WORKERS_MAX = 4

workers = IdleEndingThreads("asyncckpt-worker", WORKERS_MAX)
# For single writes of what runs on a worker, which waits for them.
writers = IdleEndingThreads("asyncckpt-writer", WORKERS_MAX)


@dataclass(eq=False)
class Job:
    """Work for the background. `lose` is told why the thread could not even begin with it."""

    run: Callable[[], Coroutine[Any, Any, None]]
    lose: Callable[[BaseException], None]
    is_begun: bool = False


class Background:
    """Runs jobs one after the other. A job reports its own failure; what still escapes is a bug and is printed."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Queue a job; starts the thread when it is not running, IOFailedError when it cannot be started."""
        with self._guard:
            if self._thread is None:
                self._thread = start_thread(self._run, THREAD_NAME)
            self._jobs.append(job)

    def withdraw(self, job: Job) -> bool:
        """After an interrupted or failed `submit`: False when the job has begun or has been told that it is lost."""
        with self._guard:
            if job in self._jobs:
                self._jobs.remove(job)
            return not job.is_begun

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def is_busy(self) -> bool:
        return self._thread is not None

    def _run(self) -> None:
        work = self._work()
        try:
            asyncio.run(work)
        except BaseException as error:  # A loop needs descriptors, and there may be none left.
            work.close()
            for job in self._take_all():
                job.lose(error)

    def _take_all(self) -> Collection[Job]:
        """The jobs that this thread, which has failed, leaves undone."""
        with self._guard:
            if self._thread is not threading.current_thread():
                return ()
            taken, self._jobs, self._thread = self._jobs, deque(), None
            for job in taken:
                job.is_begun = True
            return taken

    async def _work(self) -> None:
        while True:
            with self._guard:
                if self._thread is not threading.current_thread():
                    return  # Whoever started this thread was interrupted before he knew of it.
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
                job.is_begun = True
            try:
                await job.run()
            except BaseException:
                sys.excepthook(*sys.exc_info())

    def forget(self) -> None:
        """Start anew in a forked child."""
        self._guard = threading.Lock()
        self._jobs = deque()
        self._thread = None


background = Background()


def check_may_wait(what: str) -> None:
    """UsageError on the threads that run saves, filters and callbacks: what they wait for needs them."""
    if background.is_current_thread() or workers.is_current_thread():
        raise UsageError(
            f"waiting for {what} on the background thread would wait for ever", hint="wait on a thread of your own"
        )


def _say_what_is_awaited() -> None:
    if background.is_busy:
        from asyncckpt.engine.lock import save_lock

        waiting = ", ".join(str(ticket) for ticket in save_lock.in_flight())
        print(f"asyncckpt: the interpreter ends after the {waiting}", file=sys.stderr)


os.register_at_fork(after_in_child=background.forget)
# Runs before threads are joined; atexit would run after. Private, so its absence only costs the message.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(_say_what_is_awaited)
