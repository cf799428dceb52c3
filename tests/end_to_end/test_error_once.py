"""A future raises its error to all who ask. What nobody has got is raised once by the Saver, or else printed.

Whatever waits, gives up, is cancelled, closed or dropped meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncckpt
from asyncckpt.engine.process import future as future_module
from asyncckpt.engine.process.future import SaveFuture
from asyncckpt.engine.process.save_lock import OpenFutures
from asyncckpt.errors import DeadlineError, FilterError, IOFailedError, SaveCancelledError
from asyncckpt.signals import uninterrupted
from tests.worlds.gates import Gate, failing

DEADLINE_S = 60.0


class FailedSave:
    """One failed save, whoever asks for its error, and where it came out: "asked" or "raised" or "printed"."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.came_out: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.other_loop = asyncio.new_event_loop()
        self.errors = OpenFutures()
        self.future = SaveFuture(step=1, path=Path("nowhere"), what="save of step 1")
        self.errors.watch(self.future)
        self.tasks: list[asyncio.Task[Any]] = []
        self.threads: list[threading.Thread] = []
        self.abandoned: list[asyncio.Task[Any]] = []

    # -- askers, before or behind the end of the save ----------------------------------------------------------------

    def _ask(self, get: Callable[[], Any]) -> None:
        try:
            self._note("asked", get())
        except DeadlineError:
            return
        except type(self.error) as error:
            self._note("asked", error)

    def _note(self, where: str, error: Any) -> None:
        assert error is self.error
        self.came_out.append(where)

    def result(self) -> None:
        self._ask(lambda: self.future.result(0))

    def exception(self) -> None:
        self._ask(lambda: self.future.exception(0))

    def result_on_a_thread(self) -> None:
        thread = threading.Thread(target=self._ask, args=(lambda: self.future.result(DEADLINE_S),))
        thread.start()
        self.threads.append(thread)
        if self.future.done():
            thread.join(DEADLINE_S)

    async def _await(self, awaitable: Any) -> None:
        try:
            await awaitable
        except type(self.error) as error:
            self._note("asked", error)

    def _start(self, awaitable: Any) -> asyncio.Task[Any]:
        task = self.loop.create_task(self._await(awaitable))
        self.tasks.append(task)
        self.turn()
        return task

    def awaited(self) -> None:
        self._start(self.future)

    def task_of_it(self) -> None:
        self._start(self.loop.create_task(self.future))

    def awaited_and_cancelled(self) -> None:
        self._start(self.future).cancel()

    def awaited_and_cancelled_a_turn_later(self) -> None:
        """When what the end of the save wakes has been woken, and has not run yet."""
        self.loop.call_soon(self._start(self.future).cancel)

    def awaited_and_cancelled_two_turns_later(self) -> None:
        self.loop.call_soon(self.loop.call_soon, self._start(self.future).cancel)

    def task_of_it_cancelled_before_it_runs(self) -> None:
        self.loop.create_task(self.future).cancel()

    def waited_for_too_shortly(self) -> None:
        self._start(asyncio.wait_for(self.future, 0))

    def awaited_on_a_loop_that_is_closed(self) -> None:
        if not self.other_loop.is_closed():
            self.abandoned.append(self.other_loop.create_task(self._await(self.future)))
            self.other_loop.run_until_complete(asyncio.sleep(0))
            if not self.abandoned[-1].done():
                self.other_loop.close()

    def callback_that_asks(self) -> None:
        self.future.add_done_callback(lambda future: self._ask(lambda: future.exception(0)))

    def callback_that_does_not(self) -> None:
        self.future.add_done_callback(lambda future: future.state)

    def callback_that_saves(self) -> None:
        self.future.add_done_callback(lambda _: self.next_save())

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report(self, report: Callable[[], object]) -> None:
        try:
            report()
        except DeadlineError:
            return
        except type(self.error) as error:
            self._note("raised", error)

    def next_save(self) -> None:
        self._report(self.errors.raise_first)

    def wait_idle_or_close(self) -> None:
        self._report(lambda: (self.errors.wait(0), self.errors.raise_first()))

    # -- the run -------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    def turns(self) -> None:
        """Let tasks that were woken come to their end."""
        for _ in range(3):
            self.turn()

    def end_save(self) -> None:
        thread = threading.Thread(target=self.future.fail, args=(self.error,))
        thread.start()
        for asking in (thread, *self.threads):
            asking.join(DEADLINE_S)

    def run(self, before: Sequence[str], after: Sequence[str]) -> list[str]:
        with contextlib.closing(self.loop), contextlib.closing(self.other_loop):
            for name in before:
                getattr(self, name)()
            self.end_save()
            for name in after:
                getattr(self, name)()
            for thread in self.threads:
                thread.join(DEADLINE_S)
            self.turn()
            if self.tasks:
                self.loop.run_until_complete(asyncio.wait(self.tasks, timeout=DEADLINE_S))
            for task in self.tasks:
                assert task.done()
                with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
                    task.result()
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                self.future.__del__()  # As at exit, or when it is collected.
            self.came_out += ["printed"] * said.getvalue().count("failed and nobody asked")
            for task in self.abandoned:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                if not task.done():
                    task.get_coro().close()  # type: ignore[union-attr]
        return self.came_out


ASKERS = [
    name
    for name in vars(FailedSave)
    if name.startswith(("result", "exception", "await", "task_of", "waited_for", "callback"))
]
REPORTS = ["next_save", "wait_idle_or_close"]


def check(came_out: list[str], *, cancelled: bool) -> None:
    """It comes out where somebody asks, however often; and where nobody has asked before, at one place, once."""
    first, *further = came_out or [""]
    if cancelled:
        assert set(came_out) <= {"asked"}
    else:
        assert first != ""
        assert set(further) <= {"asked"}


def run(before: Sequence[str], after: Sequence[str], cancelled: bool) -> None:
    error = SaveCancelledError("cancelled") if cancelled else IOFailedError("disk on fire")
    check(FailedSave(error).run(before, after), cancelled=cancelled)


@settings(max_examples=400, deadline=None)
@given(
    before=st.lists(st.sampled_from(ASKERS), max_size=4),
    after=st.lists(st.sampled_from(ASKERS + REPORTS), max_size=4),
    cancelled=st.booleans(),
)
def test_an_error_comes_out(before: list[str], after: list[str], cancelled: bool) -> None:
    run(before, after, cancelled)


SHORT = [(before, after, cancelled) for before in ASKERS for after in ASKERS + REPORTS for cancelled in (False, True)]


def test_an_error_comes_out_of_all_short_programs() -> None:
    for before, after, cancelled in SHORT:
        run([before], [after], cancelled)


@pytest.mark.parametrize("asker", ASKERS)
@pytest.mark.parametrize("report", REPORTS)
def test_what_an_asker_leaves_is_raised_by_the_next_call(asker: str, report: str) -> None:
    came_out = FailedSave(IOFailedError("disk on fire")).run([asker], ["turns", report])
    asks = {"result_on_a_thread", "awaited", "task_of_it", "callback_that_asks"}
    assert came_out == (["asked"] if asker in asks else ["raised"])


def loses_when_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """An await that is cancelled takes the error along when the save has ended meanwhile."""
    real = SaveFuture._wait

    async def wait(self: SaveFuture) -> Any:
        try:
            return await real(self)
        finally:
            self._unseen = None

    monkeypatch.setattr(SaveFuture, "_wait", wait)


def asks_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SaveFuture, "exception", lambda self, timeout=None: self._wait_done(timeout)[1])


def raises_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFutures, "take_error", lambda self: self._futures[0]._unseen)


def raises_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(future_module, "SaveCancelledError", ())


@pytest.mark.parametrize("plant", [loses_when_cancelled, asks_unseen, raises_always, raises_cancelled])
def test_what_loses_or_repeats_it_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_an_error_comes_out_of_all_short_programs()


# -- with real saves ---------------------------------------------------------------------------------------------------


class FailingGate(Gate):
    """Holds a save, then fails it."""

    def __call__(self, blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        return failing(super().__call__(blocks))


def cancelled_save(saver: asyncckpt.Saver, gate: Gate) -> asyncckpt.SaveFuture:
    future = saver.save_async(1)
    assert gate.reached.wait(DEADLINE_S)
    assert future.cancel()
    gate.open()
    future._wait_done(DEADLINE_S)
    return future


@pytest.mark.parametrize("call", ["save_async", "save", "wait_idle", "close", "compact"])
def test_a_cancelled_save_is_no_error_of_the_next_call(tmp_path: Path, gate: Gate, call: str) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=gate)
    with saver:
        saver_of_0 = saver  # A step that compact finds.
        gate.open()
        saver_of_0.save(0)
        gate.shut()
        future = cancelled_save(saver, gate)
        found = getattr(saver, call)()
        if call in ("save_async", "compact"):
            found.result(DEADLINE_S)
        with pytest.raises(SaveCancelledError):
            future.result(0)


def test_a_cancelled_save_is_no_failure_of_a_periodic_saver(tmp_path: Path, gate: Gate) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=gate) as saver:
        with asyncckpt.PeriodicSaver(saver, every_steps=1) as periodic:
            future = periodic.step(1)
            assert future is not None
            assert future.cancel()
            gate.open()
            future._wait_done(DEADLINE_S)
            assert periodic.step(2) is not None
        assert periodic.statistics().failed_count == 0
    assert asyncckpt.list_steps(tmp_path) == [2]


@pytest.mark.parametrize("keep", [True, False])
def test_the_error_of_a_dropped_saver_is_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], printed: Callable[[str], str], keep: bool
) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=failing)
    future = saver.save_async(1)
    future._wait_done(DEADLINE_S)
    if keep:
        assert isinstance(future.exception(), FilterError)
    del saver, future
    gc.collect()
    future_module._report_all()
    found = capsys.readouterr().err if keep else printed("save of step 1")
    assert found.count("save of step 1") == (0 if keep else 1)


def test_the_error_of_a_load_nobody_asks_for_is_printed(tmp_path: Path, printed: Callable[[str], str]) -> None:
    future = asyncckpt.Loader(tmp_path, tensors={"w": torch.ones(9)}).load_async()
    future._wait_done(DEADLINE_S)
    del future
    assert printed("nobody asked").count("load: failed> failed and nobody asked") == 1


@pytest.mark.parametrize("ask", ["result", "exception"])
def test_two_threads_that_ask_at_once_both_get_it(ask: str) -> None:
    program = FailedSave(IOFailedError("disk on fire"))
    for _ in range(2):
        program.result_on_a_thread()
    program.end_save()
    program.next_save()
    assert program.came_out == ["asked", "asked"]
    getattr(program, ask)()
    assert program.came_out == ["asked"] * 3
    program.loop.close()
    program.other_loop.close()


def test_a_callback_that_waits_for_the_closing_thread_stops_nobody(tmp_path: Path) -> None:
    gate, closed = FailingGate(), threading.Event()
    saver = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=gate)
    saver.save_async(1).add_done_callback(lambda _: closed.wait(DEADLINE_S))
    gate.open()
    with pytest.raises(FilterError, match="disk on fire"):
        saver.close()
    closed.set()


@pytest.mark.parametrize("ask", ["exception", "result"])
def test_an_ask_that_a_signal_ends_takes_no_error_along(monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    """It comes when the wait has ended and the answer is on its way."""
    program = FailedSave(IOFailedError("disk on fire"))
    program.end_save()
    real = SaveFuture._wait_done

    def wait_done(self: SaveFuture, *arguments: Any) -> Any:
        with uninterrupted:
            ended = real(self, *arguments)
            signal.raise_signal(signal.SIGINT)
            return ended

    with monkeypatch.context() as patched:
        patched.setattr(SaveFuture, "_wait_done", wait_done)
        with pytest.raises(KeyboardInterrupt):
            getattr(program.future, ask)()
    program.next_save()
    assert program.came_out == ["raised"]
    program.loop.close()
    program.other_loop.close()


async def test_an_error_in_async_with_comes_out_of_it(tmp_path: Path) -> None:
    with pytest.raises(FilterError, match="disk on fire"):
        async with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=failing) as saver:
            saver.save_async(1)


async def test_an_error_of_a_cancelled_aclose_is_raised_by_the_next(tmp_path: Path) -> None:
    gate = FailingGate()
    saver = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=gate)
    saver.save_async(1)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(saver.aclose(), 0.01)
    gate.open()
    with pytest.raises(FilterError, match="disk on fire"):
        await saver.aclose()
    saver.close()
