"""The threads of the background: who may wait where."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from asyncckpt.engine.process.background import (
    WORKERS_MAX,
    Job,
    background,
    check_may_wait,
    result_of,
    rewriters,
    workers,
    writers,
)
from asyncckpt.errors import DeadlineError, IndeterminateError, UsageError
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.staging.chunks import chunk_buffers

DEADLINE_S = 20


def check() -> BaseException | None:
    try:
        check_may_wait("a save")
    except UsageError as error:
        return error
    return None


def test_a_wait_is_refused_on_the_background_thread_and_on_workers() -> None:
    found: Future[BaseException | None] = Future()

    async def work() -> None:
        found.set_result(check())

    background.submit(Job(run=work, fail=found.set_exception))
    for error in (found.result(DEADLINE_S), workers.submit(check).result(DEADLINE_S)):
        assert "cannot wait for a save in a filter or callback" in str(error)


def test_a_wait_is_allowed_where_no_save_needs_the_thread() -> None:
    assert check() is None
    assert rewriters.submit(check).result(DEADLINE_S) is None
    assert "cannot wait for" in str(writers.submit(check).result(DEADLINE_S))


def test_what_comes_of_work_is_waited_for_up_to_a_deadline() -> None:
    """Also where the work itself runs into one, which is no end of the wait."""
    future: Future[int] = Future()
    with pytest.raises(DeadlineError, match="a removal did not end within 0 s"):
        result_of(future, "a removal", 0)
    future.set_exception(TimeoutError("of the work"))
    with pytest.raises(TimeoutError, match="of the work"):
        result_of(future, "a removal", 0)
    assert result_of(writers.submit(int), "a removal", DEADLINE_S) == 0


def test_work_that_has_not_ended_may_succeed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    async def work() -> int:
        begun.set()
        while not may_end.is_set():
            await asyncio.sleep(0.001)
        return 1

    def result_when_begun(*arguments: Any) -> Any:
        assert begun.wait(DEADLINE_S)
        return result_of(*arguments)

    monkeypatch.setattr("asyncckpt.engine.process.background.result_of", result_when_begun)
    monkeypatch.setattr("asyncckpt.engine.process.background.SAVE_DEADLINE_S", 0.01)
    with pytest.raises(IndeterminateError, match=r"did not end within 0\.02 s, and may succeed yet") as raised:
        background.run(work, "a removal")
    with pytest.raises(DeadlineError, match="a removal has not ended"):
        raised.value.resolve()
    may_end.set()
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        with contextlib.suppress(DeadlineError):
            assert raised.value.resolve()
            return
    raise AssertionError("it did not end")


@pytest.mark.parametrize("tasks_count", [1, WORKERS_MAX, 2 * WORKERS_MAX])
def test_workers_that_all_write_through_the_chunk_buffers_end(tasks_count: int) -> None:
    """Each waits for its writes while the others wait for the buffers."""
    wrote: list[int] = []
    all_here = threading.Barrier(min(tasks_count, WORKERS_MAX))

    def task(index: int) -> None:
        if index < all_here.parties:
            all_here.wait(DEADLINE_S)
        with chunk_buffers.borrow(CHUNK_BYTES) as buffers:
            for address in buffers.addresses:
                writers.submit(wrote.append, address).result(DEADLINE_S)

    for future in [workers.submit(task, index) for index in range(tasks_count)]:
        future.result(DEADLINE_S)
    assert len(wrote) == 2 * tasks_count


def test_what_is_submitted_while_the_loop_ends_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a destructor, which the collector may run there."""
    ran: Future[str] = Future()
    second: list[Job] = []
    plain = asyncio.BaseEventLoop.shutdown_asyncgens

    async def work() -> None:
        pass

    async def late() -> None:
        ran.set_result(threading.current_thread().name)

    async def shutdown_asyncgens(loop: asyncio.BaseEventLoop) -> None:
        if background.is_current_thread() and not second:
            second.append(Job(run=late, fail=ran.set_exception))
            background.submit(second[0])
        await plain(loop)

    monkeypatch.setattr(asyncio.BaseEventLoop, "shutdown_asyncgens", shutdown_asyncgens)
    background.submit(Job(run=work, fail=ran.set_exception))
    assert ran.result(DEADLINE_S) == "asyncckpt-background"
