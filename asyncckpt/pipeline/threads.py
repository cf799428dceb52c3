"""Threads of our own for the background.

concurrent.futures' executors refuse work when the interpreter has begun to end, which is just when a save in flight
must be finished. These threads are not daemons, so the interpreter joins them, and they end as soon as they have
nothing to do, so it never waits in vain. Each has a name; none dies with an unreported error, because every error goes
into a Future.

From Python 3.12 on, no thread can be started any more once the interpreter has begun to end. What is submitted then, by
a handler of the exit, runs in place. Before, it runs on new threads, which nobody else joins: a last handler does. A
thread that is still inside of torch when the interpreter is gone would end the process with SIGABRT.

Nothing that runs on such a pool waits for that pool: if all of its threads did so, none would ever go on. The test
suite forbids it, and `check_may_wait` refuses it to what the user runs there.

Nobody waits for a thread to begin: that takes 0.1 ms on an idle machine, milliseconds where training has all cores. But
from the end of the interpreter on, all do: it joins only what has begun, and a thread may start the next one and end.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from asyncckpt.errors import IOFailedError
from asyncckpt.signals import STEP_S, Guard
from asyncckpt.system import register_at_fork

P = ParamSpec("P")
T = TypeVar("T")


JOIN_S_MAX = 3600.0

_pools: weakref.WeakSet[IdleEndingThreads] = weakref.WeakSet()
_ends = threading.Event()  # Set when the interpreter begins to end.


class IdleEndingThreads(Executor):
    """At most `threads_max` threads, made when there is work, gone when there is none."""

    def __init__(self, name: str, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._start_anew()
        _pools.add(self)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run fn(*args, **kwargs) on one of the threads. IOFailedError when there is none and none can be started."""
        task = _Task(partial(fn, *args, **kwargs))
        with Guard():  # Of this call alone: what runs in it cannot wait for a thread that is not started yet.
            thread: _Thread | None = None
            with self._guard:
                self._waiting.append(task)
                if len(self._threads) < self._threads_max:
                    thread = _Thread(target=self._run, name=self._name, daemon=False)
                    self._threads.add(thread)
            if thread is not None:
                self._start(thread, task)
        return task.future

    def is_current_thread(self) -> bool:
        """Return whether the current thread is one of this pool, even if it has not come to a task yet."""
        own = threading.get_ident()
        return any(thread.ident == own for thread in self._threads.copy())

    def _start(self, thread: _Thread, task: _Task) -> None:
        """Start a listed thread; raise when it cannot be started and no other one can do the task.

        Outside the guard: this waits for the new thread, and a destructor that runs there may use the pool.
        """
        try:
            start_thread(thread)
        except BaseException as error:
            with self._guard:
                self._threads.discard(thread)
                left = () if self._threads else tuple(self._waiting)
                if left:
                    self._waiting.clear()
            if _is_exiting() and isinstance(error, IOFailedError):
                for other in left:
                    other.run()
                return
            for other in left:
                if other is not task:
                    other.fail(error)
            if task in left or not isinstance(error, Exception):
                raise
        else:
            if _ends.is_set():
                thread.await_begun(JOIN_S_MAX)

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._guard:
                if not self._waiting:
                    self._threads.discard(thread)
                    return
                task = self._waiting.popleft()
            task.run()
            del task  # Its result may be large.

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: the threads end by themselves."""

    def _start_anew(self) -> None:
        self._guard = Guard()
        self._waiting: deque[_Task] = deque()
        self._threads: set[_Thread] = set()


class _Thread(threading.Thread):
    """A thread whose `start` does not wait until it has begun."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._started = _Begun()  # Of threading: `start` waits for it.

    def await_begun(self, timeout: float | None) -> bool:
        return threading.Event.wait(self._started, timeout)

    def join(self, timeout: float | None = None) -> None:
        self.await_begun(timeout)
        super().join(timeout)


class _Begun(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


@dataclass(eq=False)
class _Task:
    """A call on a pool, and its outcome."""

    call: Callable[[], Any] | None
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        call, self.call = self.call, None  # What it holds is let go with it.
        assert call is not None, "a task runs once"
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def _is_exiting() -> bool:
    """Return whether the interpreter has begun to end: it waits for threads, or calls the handlers of the exit."""
    is_ending = _ends.is_set() or getattr(threading, "_SHUTTING_DOWN", False)  # Private; from Python 3.12 on.
    return is_ending or not threading.main_thread().is_alive()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; IOFailedError when the system gives none."""
    try:
        thread.start()
    except RuntimeError as error:
        raise IOFailedError(
            f"thread {thread.name!r} cannot be started: {error}", hint="see ulimit -u, and free memory"
        ) from error


def _start_anew_in_child() -> None:
    """Forget the threads in a forked child, where they do not exist."""
    for pool in _pools:
        pool._start_anew()


register_at_fork(after_in_child=_start_anew_in_child)


def register_at_exit(function: Callable[[], None]) -> None:
    """Let a function run before the interpreter joins threads. What atexit has runs after that."""
    register = getattr(threading, "_register_atexit", None)  # Private; Python 3.10 to 3.14 have it.
    if register is not None:
        try:
            register(function)
        except RuntimeError:  # The interpreter ends already.
            _ends.set()


def _await_begun() -> None:
    """Wait until all threads have begun, or cannot: before Python 3.13 the interpreter joins only those that have."""
    _ends.set()
    until = time.monotonic() + JOIN_S_MAX
    for pool in tuple(_pools):
        for thread in pool._threads.copy():
            while thread in pool._threads and not thread.await_begun(STEP_S) and time.monotonic() < until:
                continue


register_at_exit(_await_begun)


@atexit.register
def _join_all() -> None:
    """Wait for threads that handlers of the exit have started: it runs after all that were registered after it."""
    names = {pool._name for pool in _pools}
    for thread in threading.enumerate():
        if thread.name in names and thread is not threading.current_thread():
            thread.join(JOIN_S_MAX)
