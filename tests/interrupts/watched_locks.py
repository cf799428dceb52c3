"""Locks of the library that do something at every place where they are taken, and say who would wait for himself.

`install` before the library is imported; locks that others make stay what they are.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2] / "asyncckpt") + os.sep
_Lock: Any = threading.Lock
_RLock: Any = threading.RLock

# Begins the place of a thread that is about to say that it has begun; whoever has started it waits for that.
NEW = "new "

Place = tuple[str, int]
# Called with the place at which a lock has just been taken.
taken: list[Callable[[Place], None]] = []
deadlocks: list[str] = []


class WaitsForItself(BaseException):
    """A thread asks for a lock that it holds, and would wait for ever."""


class WatchedLock:
    """A lock, or a re-entrant one."""

    is_reentrant = False

    def __init__(self) -> None:
        self._real = _Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if self._owner == me:
            if self.is_reentrant:
                self._depth += 1
                return True
            if blocking:
                deadlocks.append(f"{place()} waits for a lock that its thread holds")
                raise WaitsForItself(deadlocks[-1])
            return False
        if not self._real.acquire(blocking, timeout):
            return False
        self._owner, self._depth = me, 1
        for call in taken:
            call(place())
        return True

    def release(self) -> None:
        if self.is_reentrant and self._owner != threading.get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._real.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return bool(self._real.locked())

    def _at_fork_reinit(self) -> None:
        self._real = _Lock()
        self._owner, self._depth = None, 0


class WatchedRLock(WatchedLock):
    is_reentrant = True

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def _release_save(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        self._real.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        self._real.acquire()
        self._owner, self._depth = threading.get_ident(), depth


def place() -> Place:
    """Where in the library the current thread is: the innermost line not in signals.py; or the new thread's name."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.endswith("signals.py"):
            return name.removeprefix(PACKAGE), frame.f_lineno
        if frame.f_code.co_name == "_bootstrap_inner":
            return NEW + frame.f_locals["self"].name, 0
        frame = frame.f_back
    return "", 0


def made_by_library() -> bool:
    """Whether a file of the library makes a lock now, or a Condition or an Event with one."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def install() -> None:
    assert "asyncckpt" not in sys.modules
    module: Any = threading
    module.Lock = lambda: WatchedLock() if made_by_library() else _Lock()
    module.RLock = lambda: WatchedRLock() if made_by_library() else _RLock()
