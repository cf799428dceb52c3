"""The future: who is told of an error, what cancel does, what a cancelled await does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.end_to_end.state import State, load_image
from tests.worlds.gates import Gate, failing


def test_cancel_before_commit_aborts(tmp_path: Path) -> None:
    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=gate) as saver:
        future = saver.save_async(1)
        assert gate.reached.wait(60)
        assert future.cancel()
        gate.open()
        with pytest.raises(asyncckpt.SaveCancelledError, match="step 1"):
            future.result(60)
        assert future.state.value == "cancelled"
        assert saver.statistics().cancelled_count == 1
        assert asyncckpt.list_steps(tmp_path) == []
        assert list((tmp_path / "data").iterdir()) == []
        saver.save_async(1).result(60)


def test_cancel_after_commit_does_nothing(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}) as saver:
        future = saver.save_async(1)
        future.result(60)
        assert not future.cancel()
    assert asyncckpt.list_steps(tmp_path) == [1]


async def test_cancelled_await_does_not_abort(tmp_path: Path) -> None:
    gate = Gate()
    state = State.filled(1)
    with asyncckpt.Saver(path=tmp_path, hashtables=state.tables, tensors=state.dense, filter_func=gate) as saver:
        expected = state.image()
        future = saver.save_async(1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future._wait(), 0.01)
        assert not future.done()
        gate.open()
        assert (await future).step == 1
    assert load_image(tmp_path) == expected


def test_result_timeout_is_a_deadline_error(tmp_path: Path) -> None:
    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=gate) as saver:
        future = saver.save_async(1)
        with pytest.raises(TimeoutError, match="save of step 1 did not end within 0"):
            future.result(0)
        gate.open()
        future.result(60)


@pytest.mark.parametrize("wait", ["result", "wait_idle", "drain"])
def test_a_deadline_is_ours_also_where_futures_have_an_error_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    """As in Python 3.10."""

    class OfFutures(Exception): ...

    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=gate) as saver:
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=1)
        future = periodic.step(1)
        assert future is not None
        waits = {"result": future.result, "wait_idle": saver.wait_idle, "drain": periodic.drain}
        with monkeypatch.context() as patched:
            for module in (concurrent.futures, concurrent.futures._base):
                patched.setattr(module, "TimeoutError", OfFutures)
            with pytest.raises(asyncckpt.DeadlineError, match=r"save of step 1 did not end within 0\.01 s"):
                waits[wait](0.01)
        gate.open()


def test_unasked_error_is_raised_once_by_the_next_save(tmp_path: Path) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=failing)
    saver.save_async(1)
    _settle(saver)
    with pytest.raises(asyncckpt.errors.FilterError, match="disk on fire"):
        saver.save_async(2)
    # Told once: the saver is not poisoned.
    future = saver.save_async(3)
    with pytest.raises(asyncckpt.errors.FilterError):
        future.result(60)
    saver.close()


def test_unasked_error_is_raised_by_close_and_by_wait_idle(tmp_path: Path) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=failing)
    saver.save_async(1)
    with pytest.raises(asyncckpt.errors.FilterError):
        saver.wait_idle(60)
    saver.save_async(2)
    with pytest.raises(asyncckpt.errors.FilterError):
        saver.close()
    saver.close()


def test_asked_error_is_not_raised_again(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=failing) as saver:
        assert isinstance(saver.save_async(1).exception(60), asyncckpt.errors.FilterError)
        saver.wait_idle(60)


def test_callbacks_run_and_their_errors_undo_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    called = threading.Event()

    def bad(future: asyncckpt.SaveFuture) -> None:
        raise ValueError("callback")

    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=gate) as saver:
        future = saver.save_async(1)
        future.add_done_callback(bad)
        future.add_done_callback(lambda f: seen.append(f.result().step))
        future.add_done_callback(lambda f: called.set())
        gate.open()
        assert future.result(60).step == 1
        assert called.wait(60)
    assert seen == [1]
    assert "callback" in caplog.text


def test_blocking_save_in_a_callback_is_refused(tmp_path: Path) -> None:
    """It would run on the background thread and wait for itself; an asynchronous one is fine there."""
    outcome: list[object] = []
    called = threading.Event()
    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=gate) as saver:

        def again(future: asyncckpt.SaveFuture) -> None:
            try:
                saver.save(2)
            except asyncckpt.UsageError as error:
                outcome.append(error)
            outcome.append(saver.save_async(3))
            called.set()

        future = saver.save_async(1)
        future.add_done_callback(again)
        gate.open()
        assert called.wait(60)
        error, third = outcome
        assert "it runs on a thread that the wait is for" in str(error)
        assert isinstance(third, asyncckpt.SaveFuture)
        assert third.result(60).step == 3


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(100_000)}) as saver:
        future = saver.save_async(1)
        future.result(60)
        assert future.progress.bytes_total > 400_000
        assert future.progress.bytes_done >= future.progress.bytes_total


def test_dropped_saver_finishes_its_save(tmp_path: Path) -> None:
    gate = Gate()
    saver = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)}, filter_func=gate)
    future = saver.save_async(1)
    del saver
    gc.collect()
    gate.open()
    assert future.result(60).step == 1


def test_use_after_close(tmp_path: Path) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(9)})
    saver.close()
    saver.close()
    for call in (saver.save_async, saver.save, saver.prepare):
        with pytest.raises(asyncckpt.UsageError, match="is closed"):
            call()


def _settle(saver: asyncckpt.Saver) -> None:
    """Wait for saves in flight without asking for their outcome."""
    saver._errors.wait(60)
