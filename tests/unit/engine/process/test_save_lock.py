"""Who may hold the save lock beside whom, who is refused at once, and what is left of a call that was interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.engine.process.save_lock import SaveLock, Ticket
from asyncckpt.errors import DeadlineError, SaveInProgressError, UsageError
from asyncckpt.options import BusyPolicy

pytestmark = pytest.mark.any_core

WAIT_S_MAX = 60
PLACE = Path("/checkpoints")
ELSEWHERE = -1  # No thread of the tests.


def ticket(kind: Any = "save", *, thread: int | None = None, is_captured: bool = False) -> Ticket:
    return Ticket(kind=kind, path=PLACE, step=1, thread=thread, is_captured=is_captured)


def captured() -> Ticket:
    return ticket(is_captured=True)


@pytest.fixture
def lock() -> Iterator[SaveLock]:
    lock = SaveLock()
    yield lock
    assert lock._asking == []


def hold(lock: SaveLock, *tickets: Ticket) -> None:
    for item in tickets:
        lock._held.append(item)


@pytest.mark.parametrize(
    ("held", "may_queue"),
    [
        ([], True),
        ([captured()], True),
        ([captured(), captured()], True),
        ([ticket()], False),
        ([ticket(thread=ELSEWHERE)], False),
        ([ticket("load")], False),
        ([ticket("load", thread=ELSEWHERE)], False),
        ([ticket("staging", thread=ELSEWHERE)], False),
        ([captured(), ticket(thread=ELSEWHERE)], False),
    ],
)
def test_saves_queue_behind_captured_saves_only(lock: SaveLock, held: list[Ticket], may_queue: bool) -> None:
    hold(lock, *held)
    mine = ticket()
    if may_queue:
        assert lock.acquire(mine, on_busy="queue", deadline_s=0)
        assert lock.in_flight() == [*held, mine]
    else:
        with pytest.raises(DeadlineError, match=r"of step 1 in '/checkpoints' did not end within 0 s"):
            lock.acquire(mine, on_busy="queue", deadline_s=0)
        assert mine not in lock.in_flight()


@pytest.mark.parametrize("kind", ["save", "staging", "load"])
@pytest.mark.parametrize("thread", [None, ELSEWHERE])
def test_a_state_is_staged_beside_all_but_loads(lock: SaveLock, kind: Any, thread: int | None) -> None:
    """Another save of DCP may still write what was staged before."""
    hold(lock, ticket(kind, thread=thread))
    if kind == "load":
        with pytest.raises(DeadlineError):
            lock.acquire(ticket("staging"), on_busy="queue", deadline_s=0)
    else:
        assert lock.acquire(ticket("staging"), on_busy="queue", deadline_s=0)


@pytest.mark.parametrize("held", [ticket(), ticket("load"), ticket(thread=ELSEWHERE)])
def test_the_others_wait_for_all(lock: SaveLock, held: Ticket) -> None:
    hold(lock, held)
    assert not lock.acquire(ticket(), on_busy="skip", deadline_s=0)
    with pytest.raises(SaveInProgressError):
        lock.acquire(ticket(), on_busy="raise", deadline_s=0)
    with pytest.raises(DeadlineError):
        lock.acquire(ticket(), on_busy="wait", deadline_s=0)
    assert lock.in_flight() == [held]


@pytest.mark.parametrize("on_busy", ["wait", "queue"])
@pytest.mark.parametrize("kind", ["save", "load", "staging"])
def test_a_thread_does_not_wait_for_itself(lock: SaveLock, on_busy: Any, kind: Any) -> None:
    hold(lock, ticket(kind, thread=threading.get_ident()))
    with pytest.raises(UsageError, match="it runs on this thread"):
        lock.acquire(ticket(), on_busy=on_busy, deadline_s=WAIT_S_MAX)


@pytest.mark.parametrize("how", ["release", "hand_over"])
def test_whoever_waits_goes_on(lock: SaveLock, how: str) -> None:
    """When the one in the way has ended, or has been captured and goes on in the background."""
    first, second = ticket(thread=ELSEWHERE), ticket()
    hold(lock, first)
    thread = threading.Thread(target=lambda: lock.acquire(second, on_busy="queue", deadline_s=WAIT_S_MAX))
    thread.start()
    until = time.monotonic() + WAIT_S_MAX
    while not lock._asking and time.monotonic() < until:
        pass
    assert lock._asking == [second]
    lock.release(first) if how == "release" else lock.hand_over(first, is_captured=True)
    thread.join(WAIT_S_MAX)
    assert lock.in_flight() == ([second] if how == "release" else [first, second])


def test_a_ticket_is_given_back_once(lock: SaveLock) -> None:
    first, second = ticket(), ticket()
    hold(lock, first, second)
    for _ in range(2):
        lock.release(first)
        assert lock.in_flight() == [second]
    lock.release(ticket())  # One that was never taken.


def test_nothing_is_left_of_a_call_that_was_interrupted(lock: SaveLock, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> bool:
        raise KeyboardInterrupt

    hold(lock, ticket(thread=ELSEWHERE))
    monkeypatch.setattr(lock._changed, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt), lock.held("load", PLACE, 2, busy=BusyPolicy("wait")):
        raise AssertionError("it is not held")
    assert len(lock.in_flight()) == 1


@pytest.mark.parametrize("on_busy", ["queue", "wait", "skip", "raise"])
def test_nobody_passes_one_that_asks_for_longer(lock: SaveLock, on_busy: Any) -> None:
    """Else a load would wait for as long as another thread queues saves."""
    first, load, late = captured(), ticket("load"), ticket()
    hold(lock, first)

    def ask(asking: Ticket, how: Any) -> None:
        asking.thread = threading.get_ident()
        if lock.acquire(asking, on_busy=how, deadline_s=WAIT_S_MAX):
            order.append(asking)
            lock.release(asking)

    order: list[Ticket] = []
    threads = [threading.Thread(target=ask, args=arguments) for arguments in ((load, "wait"), (late, on_busy))]
    threads[0].start()
    wait_until(lambda: lock._asking == [load])
    if on_busy in ("queue", "wait"):
        threads[1].start()
        wait_until(lambda: lock._asking == [load, late])
    elif on_busy == "skip":
        assert not lock.acquire(late, on_busy=on_busy, deadline_s=0)
    else:
        lock._held.clear()
        with pytest.raises(SaveInProgressError, match="a load of step 1"):
            lock.acquire(late, on_busy=on_busy, deadline_s=0)
    lock.release(first)
    with lock._changed:
        lock._changed.notify_all()
    for thread in threads:
        if thread.ident is not None:
            thread.join(WAIT_S_MAX)
    assert order == ([load, late] if on_busy in ("queue", "wait") else [load])


def test_a_call_in_the_middle_of_another_one_passes_that(lock: SaveLock) -> None:
    """Of a signal handler: the call that it interrupts goes on behind it."""
    own = threading.get_ident()
    hold(lock, captured())
    lock._asking.append(ticket(thread=own))
    try:
        assert lock.acquire(ticket(thread=own), on_busy="queue", deadline_s=0)
    finally:
        lock._asking.clear()


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S_MAX
    while not is_so():
        assert time.monotonic() < until
