"""What the format of Chrome's trace events asks of a file; Perfetto and chrome://tracing pass over what breaks it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

NS = 1e-3  # Of a microsecond: times are rounded to it.
PHASES = {"X": {"dur", "args"}, "M": {"args"}, "b": {"id", "args"}, "e": {"id", "args"}}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def faults(trace: Any) -> list[str]:
    """Return what is wrong with a trace."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no traceEvents"]
    found: list[str] = []
    spans: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    opened: dict[tuple[str, str, str], float] = {}
    named: set[tuple[int, int]] = set()
    for number, event in enumerate(trace["traceEvents"]):
        phase = event.get("ph")
        if phase not in PHASES:
            found.append(f"{number}: phase {phase!r}")
            continue
        missing = {"name", "ph", "pid", "tid", "ts", *PHASES[phase]} - event.keys()
        if missing:
            found.append(f"{number}: no {sorted(missing)}")
            continue
        if not isinstance(event["name"], str) or not all(isinstance(event[key], int) for key in ("pid", "tid")):
            found.append(f"{number}: name, pid or tid of a wrong type")
        times = [event["ts"], event.get("dur", 0)]
        if not all(isinstance(time, (int, float)) and time >= 0 for time in times):
            found.append(f"{number}: time {times}")
            continue
        place = event["pid"], event["tid"]
        if phase == "M":
            named.add(place)
        elif phase == "X":
            spans[place].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        else:
            key = event["cat"], event["id"], event["name"]
            if phase == "b":
                opened[key] = event["ts"]
            elif key not in opened or opened.pop(key) > event["ts"]:
                found.append(f"{number}: {key} ends before it begins")
    found += [f"{key} has no end" for key in opened]
    found += [f"track {place} has no name" for place in spans if place not in named]
    for place, own in spans.items():
        found += _not_nested(place, own)
    return found


def _not_nested(place: tuple[int, int], spans: list[tuple[float, float, str]]) -> list[str]:
    found, open_ends = [], []
    for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= begin + NS:
            open_ends.pop()
        if open_ends and end > open_ends[-1] + NS:
            found.append(f"{name} on {place} ends behind what it is in")
        open_ends.append(end)
    return found
