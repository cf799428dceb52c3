"""Cases 111 to 117 within one process: calls out of order, threads, callbacks, handlers and deadlines."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import DEADLINE_S, await_end_of_threads, failing

import asyncckpt
from asyncckpt.commit import retention
from asyncckpt.engine.process import background as background_module
from asyncckpt.engine.save import run_save as save_job
from tests.worlds.gates import Gate
from tests.worlds.threads import awaited, in_thread

UsageError, FilterError, DeadlineError = asyncckpt.UsageError, asyncckpt.errors.FilterError, asyncckpt.DeadlineError
IOFailedError, SaveInProgressError = asyncckpt.IOFailedError, asyncckpt.SaveInProgressError


# -- 111 and 112: calls out of order, and at the same time -------------------------------------------------------------


def test_case_111_after_close(tmp_path: Path) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)})
    future = saver.save_async(0)
    saver.close()
    saver.close()
    for call in (saver.save_async, saver.save, saver.prepare):
        with pytest.raises(UsageError, match=f"Saver of '{tmp_path}' is closed"):
            call()
    saver.wait_idle()
    assert saver.statistics().saves_count == 1
    assert future.result() is future.result()
    assert future.exception() is None
    assert future.cancel() is False


def test_case_111_error_is_raised_by_every_wait_for_its_future(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, filter_func=failing) as saver:
        future = saver.save_async(0)
        for _ in range(2):
            with pytest.raises(FilterError, match="my reason"):
                future.result()
        assert isinstance(future.exception(), FilterError)


def test_case_111_calls_in_a_callback(tmp_path: Path, gate: Gate, saver: asyncckpt.Saver) -> None:
    """A callback runs on the background thread: it may begin a save, but not wait for one."""
    answers: dict[str, Any] = {}
    done = threading.Event()

    def tried(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except asyncckpt.CheckpointError as error:
            return error

    def callback(_: Any) -> None:
        answers["inner"] = inner = saver.save_async(1)
        answers["result"] = tried(inner.result)
        answers["wait_idle"] = tried(saver.wait_idle)
        answers["close"] = tried(saver.close)
        answers["save"] = tried(lambda: saver.save(2, on_busy="queue"))
        done.set()

    saver.save_async(0).add_done_callback(callback)
    gate.open()
    assert done.wait(DEADLINE_S)
    assert answers["inner"].result(DEADLINE_S).step == 1
    for name in ("result", "wait_idle", "close"):
        assert "it runs on a thread that the wait is for" in str(answers[name])
        assert type(answers[name]) is UsageError
    assert type(answers["save"]) is UsageError
    saver.close()
    assert asyncckpt.list_steps(tmp_path) == [0, 1]


def test_case_111_saves_from_two_threads(tmp_path: Path, gate: Gate, saver: asyncckpt.Saver) -> None:
    future = saver.save_async(0)
    errors: list[BaseException | None] = []

    def save() -> None:
        try:
            saver.save_async(1)
        except asyncckpt.CheckpointError as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert type(errors[0]) is SaveInProgressError
    assert "save of step 0" in str(errors[0])
    gate.open()
    assert future.result(DEADLINE_S).step == 0


def test_case_111_same_step_twice(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}) as saver:
        saver.save(5)
        for again in (saver.save, saver.save_async):
            with pytest.raises(asyncckpt.ConflictError, match=r"step 5 already exists.*never overwritten"):
                again(5)
        saver.save(3)
        assert saver.save().step == 6
    assert asyncckpt.list_steps(tmp_path) == [3, 5, 6]


def test_case_112_every_policy_while_one_is_in_flight(tmp_path: Path, gate: Gate, saver: asyncckpt.Saver) -> None:
    first = saver.save_async(0)
    with pytest.raises(SaveInProgressError, match=rf"save of step 0 in '{tmp_path}' is still running, for .* s so far"):
        saver.save_async(1)
    skipped = saver.save_async(1, on_busy="skip")
    assert (skipped.done(), skipped.result().skipped, skipped.state) == (True, True, "skipped")
    queued = saver.save_async(2, on_busy="queue")
    with pytest.raises(UsageError, match=r"on_busy must be .*; got 'later'"):
        saver.save_async(3, on_busy="later")  # type: ignore[arg-type]
    gate.open()
    assert saver.save_async(3, on_busy="wait").result(DEADLINE_S).step == 3
    assert (first.result(0).step, queued.result(0).step) == (0, 2)
    assert asyncckpt.list_steps(tmp_path) == [0, 2, 3]


def test_case_112_queue_is_bounded(tmp_path: Path, gate: Gate) -> None:
    """Two arenas, so one save in flight and one behind it; a third waits for an arena, and not for ever."""
    state = {"x": torch.ones(3)}
    with asyncckpt.Saver(
        path=tmp_path, tensors=state, filter_func=gate, on_busy=asyncckpt.BusyPolicy("queue", deadline=0.05)
    ) as saver:
        futures = [saver.save_async(step) for step in range(2)]
        with pytest.raises(DeadlineError, match=r"no staging arena became free within 0\.05 s"):
            saver.save_async(2)
        gate.open()
        assert [future.result(DEADLINE_S).step for future in futures] == [0, 1]


# -- 113: threads that cannot start, or die ----------------------------------------------------------------------------


@contextmanager
def no_thread_starts(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """Let no thread start, or none of these names."""
    await_end_of_threads()
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if not names or self.name in names:
            raise RuntimeError("can't start new thread")
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        yield


@pytest.mark.parametrize("which", ["asyncckpt-background", "asyncckpt-worker"])
@pytest.mark.parametrize("staged", [False, True])
def test_case_113_thread_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, staged: bool
) -> None:
    refused = f"thread '{which}' cannot be started.*ulimit -u"
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}) as saver:
        for step in range(6):  # More often than there are threads to lose.
            with no_thread_starts(monkeypatch, which), pytest.raises(IOFailedError, match=refused):
                saver.save_async(step).result(DEADLINE_S) if staged else saver.save(step)
        assert asyncckpt.list_steps(tmp_path) == []
        assert saver.save_async(0).result(DEADLINE_S).step == 0


def test_case_113_load_thread_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}) as saver:
        saver.save(0)
    loader = asyncckpt.Loader(tmp_path)
    for _ in range(6):
        with no_thread_starts(monkeypatch), pytest.raises(IOFailedError, match="cannot be started"):
            loader.load_async()
    assert loader.load_async().result(DEADLINE_S).step == 0


def test_case_113_prepare_without_a_thread_gives_the_arena_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = asyncckpt.BusyPolicy("wait", deadline=2)
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, on_busy=busy) as saver:
        for _ in range(3):
            with no_thread_starts(monkeypatch), pytest.raises(IOFailedError, match="cannot be started"):
                saver.prepare()
        assert saver.save_async(0).result(DEADLINE_S).step == 0


@pytest.mark.parametrize("queued", [False, True])
def test_case_113_background_thread_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queued: bool) -> None:
    """Its saves raise the reason instead of hanging; the next save gets a new thread."""
    may_die = threading.Event()

    def run(work: Any) -> None:
        assert may_die.wait(DEADLINE_S)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, on_busy="queue") as saver:
        await_end_of_threads()
        with monkeypatch.context() as patched:
            patched.setattr(background_module.asyncio, "run", run)
            futures = [saver.save_async(step) for step in range(1 + queued)]
            may_die.set()
            for future in futures:
                with pytest.raises(
                    IOFailedError, match=r"save of step . in .* failed: Too many open files.*ulimit -n"
                ) as caught:
                    future.result(DEADLINE_S)
                assert caught.value.errno == errno.EMFILE
        assert saver.save_async(5).result(DEADLINE_S).step == 5


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "broken"), SystemExit(1), RuntimeError("a bug")])
def test_case_113_writer_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def broken(*_: Any) -> Any:
        raise error

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(save_job, "write_files", broken)
            future = saver.save_async(0)
            found = future.exception(DEADLINE_S)
        assert found is error or (isinstance(found, IOFailedError) and found.__cause__ is error)
        assert saver.save_async(0).result(DEADLINE_S).step == 0
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_case_113_unasked_error_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, filter_func=failing)
    saver.save_async(0)
    saver._errors.wait(DEADLINE_S)
    with pytest.raises(FilterError, match="my reason"):
        saver.save_async(1)
    saver.save_async(2)
    with pytest.raises(FilterError, match="my reason"):
        saver.close()
    saver.close()


# -- 115 and 116: callbacks and handlers that raise --------------------------------------------------------------------


class BrokenHandler(logging.Handler):
    """A handler that raises, as one whose disk is full may."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(errno.ENOSPC, "the log is full")


@pytest.fixture(params=[False, True], ids=["sound log", "broken log"])
def log(request: pytest.FixtureRequest) -> Iterator[None]:
    handler = BrokenHandler()
    loggers = [logging.getLogger(name) for name in ("asyncckpt", "concurrent.futures", "asyncio")]
    for logger in loggers if request.param else []:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.usefixtures("log")
async def test_case_115_116_callback_raises_after_the_commit(
    tmp_path: Path, saver: asyncckpt.Saver, gate: Gate, error: BaseException
) -> None:
    """It undoes nothing, and whoever else waits is told, those behind it too."""
    calls: list[str] = []

    def callback(_: Any) -> None:
        calls.append("first")
        raise error

    future = saver.save_async(0)
    future.add_done_callback(callback)
    future.add_done_callback(lambda _: calls.append("second"))
    waiting = asyncio.ensure_future(awaited(future))
    await asyncio.sleep(0)
    gate.open()
    assert (await asyncio.wait_for(waiting, DEADLINE_S)).step == 0
    assert calls == ["first", "second"]
    assert asyncckpt.list_steps(tmp_path) == [0]
    assert (await saver.save_async(1)).step == 1


@pytest.mark.parametrize("error", [ValueError("a bug"), IOFailedError("cannot be removed")])
@pytest.mark.usefixtures("log")
def test_case_115_116_retention_fails_after_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, keep=1) as saver:
        saver.save(0)
        with monkeypatch.context() as patched:
            patched.setattr(retention, "retain", broken)
            assert saver.save_async(1).result(DEADLINE_S).step == 1
            saver.wait_idle(DEADLINE_S)
        assert asyncckpt.list_steps(tmp_path) == [0, 1]
        assert saver.save(2).step == 2
    assert asyncckpt.list_steps(tmp_path) == [2]


@pytest.mark.usefixtures("log")
def test_case_116_table_that_does_not_end_its_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = asyncckpt.HashTable("t", 1)
    table.lookup(torch.tensor([1]))
    cut = table.begin_cut()
    cut.fence()

    def broken(self: Any, ok: bool) -> None:
        self.fence()
        raise ValueError("a bug in a table")

    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(type(cut), "end", broken)
            assert saver.save_async(0).result(DEADLINE_S).step == 0
        assert saver.save(1).step == 1


# -- 117: every wait has an end, and a name ----------------------------------------------------------------------------


def test_case_117_waits_end_and_name_what_they_waited_for(tmp_path: Path, saver: asyncckpt.Saver, gate: Gate) -> None:
    future = saver.save_async(7)
    for wait in (future.result, future.exception):
        with pytest.raises(
            DeadlineError, match=r"save of step 7 did not end within 0\.01 s, found '(staged|filtering)'"
        ):
            wait(0.01)
    with pytest.raises(DeadlineError, match=r"save of step 7.* did not end within 0\.01 s"):
        saver.wait_idle(0.01)
    with pytest.raises(TimeoutError):  # A DeadlineError is one.
        future.result(0)
    options = {"tensors": {"x": torch.ones(3)}, "on_busy": asyncckpt.BusyPolicy("wait", deadline=0.01)}
    with asyncckpt.Saver(path=tmp_path, **options) as other:
        for call in (other.save_async, other.save):
            with pytest.raises(DeadlineError, match=r"save of step 7 in .* did not end within 0\.01 s"):
                call()
    loader = asyncckpt.Loader(tmp_path, on_busy=asyncckpt.BusyPolicy("wait", deadline=0.01))
    for call in (loader.load, loader.load_async):
        with pytest.raises(DeadlineError, match=r"save of step 7 in .* did not end within 0\.01 s"):
            call()
    gate.open()
    assert future.result(DEADLINE_S).step == 7


def test_case_117_table_that_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut that is never fenced is a bug, and a bug must not become a hang."""
    from asyncckpt.tables import table_lock

    monkeypatch.setattr(table_lock, "TABLE_WAIT_S_MAX", 0.01)
    table = asyncckpt.HashTable("t", 1)
    cut = in_thread(table.begin_cut)
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        with pytest.raises(DeadlineError, match=r"cut of table 't' waited 0\.01 s for cut"):
            saver.save_async(0)
        cut.fence()
        assert saver.save(0).step == 0
        cut = table.begin_cut()
        with pytest.raises(UsageError, match="lookup of table 't' waits for cut of it on the same thread"):
            table.lookup(torch.arange(3))
        cut.fence()
        assert len(table.lookup(torch.arange(3))) == 3
