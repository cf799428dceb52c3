"""Periodic fire-and-forget saves and retention."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import periodic as periodic_module
from tests.worlds.gates import Gate, failing


def make(path: Path, **options: Any) -> asyncckpt.Saver:
    return asyncckpt.Saver(path=path, tensors={"w": torch.ones(10)}, **options)


def test_every_steps(tmp_path: Path) -> None:
    with make(tmp_path, on_busy="wait") as saver, asyncckpt.PeriodicSaver(saver, every_steps=3) as periodic:
        for step in range(10):
            if periodic.step(step) is not None:
                saver.wait_idle(60)
    assert asyncckpt.list_steps(tmp_path) == [3, 6, 9]
    assert periodic.statistics().begun_count == 3
    assert periodic.statistics().last_result is not None
    assert periodic.statistics().last_result.step == 9


def test_a_save_that_is_asked_for_is_queued_and_none_is_made_by_itself(tmp_path: Path) -> None:
    gate = Gate()
    with (
        make(tmp_path, filter_func=gate) as saver,
        asyncckpt.PeriodicSaver(saver, every_steps=math.inf) as periodic,
    ):
        assert periodic.step(1, save=True) is not None
        assert gate.reached.wait(60)
        assert periodic.step(2) is None
        assert periodic.step(3, save=True) is not None
        assert periodic.step(4, save=False) is None
        gate.open()
        periodic.drain(60)
        with pytest.raises(asyncckpt.UsageError, match="save must be"):
            periodic.step(5, save="yes")  # type: ignore[arg-type]
    assert asyncckpt.list_steps(tmp_path) == [1, 3, 4]  # The last one at the end.


def test_the_error_of_a_queued_save_is_told_and_the_next_one_is_made(tmp_path: Path) -> None:
    gate, seen = Gate(), list[BaseException]()

    def failing_for_two(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        gate(blocks)
        if not seen and len(asyncckpt.list_steps(tmp_path)) == 0:
            raise RuntimeError("disk on fire")
        return blocks

    with make(tmp_path, filter_func=failing_for_two) as saver:
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=math.inf, on_error=seen.append)
        periodic.step(1, save=True)
        periodic.step(2, save=True)
        gate.open()
        periodic.drain(60)
        periodic.step(3, save=True)
        periodic.drain(60)
        assert len(seen) == 2
    assert asyncckpt.list_steps(tmp_path) == [3]


@pytest.mark.parametrize("on_error", ["raise", "warn", "call"])
def test_no_error_is_lost_where_the_first_one_ends_the_step(tmp_path: Path, on_error: str) -> None:
    def fail(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        gate(blocks)
        raise RuntimeError(f"fire {next(fires)}")

    def stop(error: BaseException) -> None:
        raise RuntimeError(f"stopped: {error}")

    gate, fires = Gate(), iter(range(2))
    with make(tmp_path, filter_func=fail) as saver, warnings.catch_warnings():
        warnings.simplefilter("error")
        handler: Any = stop if on_error == "call" else on_error
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=math.inf, on_error=handler)
        for step in range(2):
            periodic.step(step, save=True)
        gate.open()
        with pytest.raises((asyncckpt.CheckpointError, RuntimeError, RuntimeWarning)) as raised:
            periodic.drain(60)
    told = ""
    cause: BaseException | None = raised.value
    while cause is not None:
        told, cause = f"{told} {cause}", cause.__cause__
    assert [f"fire {number}" in told for number in range(2)] == [True, True]


def test_every_seconds_by_a_given_clock(tmp_path: Path) -> None:
    now = [100.0]
    with make(tmp_path) as saver:
        periodic = asyncckpt.PeriodicSaver(saver, every_seconds=10, clock=lambda: now[0])
        for step in range(8):
            periodic.step(step)
            saver.wait_idle(60)
            now[0] += 4
        periodic.drain(60)
    assert asyncckpt.list_steps(tmp_path) == [3, 6]


def test_busy_saves_are_skipped_and_counted(tmp_path: Path) -> None:
    gate = Gate()
    with make(tmp_path, filter_func=gate) as saver:
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=1)
        assert periodic.step(1) is not None
        assert gate.reached.wait(60)
        assert periodic.step(2) is None
        assert periodic.step(3) is None
        gate.open()
        periodic.drain(60)
        assert periodic.statistics().skipped_count == 2
        periodic.step(4)
        periodic.drain(60)
    assert asyncckpt.list_steps(tmp_path) == [1, 4]


def test_the_wait_for_the_last_save_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic_module, "SAVE_DEADLINE_S", 0.01)
    gate = Gate()
    with make(tmp_path, filter_func=gate) as saver:
        expected = pytest.raises(asyncckpt.DeadlineError, match=r"save of step 1 did not end within 0\.01 s")
        with expected, asyncckpt.PeriodicSaver(saver, every_steps=1) as periodic:
            periodic.step(1)
        gate.open()
    assert asyncckpt.list_steps(tmp_path) == [1]


def test_background_error_reaches_the_next_step(tmp_path: Path) -> None:
    with make(tmp_path, filter_func=failing) as saver:
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=2)
        future = periodic.step(2)
        assert future is not None
        saver._errors.wait(60)
        with pytest.raises(asyncckpt.errors.FilterError, match="disk on fire"):
            periodic.step(3)
        periodic.step(5)
        assert periodic.statistics().failed_count == 1


def test_an_error_that_somebody_has_got_is_only_counted(tmp_path: Path) -> None:
    saver = make(tmp_path, filter_func=failing)
    periodic = asyncckpt.PeriodicSaver(saver, every_steps=1)
    periodic.step(1)
    with pytest.raises(asyncckpt.errors.FilterError, match="disk on fire"):
        saver.wait_idle()
    periodic.drain(60)
    saver.close()
    assert periodic.statistics().failed_count == 1


def test_errors_may_warn_or_call(tmp_path: Path) -> None:
    seen: list[BaseException] = []
    with make(tmp_path, filter_func=failing) as saver:
        warning = asyncckpt.PeriodicSaver(saver, every_steps=1, on_error="warn")
        warning.step(1)
        with pytest.warns(RuntimeWarning, match="disk on fire"):
            warning.drain(60)
        calling = asyncckpt.PeriodicSaver(saver, every_steps=1, on_error=seen.append)
        calling.step(1)
        calling.drain(60)
    assert [type(error) for error in seen] == [asyncckpt.errors.FilterError]


def test_an_error_that_comes_in_the_middle_of_a_step_costs_no_save(tmp_path: Path) -> None:
    gate = Gate()
    seen: list[BaseException] = []
    fails = [False, True]
    times = [22.0, 21.0, 20.0, 11.0, 10.0, 0.0]

    def filter_func(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        gate(blocks)
        return failing(blocks) if fails.pop() else blocks

    def clock() -> float:
        now = times.pop()
        if now == 21.0:  # Between the two looks of the second step.
            gate.open()
            saver._errors.wait(60)
        return now

    with make(tmp_path, filter_func=filter_func) as saver:
        periodic = asyncckpt.PeriodicSaver(saver, every_seconds=5, on_error=seen.append, clock=clock)
        periodic.step(1)
        assert gate.reached.wait(60)
        future = periodic.step(2)
        assert future is not None
        periodic.step(3)
        periodic.drain(60)
        assert (len(seen), periodic.statistics().failed_count) == (1, 1)
    assert asyncckpt.list_steps(tmp_path) == [2]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every_steps": 1, "every_seconds": 1},
        {"every_steps": 0},
        {"every_seconds": 0},
        {"every_steps": 1, "on_error": "x"},
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any]) -> None:
    with make(tmp_path) as saver, pytest.raises(asyncckpt.UsageError):
        asyncckpt.PeriodicSaver(saver, **options)


def test_keep_latest(tmp_path: Path) -> None:
    with make(tmp_path, keep=2) as saver:
        for step in range(5):
            saver.save(step)
    assert asyncckpt.list_steps(tmp_path) == [3, 4]
    assert len(list((tmp_path / "data").iterdir())) == 2


def test_a_partial_load_does_not_count_as_verified(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("t", 4, optimizer_slots={"sum": ()})
    table.lookup(torch.arange(9))
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, keep=1) as saver:
        saver.save(1)
        asyncckpt.Loader(tmp_path, {"t": asyncckpt.HashTable("t", 4)}).load()
        saver.save(2)
    assert asyncckpt.list_steps(tmp_path) == [2]


def test_retention_removes_nothing_when_a_kept_checkpoint_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(tmp_path) as saver:
        for step in (1, 2):
            saver.save(step)
    file = tmp_path / asyncckpt.describe(tmp_path, 2).files[0]
    file.unlink()
    with make(tmp_path, keep=2) as saver:
        saver.save(3)
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 3]
    assert "were kept" in caplog.text
    assert "is missing" in caplog.text


def test_leftovers_of_crashed_saves_are_swept_by_the_next_save(tmp_path: Path) -> None:
    with make(tmp_path) as saver:
        saver.save(1)
    dead = tmp_path / "data" / f"{2:012d}-{'ab' * 16}"
    dead.mkdir()
    (dead / "r00000-000.safetensors").write_bytes(b"half")
    loser = tmp_path / "data" / f"{1:012d}-{'cd' * 16}"
    loser.mkdir()
    (tmp_path / "manifests" / f".m-{'ab' * 16}").write_bytes(b"{")
    foreign = tmp_path / "data" / "lost+found"
    foreign.mkdir()
    asyncckpt.Loader(tmp_path, tensors={"w": torch.zeros(10)}).load()
    assert dead.exists()
    assert loser.exists()
    with make(tmp_path) as saver:
        saver.save(3)
    assert not dead.exists()
    assert not loser.exists()
    assert foreign.exists()
    assert sorted(p.name for p in (tmp_path / "manifests").iterdir()) == [f"{step:012d}.json" for step in (1, 3)]
    asyncckpt.verify(tmp_path, 1)


def test_an_unreadable_manifest_stops_the_sweep_of_its_step(tmp_path: Path) -> None:
    with make(tmp_path) as saver:
        saver.save(1)
    (tmp_path / "manifests" / f"{1:012d}.json").write_text("{}")
    loser = tmp_path / "data" / f"{1:012d}-{'cd' * 16}"
    loser.mkdir()
    with make(tmp_path) as saver:
        saver.save(3)
    assert loser.exists()


def test_a_delta_holds_what_was_trained_during_skipped_saves(tmp_path: Path) -> None:
    gate = Gate()
    table = asyncckpt.HashTable("user", 2)
    policy = asyncckpt.DeltaPolicy(bytes_share_max=100.0)
    tables = {"user": table}
    with asyncckpt.Saver(path=tmp_path, hashtables=tables, filter_func=gate, deltas=policy) as saver:
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=1)
        for step in range(1, 6):
            table.embedding[table.lookup(torch.arange(10 * step))[-10:]] = float(step)
            table.remove(torch.tensor([step]))
            began = periodic.step(step) is not None
            assert began == (step in (1, 4, 5))
            if step in (3, 4, 5):
                gate.open()
                periodic.drain(60)
        assert periodic.statistics().skipped_count == 2
        result = periodic.statistics().last_result
        assert result is not None
        assert (result.step, result.kind) == (5, "delta")
    assert [asyncckpt.describe(tmp_path, step).parents for step in (1, 4, 5)] == [(), (1,), (4, 1)]
    loaded = asyncckpt.HashTable("user", 2)
    asyncckpt.Loader(tmp_path, hashtables={"user": loaded}).load()
    assert sorted(loaded.ids().tolist()) == sorted(table.ids().tolist())
    rows = loaded.lookup(table.ids(), insert=False)
    assert torch.equal(loaded.embedding[rows], table.embedding[table.used_rows()])


def test_a_fast_loop_loses_no_last_step(tmp_path: Path) -> None:
    """Nine of ten were skipped, because one was in flight, and the last one with them."""
    gate, x = Gate(), torch.zeros(2)
    with asyncckpt.Saver(path=tmp_path, tensors={"x": x}, filter_func=gate) as saver:
        with asyncckpt.PeriodicSaver(saver, every_steps=1) as periodic:
            for step in range(1, 11):
                x.fill_(step)
                periodic.step(step, metadata={"loss": step / 2})
            assert periodic.statistics().skipped_count == 9
            gate.open()
        result = periodic.statistics().last_result
        assert result is not None
        assert result.step == 10
    assert asyncckpt.list_steps(tmp_path) == [1, 10]
    assert asyncckpt.load(tmp_path)["x"].tolist() == [10, 10]
    assert asyncckpt.describe(tmp_path).metadata == {"loss": 5.0}


def test_the_last_step_is_saved_by_an_async_block_and_behind_an_exception(tmp_path: Path) -> None:
    async def train(step: int, error: BaseException | None) -> None:
        async with asyncckpt.PeriodicSaver(saver, every_steps=100) as periodic:
            periodic.step(step)
            if error is not None:
                raise error

    with make(tmp_path) as saver:
        asyncio.run(train(3, None))
        with pytest.raises(ValueError, match="nan"):
            asyncio.run(train(4, ValueError("nan")))
        with contextlib.suppress(SystemExit), asyncckpt.PeriodicSaver(saver, every_steps=100) as periodic:
            periodic.step(5)
            sys.exit(1)
    metadata = [asyncckpt.describe(tmp_path, step).metadata for step in (3, 4, 5)]
    assert [found.get("asyncckpt.interrupted") for found in metadata] == [None, "ValueError", "SystemExit"]
    assert [found.get("asyncckpt.half_way") for found in metadata] == [None, True, True]


def test_an_earlier_error_does_not_keep_the_last_step_from_being_saved(tmp_path: Path) -> None:
    fails = [True]

    def once(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        return failing(blocks) if fails.pop() else blocks

    with make(tmp_path, filter_func=once) as saver:
        expected = pytest.raises(asyncckpt.errors.FilterError, match="disk on fire")
        with expected, asyncckpt.PeriodicSaver(saver, every_steps=1) as periodic:
            periodic.step(1)
            saver._errors.wait(60)
            fails[:] = [False]
    assert asyncckpt.list_steps(tmp_path) == [1]
    assert (periodic.statistics().failed_count, periodic.statistics().begun_count) == (1, 2)
    with make(tmp_path, filter_func=failing) as saver:
        warned = pytest.warns(RuntimeWarning, match="disk on fire")
        with warned, asyncckpt.PeriodicSaver(saver, every_steps=100, on_error="warn") as periodic:
            periodic.step(2)
    assert asyncckpt.list_steps(tmp_path) == [1]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_save_of_the_program_itself_that_fails_keeps_the_last_step_of_an_async_block_from_nothing(
    tmp_path: Path, on_error: Any
) -> None:
    fails = [True]

    def once(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        if not fails:
            return blocks
        fails.clear()
        time.sleep(0.5)  # So that the block ends while it is in flight.
        return failing(blocks)

    async def run() -> None:
        saver = make(tmp_path, filter_func=once)
        async with asyncckpt.PeriodicSaver(saver, every_steps=100, on_error=on_error) as periodic:
            saver.save_async(5)
            periodic.step(6)

    why = "disk on fire"
    is_raised = pytest.raises(asyncckpt.errors.FilterError, match=why)
    with is_raised if on_error == "raise" else pytest.warns(RuntimeWarning, match=why):
        asyncio.run(run())
    assert asyncckpt.list_steps(tmp_path) == [6]


def causes(error: BaseException) -> list[BaseException]:
    return [error] if error.__cause__ is None else [error, *causes(error.__cause__)]


@pytest.mark.parametrize("is_async", [False, True], ids=["with", "async with"])
@pytest.mark.parametrize("failing_steps", [[1], [2], [1, 2]], ids=["earlier", "last", "both"])
@pytest.mark.parametrize("on_error", ["raise", "warn", "call"])
def test_both_kinds_of_block_end_alike(tmp_path: Path, on_error: str, failing_steps: list[int], is_async: bool) -> None:
    """An error of an earlier save and one of the last step's come out once, and how on_error says."""
    seen: list[BaseException] = []
    caught: list[pytest.ExceptionInfo[BaseException]] = []
    fails = [False]

    def filter_func(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        return failing(blocks) if fails[0] else blocks

    def loop(periodic: asyncckpt.PeriodicSaver) -> None:
        for step in (1, 2):
            fails[0] = step in failing_steps
            if step == 1:
                periodic.step(1)
                saver._errors.wait(60)
            else:
                periodic._note_end(2, None)

    async def run() -> None:
        async with periodic:
            loop(periodic)

    with make(tmp_path, filter_func=filter_func) as saver, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        handler: Any = seen.append if on_error == "call" else on_error
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=1, on_error=handler)
        with contextlib.ExitStack() as raised:
            if on_error == "raise":
                caught.append(raised.enter_context(pytest.raises(asyncckpt.errors.FilterError, match="disk on fire")))
            if is_async:
                asyncio.run(run())
            else:
                with periodic:
                    loop(periodic)
    assert len(seen) == (1 if on_error == "call" else 0)
    assert sum("disk on fire" in str(one.message) for one in warned) == (1 if on_error == "warn" else 0)
    assert periodic.statistics().failed_count == len(failing_steps)
    told = [*seen, *(given.value for given in caught)]
    if told:
        assert sum(isinstance(error, asyncckpt.errors.FilterError) for error in causes(told[0])) == len(failing_steps)
    assert asyncckpt.list_steps(tmp_path) == [step for step in (1, 2) if step not in failing_steps]


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_a_newer_save_of_somebody_else_lets_the_last_step_stay_saved(tmp_path: Path, is_waited_for: bool) -> None:
    with make(tmp_path) as saver, asyncckpt.PeriodicSaver(saver, every_steps=5) as periodic:
        future = periodic.step(5)
        assert future is not None
        if is_waited_for:
            periodic.drain()
        saver.save(6, on_busy="wait")
        assert periodic.save_now().step == 5
    assert asyncckpt.list_steps(tmp_path) == [5, 6]


def test_save_now_saves_what_is_not_due(tmp_path: Path) -> None:
    with make(tmp_path) as saver, asyncckpt.PeriodicSaver(saver, every_steps=100) as periodic:
        with pytest.raises(asyncckpt.UsageError, match="no step has ended yet"):
            periodic.save_now()
        assert periodic.save_now(7).step == 7
        periodic.step(8)
        saver.save(8)  # By somebody else.
        assert periodic.save_now().step == 8
    assert asyncckpt.list_steps(tmp_path) == [7, 8]
