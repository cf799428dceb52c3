"""Files of an attempt that go to an object store: parts of memory on their way, without a copy where it stays as it is.

An object becomes visible as a whole when all of it has come, or not at all: an upload that fails is aborted. The store
client reads memory on threads of its own, also for moments after an error, and lets go of it then: nobody may use that
memory before.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait

import numpy as np

from asyncckpt.errors import DeadlineError, IOFailedError, SaveCancelledError
from asyncckpt.native import U8, memory_at
from asyncckpt.storage.object_store import part_bytes_of
from asyncckpt.storage.store_answers import is_timeout
from asyncckpt.storage.store_folder import StoreFolder

_log = logging.getLogger("asyncckpt")
PARTS_AT_ONCE = 4  # Of one file.
TRY_S_MAX = 600.0
FIRST_PAUSE_S = 0.2
PAUSE_S_MAX = 30.0
LOOK_S = 0.1
LET_GO_S_MAX = 3600.0
LET_GO_LOOK_S = 0.01


def send_file(
    folder: StoreFolder,
    name: str,
    pieces: Sequence[tuple[int, int]],
    *,
    sent: Callable[[int], None],
    check: Callable[[], None],
) -> None:
    """Upload pieces of memory (address, bytes), one after the other, as one object. Returns when nobody reads them.

    Tries again for TRY_S_MAX where that may help, with half as many parts at once: on a slow line many take longer than
    a request may.
    sent: is told how many bytes have been taken for the first time. check: raises when the upload is to end.
    """
    until, pause_s, told, parallel = time.monotonic() + TRY_S_MAX, FIRST_PAUSE_S, [0], PARTS_AT_ONCE

    def take(end: int) -> None:
        check()
        sent(max(0, end - told[0]))
        told[0] = max(end, told[0])

    while True:
        try:
            return _put(folder, name, pieces, take, parallel=parallel)
        except IOFailedError as error:
            left_s = until - time.monotonic()
            if not is_timeout(error) or pause_s > left_s:
                raise
            with contextlib.suppress(Exception):
                _log.warning("%s: it is tried again for %.0f s", error.what, left_s)
        time.sleep(pause_s)
        pause_s, parallel = min(2 * pause_s, PAUSE_S_MAX), max(1, parallel // 2)


def _put(
    folder: StoreFolder, name: str, pieces: Sequence[tuple[int, int]], take: Callable[[int], None], *, parallel: int
) -> None:
    total = sum(size for _, size in pieces)
    part_bytes = part_bytes_of(total)
    small = total <= part_bytes and len(pieces) != 1  # One request instead of three.
    views: list[memoryview] = []

    def parts() -> Iterator[memoryview]:
        offset = 0
        for address, size in pieces:
            for begin in range(0, size, part_bytes):
                end = min(begin + part_bytes, size)
                take(offset + end)
                views.append(memory_at(address + begin, end - begin))
                yield views[-1]
            offset += size

    try:
        taken: Iterable[memoryview | bytes] = [b"".join(parts())] if small else parts()
        folder.store.put(folder.key(name), taken, part_bytes=part_bytes, parallel=parallel)
    finally:
        _let_go(views, f"the upload of {name!r}")


def _let_go(views: list[memoryview], what: str) -> None:
    """Return when nobody reads these views, and nobody can: frames of an error still hold them, but released."""
    until = time.monotonic() + LET_GO_S_MAX
    while views:
        try:
            views[-1].release()
            views.pop()
        except BufferError:  # A thread of the store client has it.
            if time.monotonic() > until:
                raise DeadlineError(f"{what} has not let go of its memory within {LET_GO_S_MAX} s") from None
            time.sleep(LET_GO_LOOK_S)


class SentShard:
    """A shard file that is uploaded while it is written, from start to end; what is written is copied.

    The upload runs on a thread of `sender` from the first write on. Where it is run in place, as when the interpreter
    ends and no thread can be started any more, what is written is kept, and uploaded by `end`.
    """

    def __init__(self, folder: StoreFolder, name: str, *, bytes: int, sender: Executor) -> None:
        self.name = name
        self._folder = folder
        self._part_bytes = part_bytes_of(bytes)
        self._sender = sender
        self._parts: queue.Queue[U8 | None] = queue.Queue(maxsize=1)
        self._offset = 0
        self._is_given_up = False
        self._sending: Future[None] | None = None
        self._writer = 0  # The thread that has submitted it.
        self._is_kept = False

    def write(self, address: int, size: int, *, offset: int) -> None:
        """Hand bytes over. Raises what the upload has failed with."""
        assert offset == self._offset, "objects are written from begin to end"
        for begin in range(0, size, self._part_bytes):
            bytes = min(self._part_bytes, size - begin)
            self._put(np.frombuffer(memory_at(address + begin, bytes), dtype=np.uint8).copy())
        self._offset += size

    def end(self, *, bytes: int) -> None:
        """Wait until the object is there."""
        assert bytes == self._offset
        self._put(None)
        assert self._sending is not None
        self._sending.result()
        if self._is_kept:
            self._upload()

    def close(self) -> None:
        """End an upload that has not finished. Never raises."""
        if self._sending is None or self._sending.done():
            return
        self._is_given_up = True
        while not self._sending.done():
            try:
                self._parts.put(None, timeout=LOOK_S)
                break
            except queue.Full:
                continue
        wait([self._sending], LET_GO_S_MAX)

    def _put(self, part: U8 | None) -> None:
        if self._sending is None:
            self._writer = threading.get_ident()
            self._sending = self._sender.submit(self._send)
        while True:
            if self._sending.done():
                self._sending.result()
            try:
                return self._parts.put(part, timeout=LOOK_S)
            except queue.Full:
                continue

    def _send(self) -> None:
        if threading.get_ident() == self._writer:
            self._parts, self._is_kept = queue.Queue(), True
        else:
            self._upload()

    def _upload(self) -> None:
        key = self._folder.key(self.name)
        self._folder.store.put(key, self._taken(), part_bytes=self._part_bytes, parallel=PARTS_AT_ONCE)

    def _taken(self) -> Iterator[U8]:
        while (part := self._parts.get()) is not None:
            yield part
        if self._is_given_up:
            raise SaveCancelledError("the upload was given up")
