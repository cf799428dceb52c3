"""A second call while a save is in flight: raise, wait, skip, queue; loads take part in the same rule."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from tests.end_to_end.state import State, load_image
from tests.worlds.gates import Gate

DEADLINE_S = 60


def test_raise_names_step_path_and_age(tmp_path: Path) -> None:
    gate = Gate()
    state = {"w": torch.ones(3)}
    with asyncckpt.Saver(path=tmp_path, tensors=state, filter_func=gate) as saver:
        first = saver.save_async(120)
        assert gate.reached.wait(60)
        with pytest.raises(asyncckpt.SaveInProgressError) as caught:
            saver.save_async(121)
        message = str(caught.value)
        assert "step 120" in message
        assert str(tmp_path) in message
        assert "s so far" in message
        with pytest.raises(asyncckpt.SaveInProgressError):
            saver.save(121, on_busy="raise")
        with pytest.raises(asyncckpt.SaveInProgressError):
            asyncckpt.Loader(tmp_path, tensors=state, on_busy="raise").load()
        with pytest.raises(asyncckpt.SaveInProgressError):
            asyncckpt.Loader(tmp_path, tensors=state).load_async()
        gate.open()
        first.result(60)
        saver.save_async(121).result(60)
    assert asyncckpt.list_steps(tmp_path) == [120, 121]


def test_blocking_calls_wait_by_default(tmp_path: Path) -> None:
    """Also for another directory: who blocks anyway has nothing to gain from an error."""
    state = {"w": torch.ones(3)}
    asyncckpt.save(tmp_path / "other", state)
    calls = (
        lambda saver: saver.save(),
        lambda saver: asyncckpt.Loader(tmp_path / "other", tensors=state).load(),
        lambda saver: asyncckpt.load(tmp_path / "other"),
        lambda saver: asyncckpt.save(tmp_path / "other", state),
    )
    for number, call in enumerate(calls):
        gate = Gate()
        with asyncckpt.Saver(path=tmp_path / str(number), tensors=state, filter_func=gate) as saver:
            first = saver.save_async()
            assert gate.reached.wait(60)
            opens = threading.Timer(0.05, gate.open)
            opens.start()
            call(saver)
            assert first.done()
            opens.join()


def test_what_a_saver_was_told_counts_for_blocking_saves_too(tmp_path: Path) -> None:
    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}, filter_func=gate, on_busy="raise") as saver:
        saver.save_async(1)
        with pytest.raises(asyncckpt.SaveInProgressError):
            saver.save(2)
        gate.open()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_steps(tmp_path: Path, kind: Any) -> None:
    state = {"w": torch.ones(3)}
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        assert type(saver.save(kind(1)).step) is int
        assert saver.save_async(kind(2)).result(60).step == 2
        assert asyncckpt.PeriodicSaver(saver, every_steps=3).step(kind(3)).result(60).step == 3
        assert saver.compact(kind(2)).result(60).skipped
    assert asyncckpt.Loader(tmp_path, tensors=state, step=kind(1)).load().step == 1
    assert asyncckpt.describe(tmp_path, kind(2)).step == asyncckpt.verify(tmp_path, kind(2)).step == 2
    assert asyncckpt.compact(tmp_path, kind(2)).skipped
    assert asyncckpt.save(tmp_path, state, kind(7)).step == 7
    assert asyncckpt.load(tmp_path, kind(7)).keys() == {"w"}
    for wrong in (np.bool_(True), np.float64(1), kind(1).reshape(1)):
        with pytest.raises(asyncckpt.UsageError, match="step must be"):
            asyncckpt.load(tmp_path, wrong)


def test_skip_resolves_at_once(tmp_path: Path) -> None:
    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}, filter_func=gate, on_busy="skip") as saver:
        first = saver.save_async(1)
        second = saver.save_async(2)
        assert second.done()
        assert second.result(0).skipped
        assert second.state.value == "skipped"
        gate.open()
        first.result(60)
        assert saver.statistics().skipped_count == 1
    assert asyncckpt.list_steps(tmp_path) == [1]


def test_wait_begins_after_the_commit(tmp_path: Path) -> None:
    gate = Gate()
    state = {"w": torch.ones(3)}
    with asyncckpt.Saver(path=tmp_path, tensors=state, filter_func=gate) as saver:
        first = saver.save_async(1)
        assert gate.reached.wait(60)
        threading.Timer(0.05, gate.open).start()
        second = saver.save_async(2, on_busy="wait")
        assert first.done()
        second.result(60)
    assert asyncckpt.list_steps(tmp_path) == [1, 2]


def test_wait_has_a_deadline(tmp_path: Path) -> None:
    gate = Gate()
    options = {"filter_func": gate, "on_busy": asyncckpt.BusyPolicy("wait", deadline=0.01)}
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}, **options) as saver:
        saver.save_async(1)
        with pytest.raises(asyncckpt.DeadlineError, match=r"step 1 .* did not end within 0\.01 s"):
            saver.save_async(2)
        gate.open()


def test_queue_snapshots_now_and_commits_in_order(tmp_path: Path) -> None:
    gate = Gate()
    state = State.filled(1)
    committed: list[int] = []
    saver = asyncckpt.Saver(
        path=tmp_path,
        hashtables=state.tables,
        tensors=state.dense,
        filter_func=gate,
        on_busy=asyncckpt.BusyPolicy("queue", deadline=0.05),
    )
    with saver:
        images = []
        futures = []
        for step in (1, 2):
            images.append(state.image())
            futures.append(saver.save_async(step))
            futures[-1].add_done_callback(lambda future: committed.append(future.step))
            state.scribble()
        with pytest.raises(asyncckpt.DeadlineError, match="no staging arena"):
            saver.save_async(3)
        gate.open()
        assert [future.result(60).step for future in futures] == [1, 2]
    assert committed == [1, 2]
    assert [load_image(tmp_path, step) for step in (1, 2)] == images


def test_queued_step_none_counts_steps_in_flight(tmp_path: Path) -> None:
    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}, filter_func=gate, on_busy="queue") as saver:
        futures = [saver.save_async(), saver.save_async()]
        with pytest.raises(asyncckpt.ConflictError, match="step 1 already exists"):
            saver.save_async(1)
        gate.open()
        assert [future.result(60).step for future in futures] == [0, 1]


def test_the_lock_belongs_to_the_process(tmp_path: Path) -> None:
    """Two Savers of two directories share it, so that saves never compete for arenas, disk and cores."""
    gate = Gate()
    one = asyncckpt.Saver(path=tmp_path / "one", tensors={"w": torch.ones(3)}, filter_func=gate)
    two = asyncckpt.Saver(path=tmp_path / "two", tensors={"w": torch.ones(3)})
    with one, two:
        one.save_async(1)
        with pytest.raises(asyncckpt.SaveInProgressError, match="one"):
            two.save_async(1)
        gate.open()
        two.save_async(1, on_busy="wait").result(60)


def test_load_waits_for_a_save(tmp_path: Path) -> None:
    gate = Gate()
    state = {"w": torch.arange(5)}
    with asyncckpt.Saver(path=tmp_path, tensors=state, filter_func=gate) as saver:
        saver.save_async(1)
        threading.Timer(0.05, gate.open).start()
        target = {"w": torch.zeros(5, dtype=torch.int64)}
        assert asyncckpt.Loader(tmp_path, tensors=target, on_busy="wait").load().step == 1
        assert target["w"].equal(state["w"])


@pytest.mark.parametrize("raised", [asyncio.CancelledError, SystemExit, KeyError])
@pytest.mark.parametrize("staged", [True, False])
def test_a_table_that_does_not_end_its_cut_holds_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException], staged: bool
) -> None:
    """Whatever it raises: the save has committed, and is reported; the next one may begin."""
    printed = threading.Event()
    monkeypatch.setattr("sys.excepthook", lambda *_: printed.set())
    table = asyncckpt.HashTable("t", 2)
    plain = table.begin_cut

    def begin_cut() -> Any:
        cut = plain()
        end = cut.end

        def end_and_raise(ok: bool) -> None:
            end(ok)
            raise raised

        cut.end = end_and_raise  # type: ignore[method-assign]
        return cut

    monkeypatch.setattr(table, "begin_cut", begin_cut)
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        for step in (0, 1):
            result = saver.save_async(step).result(DEADLINE_S) if staged else saver.save(step)
            assert result.step == step
    assert issubclass(raised, Exception) or printed.wait(DEADLINE_S), "nobody hears of it"
