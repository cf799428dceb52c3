"""A line to a store of torch.distributed on which no caller waits longer than it wants to.

The calls of a TCPStore have no deadline of their own: while the process that serves it is stopped, or its host is cut
off, they stay inside the kernel's receive for as long as the connection lives. So every call is made by one thread of
the line, in the order in which they were asked for, and the caller waits for the answer, or stops waiting, outside.

The thread is a daemon, unlike all others of this library: stuck in such a call it must not keep the interpreter from
ending. Nothing is lost by that, for what it does is only talk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from asyncckpt.errors import CheckpointError, IOFailedError, UsageError
from asyncckpt.signals import wait_until_done
from asyncckpt.system import register_at_fork

T = TypeVar("T")

_of_parent: Any = None  # The default store that a forked child has from its parent.


class LineBroken(Exception):
    """The store cannot be reached (any more), or the line was hung up; the text says why."""


def default_store() -> Any:
    """Return the store of the default group. UsageError in a child that was forked from a rank: it has the connection
    of its parent, and each could take an answer that is for the other."""
    dist: Any = torch.distributed
    store = dist.distributed_c10d._get_default_store()
    if store is _of_parent:
        raise UsageError(
            "this process was forked from a rank of torch.distributed, and cannot talk to the others",
            hint="RankOptions(alone=True) is for what this process saves by itself; or start it by spawn",
        )
    return store


def _note_store_of_parent() -> None:
    global _of_parent
    dist: Any = torch.distributed
    if dist.is_available() and dist.is_initialized():
        _of_parent = dist.distributed_c10d._get_default_store()


register_at_fork(after_in_child=_note_store_of_parent)


class Answer(Future[T]):
    """What a call on a line gives, or raises, once it is there."""

    def wait(self, timeout_s: float) -> bool:
        """Return whether the answer has come within `timeout_s` seconds."""
        return wait_until_done(self, max(0.0, timeout_s))


class StoreLine:
    """Calls on the store that `connect` returns; `connect` is the first of them.

    A call that raises anything but a CheckpointError breaks the line: nobody knows what a store answers after that.
    Calls may be asked for from any thread.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._work = _Work(connect)
        thread = threading.Thread(target=self._work, name="asyncckpt-store-line", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise IOFailedError(f"thread {thread.name!r} cannot be started: {error}", hint="see ulimit -u") from error

    def ask(self, call: Callable[[Any], T]) -> Answer[T]:
        """Have `call(store)` made; LineBroken when the line is known to be broken."""
        self._work.check()
        answer: Answer[T] = Answer()
        self._work.asked.put((call, answer))
        return answer

    def hang_up(self) -> None:
        """Let the thread end, and the connection with it, when all that was asked for is done. Waits for nothing."""
        self._work.asked.put(None)

    def __del__(self) -> None:
        self.hang_up()


class _Work:
    """What the thread does. It does not hold the line, so a line that is dropped ends its thread."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.asked: SimpleQueue[tuple[Callable[[Any], Any], Answer[Any]] | None] = SimpleQueue()
        self._connect = connect
        self._broken: tuple[str, Exception | None] | None = None  # Why it is; set once, by the thread.

    def check(self) -> None:
        """Raise LineBroken, a new one each time, when the line is broken."""
        if self._broken is not None:
            text, cause = self._broken
            raise LineBroken(text) from cause

    def __call__(self) -> None:
        store = None
        try:
            store = self._connect()
        except Exception as error:
            self._break(error)
        while (asked := self.asked.get()) is not None:
            self._answer(store, *asked)
        self._broken = self._broken or ("it was closed", None)
        while not self.asked.empty():
            if (left := self.asked.get()) is not None:
                self._answer(store, *left)

    def _answer(self, store: Any, call: Callable[[Any], Any], answer: Answer[Any]) -> None:
        try:
            self.check()
            answer.set_result(call(store))
        except (CheckpointError, LineBroken) as error:
            answer.set_exception(error)
        except Exception as error:
            self._break(error)
            self._answer(store, call, answer)

    def _break(self, error: Exception) -> None:
        # torch puts the C++ stack below the first line.
        text = (str(error).splitlines() or [""])[0]
        self._broken = self._broken or (text or type(error).__name__, error)
