"""The background: one asyncio loop in one named thread that works off saves in the order they came.

Commits of other threads (compactions, DCP) run in the same loop, beside the saves: `run`.

Its thread ends when it has nothing left to do, like those of the pools (pipeline/threads.py), where all blocking work
runs:

    copiers     what the host copies after the call of a save
    workers     filters and writes shard files of saves, reads those of loads
    writers     single writes of what runs on a worker
    committer   the steps of a commit, which wait for nothing but the disk
    rewriters   compactions and removals, which wait for commits
    retainer    retention
    uploaders   copies of checkpoints in object stores
    senders     files that a save writes to an object store
    talkers     messages with other ranks: sending and receiving block
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from asyncckpt.errors import DeadlineError, IndeterminateError, SaveCancelledError, UsageError, closing_beside
from asyncckpt.options import SAVE_DEADLINE_S
from asyncckpt.pipeline.threads import IdleEndingThreads
from asyncckpt.signals import Guard, check_holds_none, uninterrupted, wait_until_done
from asyncckpt.system import register_at_fork

T = TypeVar("T")

WORKERS_MAX = 4
COMMITTERS_MAX = 8
# They read and write whole checkpoints; more of them at once would take the disk from saves and end no sooner.
REWRITERS_MAX = 2
SENDERS_MAX = 4
UPLOADERS_MAX = 2  # One for each Saver; the threads of obstore move the bytes.
TALKERS_MAX = 3  # One sends, one receives, one waits for what another rank has left.
BEGIN_BEHIND_S = 0.0005  # Whoever has started the thread is at the end of a call that training waits for.

_loop_thread = IdleEndingThreads("asyncckpt-background", 1)
copiers = IdleEndingThreads("asyncckpt-copier", 1)  # Apart: its priority may be low.
workers = IdleEndingThreads("asyncckpt-worker", WORKERS_MAX)
writers = IdleEndingThreads("asyncckpt-writer", WORKERS_MAX)
committer = IdleEndingThreads("asyncckpt-commit", COMMITTERS_MAX)
rewriters = IdleEndingThreads("asyncckpt-rewrite", REWRITERS_MAX)
retainer = IdleEndingThreads("asyncckpt-retention", 1)
uploaders = IdleEndingThreads("asyncckpt-upload", UPLOADERS_MAX)
senders = IdleEndingThreads("asyncckpt-send", SENDERS_MAX)
talkers = IdleEndingThreads("asyncckpt-ranks", TALKERS_MAX)


@dataclass(eq=False)
class Job:
    """Work for the background. `fail` gets the reason when the thread could not even begin with it.

    beside: it begins at once; the others run one after the other.
    """

    run: Callable[[], Coroutine[Any, Any, None]]
    fail: Callable[[BaseException], None]
    is_begun: bool = False
    beside: bool = False


class Background:
    """Runs jobs. A job reports its own failure; what still escapes is a bug and is printed."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._jobs: list[Job] = []
        self.is_busy = False
        self._wake: Callable[[], object] | None = None

    def submit(self, job: Job) -> None:
        """Queue a job; starts the thread when it is not running, IOFailedError when it cannot be started."""
        with Guard():  # What runs in this call cannot wait for a thread that is not started yet.
            with self._guard:
                self._jobs.append(job)
                is_first, self.is_busy = not self.is_busy, True
                if self._wake is not None:
                    self._wake()
            if is_first:
                try:
                    _loop_thread.submit(self._run)  # Also for a destructor that runs while the loop is closed.
                except BaseException as error:
                    self.withdraw(job)
                    self._fail_all(error)
                    raise

    def withdraw(self, job: Job) -> bool:
        """Take back a job after an interrupted or failed `submit`; False when it has begun or knows that it is lost."""
        with self._guard.again():  # Also where the submit was refused to a destructor.
            if job in self._jobs:
                self._jobs.remove(job)
            return not job.is_begun

    @uninterrupted
    def run(self, work: Callable[[], Coroutine[Any, Any, T]], what: str) -> T:
        """Run a coroutine beside the jobs, and wait for its end, also when interrupted. See check_may_wait.

        IndeterminateError when it still runs after twice SAVE_DEADLINE_S: then it may succeed yet.
        """
        check_may_wait(what)
        future: Future[T] = Future()

        async def run() -> None:
            try:
                future.set_result(await work())
            except BaseException as error:
                future.set_exception(error)

        job = Job(run=run, fail=future.set_exception, beside=True)
        try:
            self.submit(job)
            return result_of(future, what, SAVE_DEADLINE_S)
        except BaseException as error:
            if not self.withdraw(job) and not wait_until_done(future, SAVE_DEADLINE_S):
                late = f"{what} did not end within {2 * SAVE_DEADLINE_S} s, and may succeed yet"
                raise IndeterminateError(late, resolve=partial(_has_succeeded, future, what)) from error
            if isinstance(error, DeadlineError) and future.done():
                return future.result(0)
            raise

    def is_current_thread(self) -> bool:
        return _loop_thread.is_current_thread()

    def _run(self) -> None:
        time.sleep(BEGIN_BEHIND_S)
        work = self._work()
        try:
            asyncio.run(work)
        except BaseException as error:  # A loop needs descriptors, and there may be none left.
            work.close()
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        """End the jobs that the thread, which has failed, leaves undone."""
        with self._guard:
            taken, self._jobs, self.is_busy, self._wake = self._jobs, [], False, None
            for job in taken:
                job.is_begun = True
        for job in taken:
            job.fail(error)

    async def _work(self) -> None:
        woken = asyncio.Event()
        running: dict[Job, asyncio.Task[None]] = {}
        while True:
            woken.clear()
            with self._guard:
                self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set)
                begun = self._take_due(is_free=all(job.beside for job in running))
                if not begun and not running:
                    self.is_busy, self._wake = False, None
                    return
            for job in begun:
                running[job] = asyncio.get_running_loop().create_task(_run_job(job, running, woken))
            await woken.wait()

    def _take_due(self, *, is_free: bool) -> list[Job]:
        """Return the jobs that begin now: all that run beside others, and the next of the rest when none of it runs."""
        due = [job for job in self._jobs if job.beside]
        rest = [job for job in self._jobs if not job.beside]
        if is_free and rest:
            due.append(rest.pop(0))
        self._jobs = rest
        for job in due:
            job.is_begun = True
        return due

    def forget(self) -> None:
        """Start over in a forked child."""
        self.__init__()  # type: ignore[misc]


async def _run_job(job: Job, running: dict[Job, asyncio.Task[None]], ended: asyncio.Event) -> None:
    pid = os.getpid()
    try:
        await job.run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        if pid != os.getpid():
            os._exit(0)  # A child that a callback has forked: the loop, and what wakes it, is its parent's.
        del running[job]
        ended.set()


def _has_succeeded(future: Future[Any], what: str) -> bool:
    """Return whether work has succeeded. DeadlineError while it runs."""
    if not future.done():
        raise DeadlineError(f"{what} has not ended")
    error = future.exception(0)
    return error.resolve() if isinstance(error, IndeterminateError) else error is None


background = Background()


def check_may_wait(what: str, *pools: IdleEndingThreads, holding: Guard | None = None) -> None:
    """Raise UsageError on the threads that run saves, filters and callbacks: what they wait for needs them; and in the
    middle of another call, where a destructor or a signal handler may be.

    pools: on which else it runs. holding: what is given up for the time of the wait.
    """
    needed = (_loop_thread, workers, writers, committer, retainer, talkers, *pools)
    if any(pool.is_current_thread() for pool in needed):
        why = "it runs on a thread that the wait is for"
        raise UsageError(f"cannot wait for {what} in a filter or callback: {why}", hint="wait on a thread of your own")
    check_holds_none(what, but=holding)


def result_of(future: Future[T], what: str, deadline_s: float) -> T:
    """Wait for work on another thread and return what it returns, or raise what it raises. DeadlineError."""
    if not wait_until_done(future, deadline_s):
        raise DeadlineError(f"{what} did not end within {deadline_s} s")
    return future.result(0)


def result_or_end(future: Future[T], what: str, deadline_s: float, cancel: Callable[[], object]) -> T:
    """The same, but wait for its end, soon after `cancel`, also when interrupted: it has open files, and may commit."""
    try:
        return result_of(future, what, deadline_s)
    except BaseException as error:
        if not future.done():
            cancel()
            with contextlib.suppress(SaveCancelledError), closing_beside(error, f"{what} failed"):
                result_of(future, what, deadline_s)
        raise


async def run_on(threads: Executor, function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking call on a pool."""
    return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)


register_at_fork(after_in_child=background.forget)
