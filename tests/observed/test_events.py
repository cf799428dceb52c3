"""Events of saves reach the function of a Saver, in order; whatever it does, saves are as without it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.engine import open_saver
from asyncckpt.engine.features import event_line
from asyncckpt.engine.process.save_lock import SaveCounts
from asyncckpt.errors import FilterError
from asyncckpt.events import Event, all_of, log_events, outcome
from asyncckpt.options import RankOptions

NAMES = [
    "lock",
    "cut",
    "capture",
    "call",
    "begin",
    "drain",
    "write",
    "prove",
    "publish",
    "commit",
    "save",
]
OPENED = "open"  # Comes first of all.


def saver(path: Path, on_event: Callable[[Event], object] | None, **options: Any) -> asyncckpt.Saver:
    debug = asyncckpt.DebugOptions(on_event=on_event)
    return asyncckpt.Saver(path=path, tensors={"w": torch.ones(100)}, debug=debug, **options)


def event_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "asyncckpt-events"}


def test_a_save_tells_its_parts_and_its_end(tmp_path: Path) -> None:
    events: list[Event] = []
    with saver(tmp_path, events.append) as own:
        result = own.save_async(7).result()
    assert [event.name for event in events] == [OPENED, *NAMES]
    parts = {event.name: event for event in events}
    assert (parts.pop(OPENED).step, {event.step for event in parts.values()}) == (None, {7})
    assert {event.path for event in events} == {tmp_path}
    assert parts["save"].result == result
    assert parts["save"].seconds >= result.seconds
    assert parts["call"].thread == threading.current_thread().name
    assert (parts["call"].thread_id, parts["write"].thread) == (threading.get_native_id(), "asyncckpt-worker")
    for inner, outer in (("capture", "call"), ("cut", "call"), ("lock", "call"), ("prove", "commit"), ("call", "save")):
        assert parts[outer].begun <= parts[inner].begun
        assert parts[inner].begun + parts[inner].seconds <= parts[outer].begun + parts[outer].seconds
    assert parts["call"].seconds == pytest.approx(result.stall_seconds, abs=0.5)
    assert abs(parts["call"].time - (tmp_path / "manifests").stat().st_mtime) < 60


def test_statistics_and_events_know_of_a_result_that_somebody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow background between the end of a save and what follows from it."""
    put, add = event_line.EventLine.put, SaveCounts.add

    def slow_put(line: event_line.EventLine, event: Event) -> None:
        time.sleep(0.2 * (event.name == "save"))
        put(line, event)

    def slow_add(counts: SaveCounts, *end: Any) -> None:
        time.sleep(0.2)
        add(counts, *end)

    monkeypatch.setattr(event_line.EventLine, "put", slow_put)
    monkeypatch.setattr(SaveCounts, "add", slow_add)
    events: list[Event] = []
    with saver(tmp_path, events.append) as own:
        own.save_async(1).result()
        assert own.statistics().saves_count == 1
        own.save_async(2).result()
    assert [event.step for event in events if event.name == "save"] == [1, 2]


def test_nothing_is_handed_on_before_the_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hands events on wakes a thread, and that would compete with training in the call."""
    handed: list[tuple[str, str]] = []
    put = event_line.EventLine.put

    def noted(line: event_line.EventLine, event: Event) -> None:
        handed.append((threading.current_thread().name, event.name))
        put(line, event)

    monkeypatch.setattr(event_line.EventLine, "put", noted)
    with saver(tmp_path, lambda event: None) as own:
        own.save_async(1).result()
        own.save(2)
    assert len(handed) > len(NAMES)
    assert {name for thread, name in handed if thread == threading.current_thread().name} <= {OPENED, "save"}


def test_without_a_function_there_is_no_thread_and_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_line.EventLine, "put", lambda *_: pytest.fail("an event"))
    before = event_threads()
    with saver(tmp_path, None) as own:
        own.save_async(1).result()
        assert event_threads() - before == set()  # Those of earlier Savers may end meanwhile.


def test_a_saver_that_is_not_made_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**facts: Any) -> None:
        raise MemoryError

    before = event_threads()
    with monkeypatch.context() as patch:
        patch.setattr(open_saver, "SaveTarget", refuse)
        with pytest.raises(MemoryError):
            saver(tmp_path, lambda event: None)
    for thread in event_threads() - before:
        thread.join(10)
        assert not thread.is_alive()


def test_a_filter_that_raises_has_taken_its_time(tmp_path: Path) -> None:
    def filter_func(blocks: list[Any]) -> list[Any]:
        raise ValueError("from the filter")

    events: list[Event] = []
    with saver(tmp_path, events.append, filter_func=filter_func) as own, pytest.raises(FilterError):
        own.save_async(1).result()
    assert "filter" in {event.name for event in events}


def test_a_function_that_raises_is_called_again_and_saves_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    def failing(event: Event) -> None:
        events.append(event)
        raise SystemExit("from on_event")

    with saver(tmp_path, failing) as own:
        assert own.save_async(1).result().step == 1
    assert [event.name for event in events] == [OPENED, *NAMES]
    assert asyncckpt.list_steps(tmp_path) == [1]
    assert len([record for record in caplog.records if "on_event raised" in record.message]) == 1 + len(NAMES)


def test_saves_do_not_wait_for_a_function_that_blocks(tmp_path: Path) -> None:
    gate, events = threading.Event(), []

    def blocking(event: Event) -> None:
        gate.wait()
        events.append((event.step, event.name))

    with saver(tmp_path, blocking) as own:
        assert [own.save_async(step).result().step for step in (1, 2, 3)] == [1, 2, 3]
        assert events == []
        gate.set()
    assert events == [(None, OPENED), *((step, name) for step in (1, 2, 3) for name in NAMES)]


def test_events_behind_too_many_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_line, "EVENTS_WAITING_MAX", 5)
    gate, events = threading.Event(), []

    def blocking(event: Event) -> None:
        gate.wait()
        events.append(event.name)

    with saver(tmp_path, blocking) as own:
        for step in (1, 2):
            own.save_async(step).result()
        line = own._events
        assert line is not None
        assert line.left_count >= 2 * len(NAMES) - 1
        gate.set()
    assert 5 <= len(events) <= 6
    assert len([record for record in caplog.records if "events are dropped" in record.message]) == 1


def test_close_goes_on_without_a_function_that_never_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_line, "EVENTS_WAIT_S", 0.01)
    gate = threading.Event()
    own = saver(tmp_path, lambda event: gate.wait())
    own.save_async(1).result()
    own.close()
    assert [record.message for record in caplog.records if "did not reach it" in record.message] != []
    saver(tmp_path, None).close()  # The directory is free.
    gate.set()


def test_a_function_may_close_the_saver_and_save_elsewhere(tmp_path: Path) -> None:
    closed = threading.Event()

    def close(event: Event) -> None:
        if event.name == "save":
            asyncckpt.save(tmp_path / "other", {"a": 1})
            own.close()
            closed.set()

    own = saver(tmp_path / "run", close)
    own.save_async(1).result()
    assert closed.wait(60)
    assert asyncckpt.load(tmp_path / "other") == {"a": 1}


def test_the_thread_ends_with_a_saver_that_is_dropped(tmp_path: Path) -> None:
    before, ended = event_threads(), []
    own = saver(tmp_path, lambda event: None)
    line = own._events
    assert line is not None
    ended.append(line._thread)
    own.save_async(1).result()
    assert len(event_threads() - before) == 1
    del own, line
    gc.collect()
    ended[0].join(60)
    assert not ended[0].is_alive()


def test_how_saves_end_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "asyncckpt.events")
    ends: list[Event] = []
    gate, begun, fails = threading.Event(), threading.Event(), [True, False, False]

    def filter_func(blocks: list[Any]) -> list[Any]:
        begun.set()
        gate.wait()
        if fails.pop(0):
            raise ValueError("from the filter")
        return blocks

    def note(event: Event) -> None:
        if event.name == "save":
            ends.append(event)

    with saver(tmp_path, all_of(log_events, note), filter_func=filter_func, on_busy="skip") as own:
        failing = own.save_async(1)
        assert begun.wait(60)
        assert own.save_async(2).result().skipped
        gate.set()
        assert failing.exception() is not None
        own.wait_idle()
        cancelled = own.save_async(3)
        cancelled.cancel()
        cancelled.exception()
        own.save_async(4, on_busy="wait").result()
    assert [(event.step, outcome(event)) for event in ends[:2]] == [(2, "skipped"), (1, "failed")]
    assert "from the filter" in str(ends[1].error)
    assert outcome(ends[-1]) == "committed"
    assert "save of step 4 of" in caplog.text


class OddError(Exception):
    def __init__(self, one: int, *, other: int) -> None:
        super().__init__(f"odd {one + other}")


@pytest.mark.parametrize("error", [ValueError("plain"), OddError(1, other=2), asyncckpt.IOFailedError("io", errno=5)])
def test_the_error_of_an_event_keeps_no_frame_of_the_save(tmp_path: Path, error: Exception) -> None:
    ends: list[Event] = []

    def filter_func(blocks: list[Any]) -> list[Any]:
        raise error from KeyError("cause")

    def note(event: Event) -> None:
        if event.name == "save":
            ends.append(event)

    with saver(tmp_path, note, filter_func=filter_func) as own:
        failed = own.save_async(1).exception()
    told = ends[0].error
    assert failed is not None
    assert failed.__traceback__ is not None
    assert told is not None
    while told is not None:
        assert told.__traceback__ is None
        assert told.__context__ is None
        last, told = told, told.__cause__
    assert str(failed) in str(ends[0].error)
    assert "cause" in str(last)


def test_a_wait_behind_close_ends_with_the_thread() -> None:
    gate = threading.Event()
    line = event_line.EventLine(lambda event: gate.wait())
    line.put(Event(name="call", step=1, path=Path(), rank=0, time=0.0, begun=0.0, seconds=0.0))
    line.close()
    threading.Timer(0.2, gate.set).start()
    begun = time.monotonic()
    line.wait(30)
    assert time.monotonic() - begun < 15


def test_one_of_several_functions_that_raises_keeps_none_of_the_others(tmp_path: Path) -> None:
    first: list[Event] = []
    last: list[Event] = []

    def failing(event: Event) -> None:
        raise ValueError("from the second")

    with saver(tmp_path, all_of(first.append, failing, last.append)) as own:
        own.save_async(1).result()
    assert [event.name for event in first] == [event.name for event in last] == [OPENED, *NAMES]


def test_a_compaction_and_retention_are_told(tmp_path: Path) -> None:
    events: list[Event] = []
    table = asyncckpt.HashTable("user", dim=2)
    more = {"hashtables": {"user": table}, "keep": 1, "deltas": asyncckpt.DeltaPolicy(bytes_share_max=9.0)}
    with saver(tmp_path, events.append, **more) as own:
        for step in (1, 2):
            table.insert(torch.tensor([step]), torch.ones(1, 2))
            own.save_async(step).result()
        own.compact(2).result()
    found = {(event.name, event.step) for event in events}
    assert found >= {("retention", 1), ("retention", 2), ("compaction", 2)}
    [compaction] = [event for event in events if event.name == "compaction"]
    assert compaction.result is not None
    assert compaction.result.kind == "full"


def test_each_rank_tells_its_own(tmp_path: Path) -> None:
    events: list[Event] = []
    ranks = RankOptions(in_turn=True)
    savers = [saver(tmp_path, events.append, shard_index=rank, shard_num=2, ranks=ranks) for rank in range(2)]
    for own in savers:
        own.save_async(1, on_busy="queue")
    for own in savers:
        own.close()
    assert {event.rank for event in events if event.name == "write"} == {0, 1}
    assert {event.rank for event in events if event.name == "commit"} == {1}


def test_what_is_no_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.UsageError, match="on_event is not callable"):
        saver(tmp_path / "run", "print")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


LAST_SAVE = """
import torch, asyncckpt
def tell(event):
    if event.name == "save":
        print("told", event.step, flush=True)
debug = asyncckpt.DebugOptions(on_event=tell)
ckpt = asyncckpt.Checkpointer({path!r}, every=100, w=torch.ones(3), options={{"debug": debug}})
for step in range(3):
    ckpt.step(step)
"""
NEVER_RETURNS = """
import threading, torch, asyncckpt
import asyncckpt.saver
from asyncckpt.engine.features import event_line
from asyncckpt.engine.process.save_lock import SaveCounts
event_line.EVENTS_WAIT_S = 0.1
debug = asyncckpt.DebugOptions(on_event=lambda event: threading.Event().wait())
saver = asyncckpt.Saver(path={path!r}, tensors={{"w": torch.ones(3)}}, debug=debug)
saver.save_async(2).result()
"""


@pytest.mark.parametrize(("program", "told"), [(LAST_SAVE, "told 2\n"), (NEVER_RETURNS, "")])
def test_a_program_ends_as_without(tmp_path: Path, program: str, told: str) -> None:
    """The last save is told, even where it is made while the interpreter ends; a function that blocks keeps nobody."""
    source = program.format(path=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, told), done.stderr
    assert asyncckpt.list_steps(tmp_path / "run") == [2]
