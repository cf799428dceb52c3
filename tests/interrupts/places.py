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
from functools import partial
from types import CodeType, FrameType
from typing import Any

from tests.shares import share_of

_LOOKS = {code for name, code in dis.opmap.items() if name in ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")}
# These look when they jump.
_LOOP_ENDS = {code for name, code in dis.opmap.items() if name.startswith("POP_JUMP_BACKWARD_IF_")}
# RESUME: at the beginning of a function, and behind a yield; behind these it does not look.
_BEHIND_AWAIT = 2
_TURNS = 2
_WHOLE_EVERY = 16
# How many places of a call are tried, at most.
SOME = int(os.environ.get("ASYNCCKPT_INTERRUPT_PLACES", "24"))
FEW = min(SOME // 4, 150)  # Of calls around these.
# Here Python itself drops what is raised, or leaves descriptors behind: beginnings of destructors, asyncio.run.
_OF_PYTHON = ("finalize.__call__", "WeakValueDictionary.__init__.<locals>.remove", "Runner._lazy_init", "Runner.close")


Way = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True)
class Place:
    """An instruction, at the end of the calls that lead there, and the number of the time that it is reached so."""

    way: Way
    turn: int

    @property
    def where(self) -> str:
        code, instruction = self.way[-1]
        line = next((line for begin, end, line in code.co_lines() if begin <= instruction < end), None)
        return f"{code.co_filename}:{line} {code.co_qualname}"


def places_of(call: Callable[[], Any]) -> list[Place]:
    """Run the call and return its places, in order."""
    places: list[Place] = []
    turns: Counter[Way] = Counter()

    def come(frame: FrameType) -> None:
        way = _way_to(frame)
        turns[way] += 1
        if turns[way] <= _TURNS and not any(code.co_qualname in _OF_PYTHON for code, _ in way):
            places.append(Place(way, turns[way]))

    _trace(call, lambda frame, event, arg: _follow(frame, come))
    return places


def interrupt(call: Callable[[], Any], place: Place) -> str | None:
    """Run the call, with a SIGINT at this place; return where that was, None if the call did not come there.

    Raises what the call raises, but KeyboardInterrupt.
    """
    left = [(place, lambda: signal.raise_signal(signal.SIGINT))]
    with contextlib.suppress(KeyboardInterrupt):
        act_at(call, left)
    return None if left else place.where


def act_at(call: Callable[[], Any], left: list[tuple[Place, Callable[[], object]]]) -> None:
    """Run the call and, at each of these places, what is to be done there; those where that was done are taken out."""
    turns: Counter[Place] = Counter()

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        if not any(frame.f_code is place.way[-1][0] for place, _ in left):
            return None
        callers = _way_to(frame.f_back)
        wanted = [(place, act) for place, act in left if (*callers, (frame.f_code, place.way[-1][1])) == place.way]
        return _follow(frame, partial(come, wanted)) if wanted else None

    def come(wanted: list[tuple[Place, Callable[[], object]]], frame: FrameType) -> None:
        for place, act in wanted:
            if frame.f_lasti == place.way[-1][1]:
                turns[place] += 1
                if turns[place] == place.turn:
                    left.remove((place, act))
                    sys.settrace(None)
                    act()
                    sys.settrace(begin if left else None)

    _trace(call, begin)


def interrupt_at(
    count: int,
    prepare: Callable[[], Callable[[], Any]],
    check: Callable[[], None],
    check_whole: Callable[[], None] = lambda: None,
) -> None:
    """Interrupt what `prepare` returns at some `count` of its places, at most at all, and check after each.

    check_whole: what takes longer than a call: after every sixteenth place and the last.
    """
    prepare()()
    check()
    places = places_of(prepare())
    check()
    check_whole()
    chosen = share_of(places, prepare.__qualname__, every=len(places) // count)
    assert len(chosen) > 5
    reached, since_whole = 0, list[str]()
    try:
        for number, place in enumerate(chosen, 1):
            call = prepare()
            since_whole.append(f"not reached, time {place.turn}")
            found = interrupt(call, place)
            if found is not None:
                reached += 1
                since_whole[-1] = f"{found}, time {place.turn}"
            check()
            if number % _WHOLE_EVERY == 0 or number == len(chosen):
                check_whole()
                since_whole.clear()
    except BaseException as error:  # What is held now would be in the way of the next ones.
        where = "\n".join(reversed(since_whole))
        raise AssertionError(f"1 of {len(chosen)}: {type(error).__name__}: {error}\n{where}") from error
    assert reached > len(chosen) // 2, f"{reached} of {len(chosen)} reached: the places are those of another run"


def _follow(frame: FrameType, come: Callable[[FrameType], None]) -> Any:
    """Trace a frame, and call `come` where it has just executed an instruction that looks for signals."""
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    code, before = frame.f_code.co_code, frame.f_lasti

    def follow(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal before
        if event == "opcode":
            behind, before = before, frame.f_lasti
            if behind >= 0 and _looks(code, behind, before):
                come(frame)
        elif event == "exception":
            before = -1  # The instruction has raised, which comes before it looks.
        return follow

    return follow


def _looks(code: bytes, at: int, next: int) -> bool:
    """Return whether the instruction looks for signals when this one is the next."""
    name = code[at]
    if name == dis.opmap["RESUME"]:
        return code[at + 1] < _BEHIND_AWAIT
    return name in _LOOKS or (name in _LOOP_ENDS and next < at)


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
