"""Calls of the library that fail, each in turn, as if there were no memory for them."""

from __future__ import annotations

from collections.abc import Collection
from types import FrameType
from typing import Any

from tests.interrupts.watched_locks import PACKAGE

# What gives things back may not fail: that it is called is what the test shows. Nor what only hands them over.
SPARED = {
    "__init__",
    "__enter__",
    "close",
    "release",
    "settle",
    "_release",
    "__exit__",
    "hang_up",
    "_leave",
    "remove_session",
    "_remove",
    "_end",
    "_handle",
}


class FailsAt:
    """Raises where the library calls a function of its own for the nth time, on this thread."""

    def __init__(self, number: int, spared: Collection[str] = SPARED) -> None:
        self.number = number
        self.spared = spared
        self.count = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in self.spared:
            self.count += 1
            if self.count == self.number:
                raise MemoryError("as if there were no memory for a call")
