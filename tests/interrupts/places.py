"""Interrupt a call at each place where CPython looks for signals: at the beginning of a function, behind a call, at a
jump backward.

`places_of` runs a call under a tracer and lists its places; `interrupt` runs it again and raises a real SIGINT at one
of them, in whichever Python code that is, this package's or others'. Places count by frame, so that a second run need
trace only one frame instruction by instruction.
"""

from __future__ import annotations

import contextlib
import dis
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

_LOOKS = {dis.opmap[name] for name in ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD") if name in dis.opmap}
_CACHE = 0
# How many places of a call are tried, at most.
ALL = 1_000_000
SOME = int(os.environ.get("ASYNCCKPT_INTERRUPT_PLACES", "60"))


@dataclass(frozen=True)
class Place:
    """The `number`-th place in the `frame`-th frame of a call; a generator has a frame each time that it goes on."""

    frame: int
    number: int


def places_of(call: Callable[[], Any]) -> list[Place]:
    """Run the call and return its places, in order."""
    places: list[Place] = []
    frames = 0

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal frames
        frames += 1
        own, seen = frames, 0
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def follow(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal seen
            if event == "opcode" and _is_behind_look(frame):
                seen += 1
                places.append(Place(own, seen))
            return follow

        return follow

    _trace(call, begin)
    return places


def interrupt(call: Callable[[], Any], place: Place) -> str | None:
    """Run the call, with a SIGINT at this place; return where that was, None if the call did not come there.

    Raises what the call raises, but KeyboardInterrupt.
    """
    frames = 0
    where: str | None = None

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal frames
        frames += 1
        if frames != place.frame:
            return None
        seen = 0
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def follow(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal seen, where
            if event == "opcode" and _is_behind_look(frame):
                seen += 1
                if seen == place.number:
                    where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGINT)
            return follow

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


def _is_behind_look(frame: FrameType) -> bool:
    code, last = frame.f_code.co_code, frame.f_lasti - 2
    while last >= 0 and code[last] == _CACHE:
        last -= 2
    return last >= 0 and code[last] in _LOOKS
