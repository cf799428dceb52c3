"""A trace of saves is one that Chrome and Perfetto open: well-formed events whose spans nest on their tracks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import events
from asyncckpt.events import Event, TraceFile, all_of
from tests.observed.chrome_trace import faults, read


def save_some(folder: Path, trace: TraceFile, count: int, **options: Any) -> None:
    table = asyncckpt.HashTable("user", dim=4)
    saver = asyncckpt.Saver(
        path=folder / "run",
        hashtables={"user": table},
        tensors={"w": torch.ones(1000)},
        deltas=asyncckpt.DeltaPolicy(bytes_share_max=9.0),
        keep=2,
        debug=asyncckpt.DebugOptions(on_event=trace),
        **options,
    )
    with saver:
        for step in range(count):
            table.insert(torch.arange(step, step + 50), torch.ones(50, 4))
            saver.save_async(step, on_busy="queue")
        saver.wait_idle()
        saver.compact().result()


def test_a_trace_of_queued_saves_is_well_formed(tmp_path: Path) -> None:
    save_some(tmp_path, TraceFile(tmp_path / "trace.json"), 5, filter_func=list)
    trace = read(tmp_path / "trace.json")
    assert faults(trace) == []
    events = trace["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert names >= {"call", "capture", "begin", "filter", "drain", "write", "commit", "prove", "publish", "retention"}
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks >= {"asyncckpt-worker", "asyncckpt-commit", "asyncckpt-background", "asyncckpt-retention"}
    ends = [event for event in events if event["ph"] == "b"]
    assert [event["name"] for event in ends] == [*(f"save of step {step}" for step in range(5)), "compaction of step 4"]
    assert all(event["args"]["outcome"] == "committed" for event in ends)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "trace.json"]


def test_a_trace_of_a_streamed_save_shows_its_two_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.staging.chunks.CHUNK_BYTES", 1 << 16)
    saver = asyncckpt.Saver(
        path=tmp_path / "run",
        tensors={"w": torch.ones(1 << 17)},
        debug=asyncckpt.DebugOptions(on_event=TraceFile(tmp_path / "trace.json")),
    )
    with saver:
        saver.save(1)
    trace = read(tmp_path / "trace.json")
    assert faults(trace) == []
    named = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    tracks = [
        (event["name"], named[event["tid"]].rstrip(" 23456789")) for event in trace["traceEvents"] if event["ph"] == "X"
    ]
    chunks = (4 << 17 >> 16) + 1
    assert tracks.count(("fill", "asyncckpt-worker")) == chunks
    assert tracks.count(("chunk", "asyncckpt-writer")) == chunks
    assert tracks.count(("sync", "asyncckpt-worker")) == 1


def test_a_trace_keeps_the_newest_saves(tmp_path: Path) -> None:
    save_some(tmp_path, TraceFile(tmp_path / "trace.json", saves=2), 6)
    trace = read(tmp_path / "trace.json")
    assert faults(trace) == []
    assert {event["args"]["step"] for event in trace["traceEvents"] if event["name"] == "call"} == {5}
    assert len([event for event in trace["traceEvents"] if event["ph"] == "b"]) == 2


def test_a_trace_that_two_savers_write_at_once_has_the_events_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, dumps, threads = TraceFile(tmp_path / "trace.json"), events.json.dumps, list[threading.Thread]()

    def event(step: int) -> Event:
        return Event(name="save", step=step, path=tmp_path, rank=0, time=0.0, begun=float(step), seconds=1.0)

    def interrupted(content: Any) -> str:
        if not threads:
            threads.append(threading.Thread(target=trace, args=(event(2),)))
            threads[0].start()
            threads[0].join(0.1)  # It may have to wait until this one is written.
        return dumps(content)

    monkeypatch.setattr(events.json, "dumps", interrupted)
    trace(event(1))
    threads[0].join(30)
    ends = [found["args"]["step"] for found in read(tmp_path / "trace.json")["traceEvents"] if found["ph"] == "b"]
    assert ends == [1, 2]


def test_saves_of_two_savers_are_in_one_trace(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    one, all = asyncckpt.DebugOptions(on_event=trace), asyncckpt.DebugOptions(on_event=all_of(trace))
    with (
        asyncckpt.Saver(path=tmp_path / "a", tensors={"w": torch.ones(9)}, debug=one) as first,
        asyncckpt.Saver(path=tmp_path / "b", tensors={"w": torch.ones(9)}, debug=all) as second,
    ):
        first.save_async(1, on_busy="queue")
        second.save_async(1, on_busy="queue")
        first.save_async(2, on_busy="queue")
    written = read(tmp_path / "trace.json")
    assert faults(written) == []


def _late(events: list[dict[str, Any]]) -> None:
    next(event for event in events if event["name"] == "capture")["dur"] += 1e9


def _without(key: str) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: next(event for event in events if event["ph"] == "X").pop(key) and None


def _unended(events: list[dict[str, Any]]) -> None:
    events.remove(next(event for event in events if event["ph"] == "e"))


def _unnamed(events: list[dict[str, Any]]) -> None:
    events[:] = [event for event in events if event["name"] != "thread_name"]


def _unknown(events: list[dict[str, Any]]) -> None:
    events[-1]["ph"] = "?"


@pytest.mark.parametrize("break_it", [_late, _without("dur"), _without("ts"), _unended, _unnamed, _unknown])
def test_the_checker_finds_a_broken_trace(tmp_path: Path, break_it: Callable[[list[dict[str, Any]]], None]) -> None:
    save_some(tmp_path, TraceFile(tmp_path / "trace.json"), 1)
    trace = copy.deepcopy(read(tmp_path / "trace.json"))
    assert faults(trace) == []
    break_it(trace["traceEvents"])
    assert faults(trace) != []
