"""Cases 107 to 110 within one process: interruptions, and loops that are closed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import DEADLINE_S, await_end_of_threads, failing

import asyncckpt
from asyncckpt import signals
from asyncckpt.storage.directory import Directory
from tests.worlds.gates import Gate
from tests.worlds.threads import awaited

UsageError, FilterError, DeadlineError = asyncckpt.UsageError, asyncckpt.errors.FilterError, asyncckpt.DeadlineError
IOFailedError, SaveInProgressError = asyncckpt.IOFailedError, asyncckpt.SaveInProgressError


def interrupt_main_thread() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def interrupting_waits(monkeypatch: pytest.MonkeyPatch, *, times: int, after: threading.Event | None = None) -> None:
    """The first waits of the main thread are interrupted, when they have begun and `after` is set."""
    real = concurrent.futures.wait
    left = [times]

    def wait(futures: Any, timeout: float | None = None) -> Any:
        if threading.current_thread() is threading.main_thread() and left[0] > 0:
            left[0] -= 1
            assert after is None or after.wait(DEADLINE_S)
            interrupt_main_thread()
        return real(futures, timeout)

    monkeypatch.setattr(signals, "wait", wait)


# -- 107 and 108: Ctrl-C -----------------------------------------------------------------------------------------------


def test_case_107_interrupt_in_a_blocking_save_ends_it(
    tmp_path: Path, saver: asyncckpt.Saver, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background reads what the caller owns, so the interruption comes out only when that has ended."""
    with monkeypatch.context() as patched:
        interrupting_waits(patched, times=1, after=gate.reached)
        real = asyncckpt.SaveFuture.cancel
        patched.setattr(asyncckpt.SaveFuture, "cancel", lambda self: (real(self), gate.open())[0])
        with pytest.raises(KeyboardInterrupt):
            saver.save(0)
    saver.wait_idle(0)
    assert asyncckpt.list_steps(tmp_path) == []
    assert saver.save(1).step == 1


def test_case_107_second_interrupt_does_not_wait(
    tmp_path: Path, saver: asyncckpt.Saver, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And yet nothing of a half captured state is committed."""
    with monkeypatch.context() as patched:
        interrupting_waits(patched, times=2, after=gate.reached)
        with pytest.raises(KeyboardInterrupt):
            saver.save(0)
    with pytest.raises(SaveInProgressError, match="save of step 0"):
        saver.save_async(1)
    gate.open()
    assert saver.save_async(1, on_busy="wait").result(DEADLINE_S).step == 1
    assert asyncckpt.list_steps(tmp_path) == [1]


def test_case_107_tables_wait_for_a_save_that_two_interrupts_left(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background ends it, and this thread may wait for that."""
    table = asyncckpt.HashTable("t", 2)
    table.insert(torch.arange(4), torch.ones(4, 2))
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, filter_func=gate) as saver:
        with monkeypatch.context() as patched:
            interrupting_waits(patched, times=2, after=gate.reached)
            with pytest.raises(KeyboardInterrupt):
                saver.save(0)
        threading.Timer(0.05, gate.open).start()
        assert (table.lookup(torch.arange(4), insert=False) >= 0).all()


def test_case_107_interrupt_in_a_wait_leaves_the_save_alone(
    tmp_path: Path, saver: asyncckpt.Saver, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    future = saver.save_async(0)
    with monkeypatch.context() as patched:
        interrupting_waits(patched, times=3)
        for wait in (future.result, saver.wait_idle, saver.close):
            with pytest.raises(KeyboardInterrupt):
                wait()
    assert future.state in ("staged", "filtering")
    with pytest.raises(UsageError, match="is closed"):
        saver.save_async(1)
    gate.open()
    saver.close()  # Again, to the end.
    assert future.result(0).step == 0
    assert asyncckpt.list_steps(tmp_path) == [0]


def test_case_107_interrupt_before_the_background_has_the_job(
    tmp_path: Path, saver: asyncckpt.Saver, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its thread is being started, for example."""
    gate.open()

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    for staged in (False, True):
        await_end_of_threads()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                saver.save_async(0) if staged else saver.save(0)
    assert saver.save(0).step == 0


@pytest.mark.parametrize("phase", ["before the commit", "between commit and sync"])
def test_case_107_108_interrupt_in_the_commit(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The commit is the background's: the interruption of the main thread neither undoes it nor leaves it in doubt."""
    name = "publish" if phase == "before the commit" else "sync"
    real = getattr(Directory, name)

    def held(self: Directory, *arguments: Any) -> Any:
        if self.path.name == "manifests" and threading.current_thread() is not threading.main_thread():
            gate()
        return real(self, *arguments)

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}) as saver:
        monkeypatch.setattr(Directory, name, held)
        future = saver.save_async(0)
        assert gate.reached.wait(DEADLINE_S)
        with monkeypatch.context() as patched:
            interrupting_waits(patched, times=1)
            with pytest.raises(KeyboardInterrupt):
                future.result()
        assert future.state == "committing"
        assert future.cancel() is False, "too late"
        assert asyncckpt.list_steps(tmp_path) == ([] if phase == "before the commit" else [0])
        gate.open()
        assert future.result(DEADLINE_S).step == 0
    assert asyncckpt.verify(tmp_path).step == 0


def test_case_108_commit_that_cannot_be_confirmed_is_resolvable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Directory.sync

    def broken(self: Directory) -> None:
        if self.path.name == "manifests":
            raise IOFailedError("folder 'manifests' cannot be synced: Input/output error", errno=errno.EIO)
        real(self)

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(Directory, "sync", broken)
            with pytest.raises(asyncckpt.IndeterminateError, match=r"step 0 .*perhaps not durable.*resolve") as caught:
                saver.save(0)
        assert caught.value.resolve() is True
        assert asyncckpt.list_steps(tmp_path) == [0]
        assert asyncckpt.verify(tmp_path).step == 0


# -- 110: asyncio ------------------------------------------------------------------------------------------------------


def test_case_110_loop_closed_while_it_waits(tmp_path: Path, saver: asyncckpt.Saver, gate: Gate) -> None:
    loop = asyncio.new_event_loop()
    future = saver.save_async(0)
    waiting = loop.create_task(awaited(future))
    loop.run_until_complete(asyncio.sleep(0))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(waiting)
    abandoned = loop.create_task(awaited(future))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    gate.open()
    assert future.result(DEADLINE_S).step == 0
    assert not abandoned.done()
    abandoned.get_coro().close()  # type: ignore[union-attr]
    assert saver.save_async(1).result(DEADLINE_S).step == 1


async def test_case_110_time_out_of_an_await(saver: asyncckpt.Saver, gate: Gate) -> None:
    future = saver.save_async(0)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(awaited(future), 0.01)
    assert not future.done()
    assert future.state in ("staged", "filtering")
    gate.open()
    assert (await future).step == 0


async def test_case_110_error_after_a_cancelled_await_is_not_lost(tmp_path: Path) -> None:
    gate = Gate()

    def fail_at_the_gate(blocks: Any) -> Any:
        gate(blocks)
        return failing(blocks)

    saver = asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, filter_func=fail_at_the_gate)
    task = asyncio.ensure_future(awaited(saver.save_async(0)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    with pytest.raises(FilterError, match="my reason"):
        await asyncio.to_thread(saver.close)


async def test_case_110_awaited_in_another_loop(saver: asyncckpt.Saver, gate: Gate) -> None:
    future = saver.save_async(0)
    elsewhere = asyncio.to_thread(lambda: asyncio.run(awaited(future)))
    task = asyncio.ensure_future(elsewhere)
    gate.open()
    assert (await future).step == (await task).step == 0
