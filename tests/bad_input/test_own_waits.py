"""Callbacks, filters and signal handlers that would wait for themselves are refused at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt.dcp import StorageWriter
from asyncckpt.engine.process.background import workers
from asyncckpt.errors import UsageError
from tests.worlds.gates import Gate
from tests.worlds.saves import save_one

DEADLINE_S = 30
RAISE, WAIT = asyncckpt.BusyPolicy("raise", DEADLINE_S), asyncckpt.BusyPolicy("wait", DEADLINE_S)
AT_ONCE_S = 10.0  # Far below the deadlines of the waits, far above what a slow machine needs.
FOR_EVER = "it runs on a thread that the wait is for"


def called_back(future: Any, function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns or raises in the done callback of a save, and how long it takes."""
    answers: list[tuple[Any, float]] = []
    done = threading.Event()

    def callback(_: Any) -> None:
        begun = time.monotonic()
        answer: Any
        try:
            answer = function()
        except BaseException as error:
            answer = error
        answers.append((answer, time.monotonic() - begun))
        done.set()

    future.add_done_callback(callback)
    assert done.wait(2 * DEADLINE_S), "the callback never ended"
    return answers[0]


def assert_refused(answer: tuple[Any, float]) -> None:
    error, seconds = answer
    assert type(error) is UsageError, error
    assert FOR_EVER in str(error)
    assert seconds < AT_ONCE_S


@pytest.fixture
def saver(tmp_path: Path, gate: Gate) -> Any:
    state = {"x": torch.ones(1 << 10)}
    with asyncckpt.Saver(path=tmp_path, tensors=state, filter_func=gate, on_busy=RAISE) as saver:
        yield saver
        gate.open()


def test_a_callback_whose_save_finds_no_arena_is_refused(saver: asyncckpt.Saver, gate: Gate) -> None:
    """Two arenas: of the saves that a callback queues, the third would wait for the background to free one."""
    first = saver.save_async(1)

    def queue_three() -> None:
        for step in (10, 11, 12):
            saver.save_async(step, on_busy="queue")

    gate.open()
    assert_refused(called_back(first, queue_three))
    saver.wait_idle(DEADLINE_S)
    assert asyncckpt.list_steps(saver.path) == [1, 10, 11]


def load_waiting(saver: asyncckpt.Saver) -> None:
    loader = asyncckpt.Loader(saver.path, tensors={"x": torch.zeros(1 << 10)}, step=1, on_busy=WAIT)
    loader.load()


def load_async_waiting(saver: asyncckpt.Saver) -> None:
    loader = asyncckpt.Loader(saver.path, tensors={"x": torch.zeros(1 << 10)}, step=1, on_busy=WAIT)
    loader.load_async()


def save_by_dcp(saver: asyncckpt.Saver) -> None:
    """It waits for saves in flight, always."""
    writer = StorageWriter(f"{saver.path}-dcp")
    dcp.save({"x": torch.ones(4)}, storage_writer=writer, no_dist=True)


WAITS: dict[str, Callable[[asyncckpt.Saver], Any]] = {
    "save": lambda saver: saver.save(7, on_busy="queue"),
    "save_async": lambda saver: saver.save_async(7, on_busy="wait"),
    "wait_idle": lambda saver: saver.wait_idle(DEADLINE_S),
    "close": lambda saver: saver.close(),
    "load": load_waiting,
    "load_async": load_async_waiting,
    "dcp": save_by_dcp,
}


@pytest.mark.parametrize("name", WAITS)
def test_a_callback_that_would_wait_for_the_next_save_is_refused(saver: asyncckpt.Saver, gate: Gate, name: str) -> None:
    first = saver.save_async(1)
    second = saver.save_async(2, on_busy="queue")
    gate.open()
    answer = called_back(first, lambda: WAITS[name](saver))
    if name == "dcp":  # DCP puts errors into one of its own.
        assert FOR_EVER in repr(answer[0].failures), answer
        assert answer[1] < AT_ONCE_S
    else:
        assert_refused(answer)
    assert second.result(DEADLINE_S).step == 2


@pytest.mark.parametrize("wait", ["result", "exception", "wait_staged"])
def test_a_callback_that_would_wait_for_a_future_is_refused(saver: asyncckpt.Saver, gate: Gate, wait: str) -> None:
    first = saver.save_async(1)
    second = saver.save_async(2, on_busy="queue")
    if wait == "wait_staged":
        second._staged.clear()  # As while devices still copy.
    gate.open()
    assert_refused(called_back(first, lambda: getattr(second, wait)(DEADLINE_S)))
    assert second.result(DEADLINE_S).step == 2


def test_a_callback_whose_save_does_not_fit_is_refused(tmp_path: Path) -> None:
    """It would go the blocking way, which waits for the background."""
    state = {"x": torch.ones(1 << 10)}
    with asyncckpt.Saver(path=tmp_path, tensors=state, host_memory_limit=1) as saver:
        with pytest.warns(RuntimeWarning):
            first = saver.save_async(1)
        assert_refused(called_back_on_the_background(tmp_path / "other", lambda: saver.save_async(2)))
        assert first.result(DEADLINE_S).step == 1
    assert asyncckpt.list_steps(tmp_path) == [1]


def called_back_on_the_background(path: Path, function: Callable[[], Any]) -> tuple[Any, float]:
    """called_back, of a save that is still in flight when the callback is added."""
    gate = Gate()
    with asyncckpt.Saver(path=path, tensors={"y": torch.ones(3)}, filter_func=gate) as saver:
        future = saver.save_async(0)
        threading.Timer(0.05, gate.open).start()
        return called_back(future, function)


def test_a_callback_may_load_when_nothing_is_in_flight(tmp_path: Path) -> None:
    target = torch.zeros(1 << 10)
    save_one(tmp_path, tensors={"x": torch.ones(1 << 10)})

    def load() -> int:
        return asyncckpt.Loader(tmp_path, tensors={"x": target}, on_busy="wait").load().step

    assert called_back_on_the_background(tmp_path / "other", load)[0] == 1
    assert bool((target == 1).all())


def test_a_filter_that_would_wait_for_its_save_is_refused(tmp_path: Path) -> None:
    """Filters run on the workers that the save needs."""
    waited: list[BaseException] = []
    handed: list[asyncckpt.SaveFuture] = []
    have_future = threading.Event()

    def wait(blocks: Any) -> Any:
        assert have_future.wait(DEADLINE_S)
        for call in (lambda: handed[0].result(DEADLINE_S), lambda: saver.save_async(2, on_busy="wait")):
            try:
                call()
            except UsageError as error:
                waited.append(error)
        return blocks

    saver = asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, filter_func=wait, on_busy=RAISE)
    with saver:
        handed.append(saver.save_async(1))
        have_future.set()
        assert handed[0].result(2 * DEADLINE_S).step == 1
    assert len(waited) == 2
    assert all(FOR_EVER in str(error) for error in waited)


def test_a_signal_handler_runs_behind_the_capture_that_it_would_interrupt(tmp_path: Path) -> None:
    captured, saved = 0, []

    class Interrupted:
        """State whose capture is interrupted by a signal."""

        def state_dict(self) -> dict[str, torch.Tensor]:
            nonlocal captured
            if not captured:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.05)
            captured += 1
            return {"a": torch.ones(3)}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            del state

    def handler(*_: Any) -> None:
        assert captured == 1
        saved.append(saver.save(99, on_busy="wait").step)

    saver = asyncckpt.Saver(path=tmp_path, tensors={"o": Interrupted()}, on_busy=RAISE)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with saver:
            assert saver.save_async(1).result(DEADLINE_S).step == 1
            assert saver.save(2, on_busy="wait").step == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert saved == [99]


async def follow_one(path: Path, state: dict[str, torch.Tensor]) -> None:
    async for update in asyncckpt.follow(path, until=1):
        await update.load(tensors=state)


@pytest.mark.parametrize("kind", ["load_async", "follow"])
def test_what_interrupts_the_start_of_a_load_cannot_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It has the lock already, and no other thread knows of it yet."""
    state = {"x": torch.ones(3)}
    answers: list[float] = []
    submit = workers.submit

    def interrupted(function: Any, *arguments: Any) -> Any:
        begun = time.monotonic()
        with pytest.raises(UsageError, match="it runs on this thread"):
            saver.save(2, on_busy=WAIT)
        answers.append(time.monotonic() - begun)
        return submit(function, *arguments)

    with asyncckpt.Saver(path=tmp_path, tensors=state, on_busy=RAISE) as saver:
        saver.save(1)
        with monkeypatch.context() as patched:
            patched.setattr(workers, "submit", interrupted)
            if kind == "follow":
                patched.setattr(asyncckpt.follower, "_in_thread", in_place)
                asyncio.run(follow_one(tmp_path, state))
            else:
                asyncckpt.Loader(tmp_path, tensors=state).load_async().result(DEADLINE_S)
        assert saver.save(2, on_busy=WAIT).step == 2
    assert answers[0] < AT_ONCE_S


def test_a_filter_that_follows_is_refused(tmp_path: Path) -> None:
    """Were all workers to wait for a worker so, none would go on."""
    state = {"x": torch.ones(3)}
    answers: list[tuple[Any, float]] = []

    def follow(blocks: Any) -> Any:
        begun = time.monotonic()
        with pytest.raises(UsageError) as refused:
            asyncio.run(follow_one(tmp_path, state))
        answers.append((refused.value, time.monotonic() - begun))
        return blocks

    save_one(tmp_path, staged=True, tensors=state, filter_func=follow)
    assert_refused(answers[0])


async def in_place(function: Callable[[], Any]) -> Any:
    """Run what a follower runs on a worker; only its loads are interrupted here."""
    return function()
