"""Interrupt a call at each place where CPython looks for signals: at the beginning of a function, behind a call, at a
jump backward.

`places_of` runs a call under a tracer and lists its places; `interrupt` runs it again and raises a real SIGINT at one
of them, in whichever Python code that is, this package's or others'. A place is an instruction, the way on which it is
reached (which function has called which, and where), and how often it has been reached so before: the first two times
count, so that waits, whose turns depend on the clock, change no other place.
"""

from __future__ import annotations

import contextlib
import dis
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

_LOOKS = {dis.opmap[name] for name in ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD") if name in dis.opmap}
_CACHE = 0
_TURNS = 2
# How many places of a call are tried, at most.
ALL = 1_000_000
SOME = int(os.environ.get("ASYNCCKPT_INTERRUPT_PLACES", "60"))


Way = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True)
class Place:
    """An instruction, at the end of the calls that lead there, and the number of the time that it is reached so."""

    way: Way
    turn: int


def places_of(call: Callable[[], Any]) -> list[Place]:
    """Run the call and return its places, in order."""
    places: list[Place] = []
    turns: Counter[Way] = Counter()

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return follow

    def follow(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and _is_behind_look(frame):
            way = _way_to(frame)
            turns[way] += 1
            if turns[way] <= _TURNS:
                places.append(Place(way, turns[way]))
        return follow

    _trace(call, begin)
    return places


def interrupt(call: Callable[[], Any], place: Place) -> str | None:
    """Run the call, with a SIGINT at this place; return where that was, None if the call did not come there.

    Raises what the call raises, but KeyboardInterrupt.
    """
    *callers, (code, instruction) = place.way
    turns = 0
    where: str | None = None

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is not code or _way_to(frame.f_back) != tuple(callers):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return follow

    def follow(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal turns, where
        if event == "opcode" and frame.f_lasti == instruction and _is_behind_look(frame):
            turns += 1
            if turns == place.turn:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return follow

    with contextlib.suppress(KeyboardInterrupt):
        _trace(call, begin)
    return where


def _trace(call: Callable[[], Any], begin: Any) -> None:
    sys.settrace(begin)
    try:
        call()
    finally:
        sys.settrace(None)


def _way_to(frame: FrameType | None) -> Way:
    way = []
    while frame is not None and frame.f_code is not _trace.__code__:
        way.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(way))


def _is_behind_look(frame: FrameType) -> bool:
    code, last = frame.f_code.co_code, frame.f_lasti - 2
    while last >= 0 and code[last] == _CACHE:
        last -= 2
    return last >= 0 and code[last] in _LOOKS
