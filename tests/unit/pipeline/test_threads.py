"""Pools: what is submitted runs; nothing that runs on a pool waits for that pool."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait

import pytest

from asyncckpt.engine.process.background import Background
from asyncckpt.errors import IOFailedError, UsageError
from asyncckpt.pipeline import threads
from asyncckpt.pipeline.threads import IdleEndingThreads

DEADLINE_S = 20


start_thread = threading.Thread.start


def interrupted_start(thread: threading.Thread) -> None:
    start_thread(thread)
    signal.raise_signal(signal.SIGINT)


def waits_for_own(pool: IdleEndingThreads) -> Callable[[], int]:
    """A task that waits for another one of its pool."""

    def task() -> int:
        return pool.submit(threading.get_ident).result(DEADLINE_S)

    return task


def waits_in_a_loop(pool: IdleEndingThreads) -> Callable[[], int]:
    """The same by an event loop, which is what a wait by asyncio comes down to."""

    async def work() -> int:
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(pool, threading.get_ident), DEADLINE_S)

    return lambda: asyncio.run(work())


@pytest.mark.parametrize("make", [waits_for_own, waits_in_a_loop])
def test_a_wait_for_the_own_pool_raises_in_tests(make: Callable[[IdleEndingThreads], Callable[[], int]]) -> None:
    pool = IdleEndingThreads("test", 1)
    with pytest.raises(RuntimeError, match="a thread of the pool 'test' waits for a task of that pool"):
        pool.submit(make(pool)).result(DEADLINE_S)


def test_a_wait_raises_in_tests_also_where_another_thread_has_begun_the_task() -> None:
    pool = IdleEndingThreads("test", 2)
    may_end = threading.Event()

    def task() -> int:
        inner = pool.submit(may_end.wait, DEADLINE_S)
        try:
            return inner.result(DEADLINE_S)
        finally:
            may_end.set()

    with pytest.raises(RuntimeError, match="waits for a task of that pool"):
        pool.submit(task).result(DEADLINE_S)


def test_a_task_may_hand_over_to_its_pool_and_wait_for_others() -> None:
    """What is submitted and not waited for is allowed, and so are waits for another pool and for what is done."""
    pool, other = IdleEndingThreads("test", 2), IdleEndingThreads("other", 1)
    done = threading.Event()

    def task() -> int:
        handed_over: Future[int] = pool.submit(lambda: 3)
        assert wait([handed_over], DEADLINE_S).done
        done.set()
        return handed_over.result() + other.submit(lambda: 4).result(DEADLINE_S)

    assert pool.submit(task).result(DEADLINE_S) == 7
    assert done.is_set()


@pytest.mark.parametrize("others_count", [0, 1])
def test_an_interrupt_loses_the_future_and_not_the_task(monkeypatch: pytest.MonkeyPatch, others_count: int) -> None:
    pool = IdleEndingThreads("test", 2)
    may_end, ran = threading.Event(), threading.Event()
    others = [pool.submit(may_end.wait, DEADLINE_S) for _ in range(others_count)]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(ran.set)
    may_end.set()
    assert all(future.result(DEADLINE_S) for future in others)
    assert ran.wait(DEADLINE_S)


def test_a_thread_is_started_under_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A destructor may run in it before it says that it has begun. Whoever starts it cannot wait for it meanwhile."""
    pool, background = IdleEndingThreads("test", 1), Background()
    begun: list[bool] = []
    real_start, real_begin = threading.Thread.start, threading.Thread._set_native_id  # type: ignore[attr-defined]

    async def work() -> int:
        return 2

    def start(thread: threading.Thread) -> None:
        with pytest.raises(UsageError, match="waiting for the test in the middle of another call"):
            background.run(work, "the test")
        real_start(thread)

    def begin(thread: threading.Thread) -> None:
        if thread.name != "test" or pool.is_current_thread():  # Not one of an earlier test that begins only now.
            begun.append(pool.is_current_thread())
            for guard in (pool._guard, background._guard):
                begun.append(guard.acquire(blocking=False))
                guard.release()
        real_begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(threading.Thread, "_set_native_id", begin)
    assert pool.submit(lambda: 1).result(DEADLINE_S) == 1
    assert begun == [True, True, True]
    assert background.run(work, "the test") == 2
    assert begun[3:6] == [False, True, True]


def test_nobody_waits_for_a_thread_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where training has all cores, that takes milliseconds."""
    pool, may_begin, began = IdleEndingThreads("late", 1), threading.Event(), list[bool]()
    real_begin = threading.Thread._set_native_id  # type: ignore[attr-defined]

    def begin(thread: threading.Thread) -> None:
        if thread.name == "late":
            began.append(may_begin.wait(DEADLINE_S))
        real_begin(thread)

    monkeypatch.setattr(threading.Thread, "_set_native_id", begin)
    tasks = [pool.submit(lambda: 1), pool.submit(lambda: 2)]
    (thread,) = pool._threads
    joining = threading.Thread(target=thread.join)
    joining.start()
    assert joining.is_alive()
    assert not thread.is_alive()
    may_begin.set()
    assert [task.result(DEADLINE_S) for task in tasks] == [1, 2]
    joining.join(DEADLINE_S)
    assert (began, joining.is_alive()) == ([True], False)


def test_all_tasks_that_wait_for_a_thread_that_cannot_be_started_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, others = IdleEndingThreads("test", 1), list[Future[int]]()

    def start(thread: threading.Thread) -> None:
        others.append(pool.submit(int))  # As another thread may do meanwhile.
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(IOFailedError, match="thread 'test' cannot be started"):
            pool.submit(int)
    with pytest.raises(IOFailedError, match="thread 'test' cannot be started"):
        others[0].result(DEADLINE_S)
    assert pool.submit(int).result(DEADLINE_S) == 0


def test_the_pool_never_has_more_threads_than_it_may_after_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = IdleEndingThreads("test", 1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted_start)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                pool.submit(int)
            for thread in pool._threads.copy():  # While one is there, none is started.
                thread.join(DEADLINE_S)
    running, most = 0, 0
    guard = threading.Lock()

    def task() -> None:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        wait([Future()], 0.02)
        with guard:
            running -= 1

    for future in [pool.submit(task) for _ in range(5)]:
        future.result(DEADLINE_S)
    assert most == 1


def test_a_cancelled_task_does_not_run() -> None:
    pool = IdleEndingThreads("test", 1)
    may_go_on = threading.Event()
    ran: list[int] = []
    first = pool.submit(may_go_on.wait, DEADLINE_S)
    second = pool.submit(ran.append, 1)
    assert second.cancel()
    may_go_on.set()
    assert first.result(DEADLINE_S)
    assert pool.submit(lambda: ran).result(DEADLINE_S) == []


def test_a_done_task_keeps_nothing_of_its_call() -> None:
    class Large:
        pass

    pool = IdleEndingThreads("test", 1)
    large = Large()
    found = weakref.ref(large)
    future = pool.submit(id, large)
    future.result(DEADLINE_S)
    del large
    pool.submit(lambda: None).result(DEADLINE_S)  # Its thread has let go of the first one by now.
    gc.collect()
    assert found() is None


def test_a_forked_child_starts_anew() -> None:
    """Also when a thread of the pool forks: in the child that is no thread of the pool."""
    pool = IdleEndingThreads("test", 1)

    def fork() -> int:
        child = os.fork()
        if child == 0:
            try:
                os._exit(pool.submit(lambda: 40).result(DEADLINE_S))
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert pool.submit(fork).result(DEADLINE_S) == 40


AT_EXIT = """
import atexit, os, time
from asyncckpt.engine.process.background import workers

def late():
    time.sleep(0.5)
    os.write(1, b"ended")

atexit.register(lambda: workers.submit(late))
"""


AT_ONCE = """
import atexit, os, threading, time
from asyncckpt.engine.process.background import workers

begin = threading.Thread._bootstrap

def late(thread):
    time.sleep(0.5 if thread.name.startswith("asyncckpt") else 0)
    begin(thread)

threading.Thread._bootstrap = late
who = b"parent "
atexit.register(lambda: os.write(1, who))
workers.submit(lambda: os.write(1, b"ended "))
"""
IN_CHILD = """
if os.fork():
    os.wait()
else:
    who = b"child "
    workers.submit(lambda: os.write(1, b"begun "))
"""

IN_TURN = (
    AT_ONCE
    + """
from asyncckpt.engine.process.background import committer, retainer, writers

begin_next = lambda: writers.submit(lambda: committer.submit(lambda: os.write(1, b"last ")))
retainer.submit(begin_next)
"""
)


@pytest.mark.parametrize("script", [AT_ONCE, AT_ONCE + IN_CHILD], ids=["exit", "fork"])
def test_the_interpreter_waits_for_a_thread_that_has_not_begun(script: str) -> None:
    """And only then calls handlers of its exit, as with a thread that has."""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, b"")
    words = ran.stdout.split()
    assert [word for word in words if word in (b"ended", b"parent")] == [b"ended", b"parent"]
    child = [] if script == AT_ONCE else [b"begun", b"child"]
    assert [word for word in words if word in (b"begun", b"child")] == child


IMPORTED_LATE = """
import atexit, concurrent.futures.thread, tempfile, torch

def late():
    import asyncckpt
    with tempfile.TemporaryDirectory() as folder:
        asyncckpt.save(folder, {"x": torch.ones(1)}, step=1)
        print(asyncckpt.list_steps(folder))

atexit.register(late)
"""


def test_a_handler_of_the_exit_may_be_the_first_to_import_us() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTED_LATE], capture_output=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"[1]\n", b"")


def test_the_interpreter_waits_for_threads_that_start_each_other() -> None:
    ran = subprocess.run([sys.executable, "-c", IN_TURN], capture_output=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"ended last parent ", b"")


def test_the_interpreter_waits_for_no_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was listed when the end looked, and failed to start behind that."""
    monkeypatch.setattr(threads, "_ends", threading.Event())
    pool = IdleEndingThreads("test", 1)
    pool._threads.add(threads._Thread(target=lambda: None))
    ending = threading.Thread(target=threads._await_begun, daemon=True)
    ending.start()
    assert threads._ends.wait(DEADLINE_S)
    pool._threads.clear()
    ending.join(DEADLINE_S)
    assert not ending.is_alive()


def test_what_cannot_be_started_before_the_main_thread_has_ended_runs_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 refuses threads from the begin of its end on, and then calls what waits for others."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threads, "_ends", ending := threading.Event())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ending.set()
    assert IdleEndingThreads("test", 1).submit(threading.get_ident).result(DEADLINE_S) == threading.get_ident()


def test_the_interpreter_waits_for_what_a_handler_of_its_exit_has_started() -> None:
    """Else a thread that is inside of torch when the interpreter is gone ends the process with SIGABRT."""
    ran = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"ended", b"")
