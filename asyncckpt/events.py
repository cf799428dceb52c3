"""What happens in saves, for whoever wants to see it: functions for `DebugOptions(on_event=...)` that pass events on.

    log_events            to the standard library's logging
    TraceFile             to a file for https://ui.perfetto.dev and chrome://tracing
    prometheus_events     to counters and histograms of prometheus_client
    opentelemetry_events  to metrics and traces of opentelemetry
    all_of                to several of these, or of your own

The two packages are imported by the functions that need them. `asyncckpt.model.event` says which events there are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncckpt.arguments import check_int
from asyncckpt.errors import SaveCancelledError
from asyncckpt.model.event import Event, EventName, unix_time
from asyncckpt.model.store_url import Place
from asyncckpt.signals import Guard

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

__all__ = ["Event", "EventName", "TraceFile", "all_of", "log_events", "opentelemetry_events", "prometheus_events"]

EventFunction = Callable[[Event], object]
EVENTS_OF_A_SAVE_MAX = 1000  # Of more, which are parts of hundreds of chunks, the oldest go.
OPEN_SAVES_MAX = 100
OUTCOMES = ("committed", "skipped", "failed", "cancelled")
SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

_log = logging.getLogger("asyncckpt.events")


def all_of(*functions: EventFunction) -> EventFunction:
    """Return a function that calls all of these with every event, whatever one of them raises."""

    def call(event: Event) -> None:
        with contextlib.ExitStack() as left:
            for function in reversed(functions):
                left.callback(function, event)

    return call


def log_events(event: Event) -> None:
    """Log to the logger `asyncckpt.events`: ends of saves as INFO, failed ones as WARNING, all else as DEBUG."""
    result, where = event.result, f"step {event.step} of {event.path}"
    if event.name == "open":
        _log.info("%s is open, its newest checkpoint is %s", event.path, "none" if event.step is None else event.step)
    elif event.error is not None:
        _log.warning("%s of %s %s: %s", event.name, where, outcome(event), event.error)
    elif result is None:
        _log.debug("%s of %s took %.1f ms on %s", event.name, where, 1e3 * event.seconds, event.thread)
    elif result.skipped:
        _log.info("%s of %s skipped", event.name, where)
    else:
        facts = (result.kind, result.bytes_written / 2**20, event.seconds, 1e3 * result.stall_seconds)
        _log.info("%s of %s: %s, %.1f MiB in %.2f s, training waited %.1f ms", event.name, where, *facts)


def outcome(event: Event) -> str:
    """Return how a "save", "compaction" or "upload" has ended: committed, skipped, cancelled or failed."""
    if event.error is not None:
        return "cancelled" if isinstance(event.error, SaveCancelledError) else "failed"
    return "skipped" if event.result is not None and event.result.skipped else "committed"


class TraceFile:
    """Keep a trace of the newest saves in a file, in the JSON of Chrome's trace events, which Perfetto opens.

    path   replaced, by a rename, whenever a save, a compaction or retention has ended
    saves  of how many saves; several Savers may share them
    """

    def __init__(self, path: str | os.PathLike[str], *, saves: int = 8) -> None:
        check_int("saves", saves, at_least=1)
        self._path = Path(path)
        self._events: deque[Event] = deque(maxlen=saves * EVENTS_OF_A_SAVE_MAX)
        self._saves = saves
        self._guard = Guard()  # Each Saver calls it on a thread of its own.

    def __call__(self, event: Event) -> None:
        with self._guard:
            self._take(event)

    def _take(self, event: Event) -> None:
        if event.name == "open":
            return
        self._events.append(event)
        if event.name not in ("save", "compaction", "retention"):
            return
        ended = [kept for kept in self._events if kept.name in ("save", "compaction")]
        if len(ended) > self._saves:
            oldest = min(kept.begun for kept in ended[-self._saves :])
            self._events = deque((kept for kept in self._events if kept.begun >= oldest), self._events.maxlen)
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(trace_of(self._events)), encoding="utf-8")
        temporary.replace(self._path)


def trace_of(events: Iterable[Event]) -> dict[str, Any]:
    """Return events as a JSON object of Chrome's trace event format: spans on the tracks of their threads, and each
    save from its call to its end on a track of its own.

    Threads end when they are idle, so those of one name that follow each other share a track.
    """
    known = sorted(events, key=lambda event: (event.begun, -event.seconds))
    tracks = _tracks([event for event in known if event.thread])
    pid = os.getpid()
    usual: dict[str, Any] = {"pid": pid, "cat": "asyncckpt"}
    rank = known[0].rank if known else 0
    traced: list[dict[str, Any]] = [_named("process_name", pid, 0, f"asyncckpt, rank {rank}")]
    for number, (name, lane) in enumerate(dict.fromkeys(tracks.values()), start=1):
        traced.append(_named("thread_name", pid, number, name if lane == 0 else f"{name} {lane + 1}"))
    numbers = {track: number for number, track in enumerate(dict.fromkeys(tracks.values()), start=1)}
    for event in known:
        begin, end = round(1e9 * event.begun), round(1e9 * (event.begun + event.seconds))
        facts = {"step": event.step, "path": str(event.path)}
        if event.thread:
            tid = numbers[tracks[event.thread, event.thread_id]]
            span = {"ph": "X", "ts": begin / 1e3, "dur": (end - begin) / 1e3, "tid": tid, "args": facts}
            traced.append({"name": event.name, **usual, **span})
        else:
            both = {"name": f"{event.name} of step {event.step}", **usual, "tid": 0, "id": f"{event.name} {begin}"}
            traced.append({**both, "ph": "b", "ts": begin / 1e3, "args": {**facts, **_end_facts(event)}})
            traced.append({**both, "ph": "e", "ts": end / 1e3, "args": {}})
    return {"traceEvents": traced, "displayTimeUnit": "ms"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _end_facts(event: Event) -> dict[str, Any]:
    facts: dict[str, Any] = {"outcome": outcome(event)}
    if event.error is not None:
        facts["error"] = str(event.error)
    if event.result is not None:
        facts |= {"kind": event.result.kind, "stall_ms": 1e3 * event.result.stall_seconds}
        facts |= {"bytes_written": event.result.bytes_written, "rows": event.result.rows_count}
    return facts


def _tracks(events: Iterable[Event]) -> dict[tuple[str, int], tuple[str, int]]:
    """Return the track of every thread: its name, and a lane in which no other thread runs at that time."""
    times: dict[tuple[str, int], tuple[float, float]] = {}
    for event in events:
        thread, end = (event.thread, event.thread_id), event.begun + event.seconds
        begin, last = times.get(thread, (event.begun, end))
        times[thread] = min(begin, event.begun), max(last, end)
    found: dict[tuple[str, int], tuple[str, int]] = {}
    lanes: dict[str, list[float]] = {}
    for thread, (begin, end) in sorted(times.items(), key=lambda item: item[1]):
        ends = lanes.setdefault(thread[0], [])
        lane = next((number for number, last in enumerate(ends) if last <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        found[thread] = thread[0], lane
    return found


def prometheus_events(registry: CollectorRegistry | None = None) -> EventFunction:
    """Return a function that counts in metrics of prometheus_client. Call it once for each registry (None: the usual
    one); several Savers may share what it returns.
    """
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    into: dict[str, Any] = {"registry": REGISTRY if registry is None else registry}
    ends = Counter("asyncckpt_saves", "Saves, compactions and uploads that ended", ["path", "what", "outcome"], **into)
    written = Counter("asyncckpt_written_bytes", "Bytes of committed files", ["path"], **into)
    stall = Histogram("asyncckpt_stall_seconds", "Training waited", ["path"], buckets=SECONDS_BUCKETS, **into)
    spans = Histogram("asyncckpt_span_seconds", "Parts of saves", ["path", "name"], buckets=SECONDS_BUCKETS, **into)
    newest = Gauge("asyncckpt_newest_step", "Step that was committed last", ["path"], **into)
    when = Gauge("asyncckpt_newest_time_seconds", "UNIX time of the commit of that step", ["path"], **into)
    opened = Gauge("asyncckpt_opened_time_seconds", "UNIX time when the Saver opened the directory", ["path"], **into)

    def count(event: Event) -> None:
        path, result = str(event.path), event.result
        if event.name == "open":  # From now on all series are there, so that an alert may ask for them.
            opened.labels(path).set(unix_time(event.begun))
            newest.labels(path).set(-1 if event.step is None else event.step)
            when.labels(path).set(event.time)
            for what, how in itertools.product(("save", "compaction", "upload"), OUTCOMES):
                ends.labels(path, what, how)
            written.labels(path), stall.labels(path)
            return
        spans.labels(path, event.name).observe(event.seconds)
        if event.thread:
            return
        ends.labels(path, event.name, outcome(event)).inc()
        if result is not None and not result.skipped:
            written.labels(path).inc(result.bytes_written)
            if event.name == "save":
                stall.labels(path).observe(result.stall_seconds)
                newest.labels(path).set(result.step)
                when.labels(path).set(event.time + event.seconds)

    return count


def opentelemetry_events(meters: MeterProvider | None = None, tracers: TracerProvider | None = None) -> EventFunction:
    """Return a function that records metrics, and every save as a span with its parts below it. None: the providers
    that the program has set.
    """
    from opentelemetry import metrics, trace

    meter = metrics.get_meter("asyncckpt", meter_provider=meters)
    tracer = trace.get_tracer("asyncckpt", tracer_provider=tracers)
    ends = meter.create_counter("asyncckpt.saves", description="saves and compactions that have ended")
    written = meter.create_counter("asyncckpt.written", unit="By", description="bytes of committed files")
    stall = meter.create_histogram("asyncckpt.stall", unit="s", description="training waited")
    took = meter.create_histogram("asyncckpt.save.duration", unit="s", description="from the call until it was durable")
    open_parts: dict[tuple[Place, int, int | None], list[Event]] = {}

    def traced(event: Event, parts: Iterable[Event] = ()) -> None:
        facts: Mapping[str, Any] = {"asyncckpt.path": str(event.path), "asyncckpt.rank": event.rank}
        if event.step is not None:
            facts = {**facts, "asyncckpt.step": event.step}
        span = tracer.start_span(f"asyncckpt {event.name}", start_time=round(1e9 * event.time), attributes=facts)
        below = trace.set_span_in_context(span)
        for part in parts:
            begin = round(1e9 * part.time)
            child = tracer.start_span(part.name, below, start_time=begin, attributes={"thread.name": part.thread})
            child.end(begin + round(1e9 * part.seconds))
        if event.error is not None:
            span.set_status(trace.StatusCode.ERROR, str(event.error))
        span.end(round(1e9 * (event.time + event.seconds)))

    def record(event: Event) -> None:
        if event.name == "open":
            return
        save = event.path, event.rank, event.step
        if event.thread and event.name != "retention":
            open_parts.setdefault(save, []).append(event)
            return
        traced(event, open_parts.pop(save, ()) if event.name == "save" else ())
        for oldest in list(open_parts)[:-OPEN_SAVES_MAX]:  # Of a step that became another one among ranks.
            open_parts.pop(oldest, None)
        if event.thread:
            return
        labels = {"path": str(event.path), "what": event.name}
        ends.add(1, {**labels, "outcome": outcome(event)})
        if event.result is not None and not event.result.skipped:
            written.add(event.result.bytes_written, labels)
            if event.name == "save":
                took.record(event.seconds, labels)
                stall.record(event.result.stall_seconds, labels)

    return record
