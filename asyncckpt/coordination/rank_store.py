"""The store of torch.distributed that carries a channel: a line to it, and the keys and values in it.

The calls of a TCPStore have no deadline of their own: while the process that serves it is stopped, or its host is cut
off, they stay inside the kernel's receive for as long as the connection lives. So every call is made by one thread of
the line, in the order in which they were asked for, and the caller waits for the answer, or stops waiting, outside.
The thread is a daemon, unlike all others of this library: stuck in such a call it must not keep the interpreter from
ending. Nothing is lost by that, for what it does is only talk.

All keys are below the number of a call:

    log/<rank>, log/all               an entry for every message, in the order of arrival: its sender, its number among
                                      all that he sent in the call, and of how many further pieces it is
    message/<rank>|all/<from>/<n>     a message; it is there before the log names it
    put/<name>                        what was put

A store takes only a few MiB at once, so values are cut into pieces: the further ones are under piece/<i>/<key>, and are
there before the first one, which holds their number.
"""

from __future__ import annotations

import struct
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

PIECE_BYTES = 4 << 20  # The server takes at most 8 MiB.
VALUES_AT_ONCE = 512
_PIECES = struct.Struct(">I")
_ENTRY = struct.Struct(">III")

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


def log_key(call: int, to: int | None) -> str:
    return f"{call}/log/{'all' if to is None else to}"


def put_key(call: int, name: str) -> str:
    return f"{call}/put/{name}"


def message_key(call: int, to: int | None, *, sender: int, number: int) -> str:
    return f"{call}/message/{'all' if to is None else to}/{sender}/{number}"


def _piece_key(key: str, index: int) -> str:
    return f"piece/{index}/{key}"


def pieces_count(data: bytes) -> int:
    """Return how many pieces follow the first one."""
    return max(0, len(data) - 1) // PIECE_BYTES


def write_value(store: Any, key: str, data: bytes) -> None:
    count = pieces_count(data)
    for index in range(1, count + 1):
        store.set(_piece_key(key, index), data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
    store.set(key, _PIECES.pack(count) + data[:PIECE_BYTES])


def find_value(store: Any, key: str) -> bytes | None:
    """Return the data under a key; None when it is not there."""
    store.append(key, b"")  # To ask for a key that is not there would wait for it; nothing is a value of no length.
    first = bytes(store.get(key))
    return _whole(store, key, first) if first else None


def read_values(store: Any, keys: list[str]) -> list[bytes]:
    """Return the data under keys that are there."""
    found: list[bytes] = []
    for begin in range(0, len(keys), VALUES_AT_ONCE):
        some = keys[begin : begin + VALUES_AT_ONCE]
        found += [_whole(store, key, bytes(first)) for key, first in zip(some, store.multi_get(some), strict=True)]
    return found


def _whole(store: Any, key: str, first: bytes) -> bytes:
    (count,) = _PIECES.unpack_from(first)
    further = [bytes(store.get(_piece_key(key, index))) for index in range(1, count + 1)]
    return b"".join([first[_PIECES.size :], *further])


def delete_value(store: Any, key: str, *, pieces: int) -> None:
    """Delete a value that has as many further pieces. Nothing is there to be deleted twice."""
    for name in (key, *(_piece_key(key, index) for index in range(1, pieces + 1))):
        store.delete_key(name)


def log_entry(*, sender: int, number: int, pieces: int) -> bytes:
    return _ENTRY.pack(sender, number, pieces)


class Inbox:
    """What has come for this rank in one call. Only the line's thread uses it."""

    def __init__(self, call: int, rank: int) -> None:
        self._call, self._rank = call, rank
        self._readers: list[int | None] = [rank] if rank == 0 else [rank, None]  # None: what is for all.
        self._taken_bytes = [0] * len(self._readers)

    def look(self, store: Any) -> list[tuple[int, bytes]]:
        """Return messages that came since the last look, as (sender, message); each sender's in their order."""
        keys = [log_key(self._call, to) for to in self._readers]
        for key in keys:
            store.append(key, b"")  # To ask for a key that is not there would wait for it.
        logs = [bytes(log) for log in store.multi_get(keys)]
        new = [
            (number, sender, to, pieces)
            for to, taken_bytes, log in zip(self._readers, self._taken_bytes, logs, strict=True)
            for sender, number, pieces in _ENTRY.iter_unpack(log[taken_bytes:])
        ]
        if not new:
            return []
        self._taken_bytes = [len(log) for log in logs]
        new.sort(key=lambda entry: entry[0])  # Rank 0 speaks to one and to all, and counts both in one.
        found = [message_key(self._call, to, sender=sender, number=number) for number, sender, to, _ in new]
        messages = read_values(store, found)
        for key, (_, _, to, pieces) in zip(found, new, strict=True):
            if to is not None:
                delete_value(store, key, pieces=pieces)
        # The own log is emptied, unless more has come meanwhile; in a long call it would become large.
        if store.compare_set(keys[0], logs[0], b"") == b"":
            self._taken_bytes[0] = 0
        return [(sender, message) for (_, sender, _, _), message in zip(new, messages, strict=True)]

    def drop(self, store: Any) -> None:
        """Delete the log of this rank, and the messages in it that were not read."""
        drop_log(store, self._call, self._rank, taken_bytes=self._taken_bytes[0])


def drop_log(store: Any, call: int, rank: int, *, taken_bytes: int = 0) -> None:
    """Delete the log of a rank, and the messages in it from some byte on."""
    key = log_key(call, rank)
    store.append(key, b"")
    for sender, number, pieces in _ENTRY.iter_unpack(bytes(store.get(key))[taken_bytes:]):
        delete_value(store, message_key(call, rank, sender=sender, number=number), pieces=pieces)
    store.delete_key(key)
