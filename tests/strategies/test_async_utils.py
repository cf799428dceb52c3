"""Requests and their queue on one rank, and on ranks that are threads."""

from __future__ import annotations

import os
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncckpt.coordination.agreement import Agreement
from asyncckpt.errors import DeadlineError, PeerError, UsageError
from asyncckpt.strategies.async_utils import AsyncCaller, AsyncCallsQueue, AsyncRequest, ThreadAsyncCaller
from bench.memory_channel import MemoryExchange
from tests.worlds.gates import Gate

pytestmark = pytest.mark.any_core
LONG_S = 60.0


class CancellableGate(Gate):
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.open()


def request(fn: Callable[..., Any] | None, *finalize: Callable[[], Any]) -> AsyncRequest:
    return AsyncRequest(fn, (), list(finalize))


def fail() -> None:
    raise OSError("the disk is full")


def test_a_request_has_the_fields_and_defaults_of_the_interface() -> None:
    made = AsyncRequest(print, (1,), [])
    assert AsyncRequest._fields == (
        "async_fn",
        "async_fn_args",
        "finalize_fns",
        "async_fn_kwargs",
        "preload_fn",
        "is_frozen",
        "call_idx",
    )
    assert made[3:] == ({}, None, False, 0)


def test_a_frozen_request_takes_no_further_function() -> None:
    made = request(None)
    made.add_finalize_fn(fail)
    assert made.finalize_fns == [fail]
    frozen = made.freeze()
    assert (made.is_frozen, frozen.is_frozen) == (False, True)
    with pytest.raises(UsageError, match="frozen"):
        frozen.add_finalize_fn(fail)


def test_execute_sync_preloads_runs_and_finalizes() -> None:
    seen: list[Any] = []
    made = AsyncRequest(
        lambda *args, **named: seen.append((args, named)),
        (1, "replaced", 3),
        [lambda: seen.append("first"), lambda: seen.append("second")],
        {"name": 4},
        preload_fn=lambda: "preloaded",
    )
    made.execute_sync()
    assert seen == [((1, "preloaded", 3), {"name": 4}), "first", "second"]


def test_execute_sync_raises_and_does_not_finalize() -> None:
    seen: list[str] = []
    with pytest.raises(OSError, match="the disk is full"):
        request(fail, lambda: seen.append("finalized")).execute_sync()
    assert seen == []
    request(None, lambda: seen.append("the next one")).execute_sync()
    assert seen == ["the next one"]


def test_a_preload_needs_three_arguments() -> None:
    with pytest.raises(UsageError, match="arguments"):
        AsyncRequest(print, (1, 2), [], preload_fn=lambda: 0).execute_sync()


def test_async_fn_runs_on_a_thread_of_this_process_and_finalizing_on_the_callers() -> None:
    seen: dict[str, tuple[int, str]] = {}

    def note(name: str) -> None:
        seen[name] = (os.getpid(), threading.current_thread().name)

    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(note, ("call",), [lambda: note("finalize")]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert seen["call"] == (os.getpid(), "asyncckpt-async-call")
    assert seen["finalize"] == (os.getpid(), threading.current_thread().name)


@pytest.mark.parametrize("persistent", [False, True])
def test_calls_are_finalized_in_their_order(persistent: bool) -> None:
    gates = [CancellableGate(), CancellableGate(), CancellableGate()]
    order: list[int] = []
    queue = AsyncCallsQueue(persistent)
    for number, gate in enumerate(gates):
        assert queue.schedule_async_request(request(gate, lambda n=number: order.append(n))) == number
    gates[0].reached.wait(LONG_S)
    assert gates[1].reached.wait(LONG_S if not persistent else 0.0) is not persistent
    assert queue.get_num_unfinalized_calls() == 3
    gates[1].open()
    gates[2].open()
    assert queue.maybe_finalize_async_calls() == []
    assert order == []
    gates[0].open()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    assert order == [0, 1, 2]
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()


def test_a_call_that_is_done_is_finalized_without_waiting() -> None:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request(None))
    assert queue.maybe_finalize_async_calls() == [0]


@pytest.mark.parametrize(
    ("fn", "finalize", "persistent"),
    [
        pytest.param(fail, (), False, id="call"),
        pytest.param(fail, (), True, id="call of a worker"),
        pytest.param(None, (fail,), False, id="finalize function"),
    ],
)
def test_what_fails_ends_its_call_only(fn: Any, finalize: tuple[Any, ...], persistent: bool) -> None:
    seen: list[str] = []
    queue = AsyncCallsQueue(persistent)
    queue.schedule_async_request(request(fn, *finalize, lambda: seen.append("never")))
    queue.schedule_async_request(request(lambda: None, lambda: seen.append("second")))
    with pytest.raises(OSError, match="the disk is full"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert seen == ["second"]


def test_a_worker_that_is_told_to_exit_is_an_error_and_no_endless_loop() -> None:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request(exit_thread))
    with pytest.raises(UsageError, match="SystemExit: 3"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0


def exit_thread() -> None:
    raise SystemExit(3)


def test_a_blocking_wait_has_a_deadline() -> None:
    gate = CancellableGate()
    queue = AsyncCallsQueue(deadline=0.05)
    queue.schedule_async_request(request(gate))
    with pytest.raises(DeadlineError, match=r"0\.05 s"):
        queue.maybe_finalize_async_calls(blocking=True)
    gate.open()


def test_an_interrupted_wait_leaves_the_call_to_be_finalized(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    gate, seen = CancellableGate(), []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request(gate, lambda: seen.append("finalized")))
    with monkeypatch.context() as patched:
        patched.setattr("asyncckpt.strategies.async_utils.wait_until_done", interrupt)
        with pytest.raises(KeyboardInterrupt):
            queue.maybe_finalize_async_calls(blocking=True)
    gate.open()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert seen == ["finalized"]


def test_an_error_of_preload_is_the_calls() -> None:
    queue = AsyncCallsQueue()
    assert queue.schedule_async_request(AsyncRequest(print, (1, 2, 3), [], preload_fn=fail)) == 0
    with pytest.raises(OSError, match="the disk is full"):
        queue.maybe_finalize_async_calls()


Old = namedtuple("Old", ["async_fn", "async_fn_args", "finalize_fns", "is_frozen"])
New = namedtuple("New", [*AsyncRequest._fields, "validate"])


@pytest.mark.parametrize(
    "foreign",
    [
        lambda fn, end: Old(fn, (5,), [end], False),
        lambda fn, end: New(fn, [5], [end], None, None, False, 9, True),
    ],
)
def test_foreign_requests_are_taken_by_their_fields(foreign: Any) -> None:
    seen: list[Any] = []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(foreign(seen.append, lambda: seen.append("end")))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert seen == [5, "end"]


@pytest.mark.parametrize("wrong", [None, (1, 2, 3), namedtuple("Wrong", ["async_fn"])(print)])
def test_what_is_no_request_is_refused(wrong: Any) -> None:
    queue = AsyncCallsQueue()
    with pytest.raises(UsageError, match="other fields"):
        queue.schedule_async_request(wrong)
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.schedule_async_request(request(None)) == 0


def test_close_finalizes_all_and_raises_the_first_error() -> None:
    seen: list[int] = []
    queue = AsyncCallsQueue()
    for number, fn in enumerate([lambda: None, fail, lambda: None]):
        queue.schedule_async_request(request(fn, lambda n=number: seen.append(n)))
    with pytest.raises(OSError, match="the disk is full"):
        queue.close()
    assert seen == [0, 2]


@pytest.mark.parametrize("persistent", [False, True])
def test_an_abort_forgets_calls_and_cancels_what_can_be(persistent: bool) -> None:
    gate, seen = CancellableGate(), []
    queue = AsyncCallsQueue(persistent)
    queue.schedule_async_request(request(gate, lambda: seen.append(0)))
    queue.schedule_async_request(request(lambda: seen.append(1)) if persistent else request(None))
    gate.reached.wait(LONG_S)
    queue.close(abort=True)
    assert gate.cancelled
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert seen == []


def test_an_abort_cancels_what_is_under_way_behind_a_call_that_has_not_begun() -> None:
    first, second = CancellableGate(), CancellableGate()
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(request(first))
    queue.schedule_async_request(request(second))
    first.reached.wait(LONG_S)
    queue.close(abort=True)
    assert first.cancelled
    assert second.cancelled


def test_the_callers_interface_is_abstract() -> None:
    assert AsyncCaller.__abstractmethods__ == {
        "schedule_async_call",
        "is_current_async_call_done",
        "sync_all_async_calls",
        "close",
    }
    with pytest.raises(TypeError):
        AsyncCaller()  # type: ignore[abstract]


def test_a_caller_alone_agrees_with_itself() -> None:
    caller = ThreadAsyncCaller()
    assert caller.is_current_async_call_done()
    assert caller.sync_all_async_calls(is_alive=False)
    assert not caller.sync_all_async_calls(is_alive=True)
    gate = CancellableGate()
    caller.schedule_async_call(request(gate))
    assert not caller.is_current_async_call_done()
    gate.open()
    assert caller.is_current_async_call_done(blocking=True)
    caller.close()


# -- ranks that are threads ------------------------------------------------------------------------------------------


def queues(ranks_count: int, **options: Any) -> list[AsyncCallsQueue]:
    """Queues that find each other by a channel in memory."""
    made = []
    exchange = MemoryExchange(ranks_count)
    for rank in range(ranks_count):
        queue = AsyncCallsQueue(**options)
        agreement = Agreement(exchange.channel(rank), deadline_s=LONG_S)
        queue._ranks.get = lambda agreement=agreement: agreement  # type: ignore[method-assign]
        made.append(queue)
    return made


def test_no_rank_finalizes_before_all_have_ended() -> None:
    zero, one = queues(2)
    gate = CancellableGate()
    zero.schedule_async_request(request(None))
    one.schedule_async_request(request(gate))
    assert zero.maybe_finalize_async_calls() == []
    assert one.maybe_finalize_async_calls() == []
    gate.open()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(one.maybe_finalize_async_calls, blocking=True)
        assert zero.maybe_finalize_async_calls(blocking=True) == [0]
        assert other.result(LONG_S) == [0]


def test_a_rank_whose_save_has_failed_does_not_wait_for_one_that_never_came() -> None:
    class Failed(CancellableGate):
        def __call__(self) -> None:
            pass

        def error(self) -> Exception:
            return UsageError("the save of rank 1 was refused")

    zero, _ = queues(2)
    zero.schedule_async_request(request(Failed()))
    begun = time.monotonic()
    with pytest.raises(UsageError, match="rank 1 was refused"):
        zero.maybe_finalize_async_calls(blocking=True)
    assert time.monotonic() - begun < LONG_S / 2


def test_without_dist_a_rank_looks_at_itself() -> None:
    zero, one = queues(2)
    zero.schedule_async_request(request(None))
    one.schedule_async_request(request(CancellableGate()))
    assert zero.maybe_finalize_async_calls(no_dist=True) == [0]
    assert one.maybe_finalize_async_calls(no_dist=True) == []
    one.close(abort=True)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_is_raised_on_all_and_the_next_call_is_fine(failing: int) -> None:
    seen: list[tuple[int, int]] = []

    def run(rank: int, queue: AsyncCallsQueue) -> BaseException:
        queue.schedule_async_request(request(fail if rank == failing else None, lambda: seen.append((rank, 0))))
        queue.schedule_async_request(request(None, lambda: seen.append((rank, 1))))
        with pytest.raises((OSError, PeerError)) as caught:
            queue.maybe_finalize_async_calls(blocking=True)
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
        return caught.value

    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(run, rank, queue) for rank, queue in enumerate(queues(3))]
        errors = [future.result(LONG_S) for future in futures]
    assert isinstance(errors.pop(failing), OSError)
    assert all(isinstance(error, PeerError) and error.rank == failing for error in errors)
    assert all("the disk is full" in str(error) for error in errors)
    assert sorted(seen) == [(0, 1), (1, 1), (2, 1)]


def test_a_deadline_on_one_rank_ends_the_wait_of_all() -> None:
    quick, slow = queues(2)
    slow._deadline_s = 0.05
    gate = CancellableGate()
    quick.schedule_async_request(request(None))
    slow.schedule_async_request(request(gate))
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(slow.maybe_finalize_async_calls, blocking=True)
        with pytest.raises(PeerError, match=r"did not end within 0\.05 s") as caught:
            quick.maybe_finalize_async_calls(blocking=True)
        assert caught.value.rank == 1
        with pytest.raises(DeadlineError):
            other.result(LONG_S)
    gate.open()
