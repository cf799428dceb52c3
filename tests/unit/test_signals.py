from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asyncckpt.signals import STEP_S, uninterrupted, wait_in_steps

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1]


class Raised(Exception):
    """What a handler raises."""


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that were handled; all but SIGINT raise."""
    seen: list[int] = []

    def note(number: int, _: Any) -> None:
        seen.append(number)
        if number != signal.SIGINT:
            raise Raised(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_runs_behind_the_outermost_block(handled: list[int], number: int) -> None:
    before, ended = handlers(), []
    try:
        with uninterrupted:
            with uninterrupted:
                os.kill(os.getpid(), number)
                assert handled == []
            assert handled == []
            ended.append(True)
    except Raised:
        assert number != signal.SIGINT
    assert ended
    assert handled == [number]
    assert handlers() == before


def test_what_a_handler_raises_keeps_no_other_one_from_running(handled: list[int]) -> None:
    @uninterrupted
    def run() -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.raise_signal(number)

    with pytest.raises(Raised):
        run()
    assert sorted(handled) == sorted([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])


def test_an_error_of_the_block_is_seen_beside_that_of_the_handler(handled: list[int]) -> None:
    @uninterrupted
    def run() -> None:
        signal.raise_signal(signal.SIGUSR1)
        raise ValueError("of the block")

    with pytest.raises(Raised) as caught:
        run()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_look_lets_handlers_run_and_the_block_is_protected_still(handled: list[int]) -> None:
    with uninterrupted:
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Raised):
            uninterrupted.look()
        signal.raise_signal(signal.SIGINT)
        assert handled == [signal.SIGUSR1]
    assert handled == [signal.SIGUSR1, signal.SIGINT]


def test_other_threads_are_left_alone(handled: list[int]) -> None:
    def run() -> None:
        with uninterrupted:
            seen.append(signal.getsignal(signal.SIGINT))
            uninterrupted.look()

    seen: list[Any] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_a_handler_that_was_set_in_the_block_stays(handled: list[int]) -> None:
    def other(*_: Any) -> None: ...

    with uninterrupted:
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_signals_without_a_handler_of_python_are_left_alone(handled: list[int], handler: Any) -> None:
    signal.signal(signal.SIGUSR1, handler)
    with uninterrupted:
        assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_function_is_protected(handled: list[int]) -> None:
    @uninterrupted
    def run(value: int, *, more: int) -> int:
        """Docstring."""
        signal.raise_signal(signal.SIGINT)
        return value + more + len(handled)

    assert run(1, more=2) == 3
    assert handled == [signal.SIGINT]
    assert run.__doc__ == "Docstring."


def test_a_wait_is_ended_by_a_handler_between_its_steps(handled: list[int]) -> None:
    lock = threading.Lock()
    lock.acquire()
    signal.setitimer(signal.ITIMER_REAL, 2 * STEP_S)
    with pytest.raises(Raised), uninterrupted:
        wait_in_steps(lambda seconds: lock.acquire(timeout=seconds), 60.0)
    assert lock.locked()


@pytest.mark.parametrize("timeout", [0.0, STEP_S / 2, 2.5 * STEP_S])
def test_a_wait_ends_in_time(timeout: float) -> None:
    begun = time.monotonic()
    assert not wait_in_steps(lambda seconds: time.sleep(seconds), timeout)
    assert timeout <= time.monotonic() - begun
    assert wait_in_steps(lambda seconds: True, timeout)


def test_what_was_waited_for_is_returned_though_a_signal_has_come(handled: list[int]) -> None:
    """Else it would be taken, and nobody would know."""
    lock = threading.Lock()

    def wait(seconds: float) -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return lock.acquire(timeout=seconds)

    taken = False
    with pytest.raises(Raised), uninterrupted:
        taken = wait_in_steps(wait, 60.0)
    assert taken


def test_a_child_is_protected_too(handled: list[int]) -> None:
    def run() -> None:
        child = os.fork()
        if child == 0:
            with uninterrupted:
                signal.raise_signal(signal.SIGINT)
                protected = handled == []
            os._exit(0 if protected and handled else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    codes: list[int] = []
    run()
    thread = threading.Thread(target=run)  # In the child it is the main thread.
    thread.start()
    thread.join()
    assert codes == [0, 0]


def test_a_child_of_another_thread_is_not_in_the_block_of_the_main_one(handled: list[int]) -> None:
    def run() -> None:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGINT)
            os._exit(0 if handled else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    codes: list[int] = []
    thread = threading.Thread(target=run)
    with uninterrupted:
        thread.start()
        thread.join()
    assert codes == [0]
