from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asyncckpt.signals import STEP_S, Guard, uninterrupted, wait_in_steps

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGWINCH]


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


def test_a_wait_protects_itself(handled: list[int]) -> None:
    """What it has taken may else be lost between its last line and that of its caller."""
    handled_in_it: list[int] = []

    def wait(seconds: float) -> bool:
        signal.raise_signal(signal.SIGINT)
        handled_in_it.extend(handled)
        return True

    assert wait_in_steps(wait, STEP_S)
    assert handled_in_it == []
    assert handled == [signal.SIGINT]


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


def test_a_child_that_is_forked_in_a_block_hears_signals(handled: list[int]) -> None:
    with uninterrupted:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGINT)
            heard = len(handled)
            with uninterrupted:
                signal.raise_signal(signal.SIGINT)
                heard *= 10 if len(handled) == 1 else 0
            os._exit(heard + len(handled))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 12
    assert handled == []


@pytest.mark.parametrize("room", ["_put_off", "_end"])
def test_a_handler_may_call_the_library_while_handlers_are_replaced(handled: list[int], room: str) -> None:
    """Its block is within the one that begins or ends, which loses no handler by it."""
    before, seen = handlers(), []

    def nested(number: int, frame: Any) -> None:
        with uninterrupted:
            seen.append(frame.f_code.co_name)

    for place in range(1, 5000, 7):
        signal.signal(signal.SIGUSR2, nested)
        calls = 0

        def trace(frame: Any, event: str, arg: Any, place: int = place) -> Any:
            nonlocal calls
            if frame.f_code.co_name != room:
                return None
            frame.f_trace_opcodes = True
            calls += event == "opcode"
            if calls == place and event == "opcode":
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR2)
            return trace

        sys.settrace(trace)
        try:
            with uninterrupted:
                pass
        finally:
            sys.settrace(None)
        assert signal.getsignal(signal.SIGUSR2) is nested
        assert handlers() == before
        assert (uninterrupted._depth, uninterrupted._set_back, uninterrupted._noted) == (0, [], [])
        if calls < place:
            break
    assert "trace" in seen, "all were put off"
    assert calls < place, "not all places were tried"


def test_the_flags_of_a_signal_stay(handled: list[int]) -> None:
    """What asyncio sets, for example: system calls go on behind a handler."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    assert not restarts(signal.SIGUSR1)
    signal.siginterrupt(signal.SIGUSR1, False)
    assert restarts(signal.SIGUSR1)
    with uninterrupted:
        assert restarts(signal.SIGUSR1)
    assert restarts(signal.SIGUSR1)


def restarts(number: int) -> bool:
    """Return whether system calls go on behind a handler of this signal: a read by C, which does not repeat it."""
    reading, writing = os.pipe()
    libc, main = ctypes.CDLL(None, use_errno=True), threading.main_thread().ident
    assert main is not None

    def wake() -> None:
        time.sleep(0.05)
        signal.pthread_kill(main, number)
        time.sleep(0.05)
        os.write(writing, b"x")

    thread = threading.Thread(target=wake)
    thread.start()
    count = libc.read(reading, ctypes.create_string_buffer(1), 1)
    thread.join()
    for fd in (reading, writing):
        os.close(fd)
    return bool(count == 1)


def test_a_handler_of_c_over_one_of_python_stays(handled: list[int]) -> None:
    program = """
import faulthandler, os, signal, sys, tempfile
from asyncckpt.signals import uninterrupted
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(True))
with tempfile.TemporaryFile() as file:
    faulthandler.register(signal.SIGUSR1, file, chain=True)
    with uninterrupted:
        signal.raise_signal(signal.SIGUSR1)
        inside = file.tell(), len(seen)
    signal.raise_signal(signal.SIGUSR1)
    assert inside[0] > 0 and inside[1] == 0, inside
    assert file.tell() > inside[0] and len(seen) == 2, (file.tell(), seen)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_look_gives_a_lock_up_meanwhile(handled: list[int]) -> None:
    changed, taken = threading.Condition(Guard()), []

    def take() -> None:
        with changed:
            taken.append(True)

    def handle(*_: Any) -> None:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(10.0)
        raise Raised

    signal.signal(signal.SIGUSR1, handle)
    with changed:
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Raised):
            uninterrupted.look(changed)
        assert taken
        assert changed._is_owned()  # type: ignore[attr-defined]


def test_a_guard_puts_handlers_off(handled: list[int]) -> None:
    def hold(taken: Any) -> None:
        with taken:
            signal.raise_signal(signal.SIGUSR1)
            assert handled == []

    guard = Guard()
    for taken in (guard, guard.again(), threading.Condition(guard)):
        handled.clear()
        with pytest.raises(Raised):
            hold(taken)
        assert handled == [signal.SIGUSR1]
        assert not guard.is_held_here()


def test_the_end_of_a_child_is_handled_behind_the_block() -> None:
    """As of torch's DataLoader, whose handler raises when a worker was killed."""
    ended: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, _: ended.append(number))
    try:
        with uninterrupted:
            subprocess.run([sys.executable, "-c", ""], check=True)
            assert ended == []
        assert ended == [signal.SIGCHLD]
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_handler_that_raises_while_others_are_put_off_ends_the_block_at_its_next_look() -> None:
    """So a finalizer is never kept from what it gives back."""
    put_off, done = uninterrupted._put_off, []

    def interrupted() -> None:
        if not done:
            done.append("raised")
            raise KeyboardInterrupt
        put_off()

    @uninterrupted
    def run() -> None:
        done.append("begun")
        uninterrupted.look()

    uninterrupted._put_off = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        uninterrupted._put_off = put_off  # type: ignore[method-assign]
    assert done == ["raised", "begun"]
    with uninterrupted:
        uninterrupted.look()
