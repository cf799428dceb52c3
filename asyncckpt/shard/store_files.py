"""Read the shard files of a checkpoint in an object store: by ranges, many at once, straight to where they go.

Nothing holds an object open: one that is removed while a load reads is a NotFoundError. All files are looked at before
a byte of data is used: one request for each gives its size and its header.

Reads of one file that lie close together are one request, and one that is long is several, so that all connections have
work. What is read between two wanted ranges is at most GAP_SHARE of them. Small pieces that are read one after the
other are read ahead, each time twice as far: else a checkpoint of 100,000 small tensors would be as many requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np

from asyncckpt.native import U8, CancelledDrain, Progress, Reads, ShortFile, core
from asyncckpt.signals import uninterrupted, wait_in_steps
from asyncckpt.storage.store_folder import StoreFolder

REQUEST_BYTES_MAX = 8 << 20
REQUESTS_AT_ONCE_MIN = 8  # A store answers late, but many at once.
GAP_SHARE = 0.05
PIECE_BYTES_MAX = 256 << 10
AHEAD_BYTES_MIN, AHEAD_BYTES_MAX = 64 << 10, 1 << 20
AHEAD_COUNT_MAX = 8  # Places, as ids and columns of tables have.
READ_S_MAX = 86400.0  # Each request has a deadline of its own.
NOT_OPEN = -1

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class _Request:
    """A range of an object; `parts` go to (target address, offset in the object, bytes)."""

    number: int
    begin: int
    end: int
    parts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, eq=False)
class _Ahead:
    """What a small piece was read with: bytes of an object from `begin` on."""

    number: int
    begin: int
    raw: U8

    def has(self, piece: _Request) -> bool:
        return piece.number == self.number and self.begin <= piece.begin and piece.end <= self.begin + len(self.raw)

    def is_before(self, piece: _Request) -> bool:
        return piece.number == self.number and 0 <= piece.begin - self.begin - len(self.raw) <= PIECE_BYTES_MAX


class StoreReader:
    """Reads objects of a store as the core reads files: each has a number, like a descriptor. Used by one thread."""

    def __init__(self, data: StoreFolder, *, threads: int) -> None:
        self._data = data
        self._threads = max(threads, REQUESTS_AT_ONCE_MIN)
        self._keys: list[str] = []
        self._ahead: deque[_Ahead] = deque(maxlen=AHEAD_COUNT_MAX)
        self._given_up = threading.Event()

    def open(self, path: str) -> int:
        """Return the number of an object, by its path in the checkpoint directory."""
        self._keys.append(path)
        return len(self._keys) - 1

    def begin_of(self, number: int, count: int) -> tuple[bytes, int]:
        """Return the first bytes of an object, and how many it has."""
        raw, size = self._data.store.read(self._keys[number], begin=0, bytes=count, given_up=self._given_up)
        return bytes(raw), size

    def read(self, reads: Reads, *, digests: bool, threads: int, progress: Progress) -> U8 | None:
        """Fill the memory of all reads and return their digests, if asked: see Core.read."""
        requests = list(_requests(reads))
        is_piece = len(requests) == 1 and requests[0].end - requests[0].begin <= PIECE_BYTES_MAX
        for request, _ in self._fetched_ahead(requests) if is_piece else self.at_once(self._fetch, requests):
            progress.advance(sum(bytes for _, _, bytes in request.parts))
            if progress.cancelled:
                raise CancelledDrain("the reads were cancelled")
        if not digests:
            return None
        return core.digest(np.ascontiguousarray(reads.places[:, [0, 2]]), threads=threads)

    def at_once(self, work: Callable[[S], T], items: Sequence[S]) -> Iterator[tuple[S, T]]:
        """Do work for all items, several at once, and give each with its result. What is not begun when one fails, or
        when the caller has enough or is interrupted, is not begun any more, and no answer is waited for."""
        ended: SimpleQueue[Future[T]] = SimpleQueue()

        def next_ended(seconds: float) -> Future[T] | None:
            with suppress(Empty):
                return ended.get(timeout=seconds)
            return None

        self._given_up = threading.Event()
        with ThreadPoolExecutor(min(self._threads, max(1, len(items))), "asyncckpt-fetch") as threads:
            try:
                try:
                    begun = {threads.submit(work, item): item for item in items}
                except RuntimeError:  # The interpreter ends, and no thread can be started.
                    yield from ((item, work(item)) for item in items)
                    return
                for future in begun:
                    future.add_done_callback(ended.put)
                for _ in begun:
                    uninterrupted.look()
                    done = wait_in_steps(next_ended, READ_S_MAX)
                    assert done is not None
                    yield begun[done], done.result(0)
            finally:  # Also where a handler raises while they are submitted.
                self._given_up.set()
                threads.shutdown(wait=False, cancel_futures=True)

    def _fetched_ahead(self, pieces: Sequence[_Request]) -> Iterator[tuple[_Request, None]]:
        for piece in pieces:
            held = next((one for one in self._ahead if one.has(piece)), None) or self._read_ahead(piece)
            self._put(piece, held.raw, begin=held.begin)
            yield piece, None

    def _read_ahead(self, piece: _Request) -> _Ahead:
        """Read a piece, and more if it comes after another one."""
        before = next((one for one in self._ahead if one.is_before(piece)), None)
        end = piece.end
        if before is not None:
            self._ahead.remove(before)
            ahead = min(max(AHEAD_BYTES_MIN, 2 * len(before.raw)), AHEAD_BYTES_MAX)
            end = max(end, piece.begin + ahead)
        ((_, found),) = self.at_once(self._read, [_Request(piece.number, piece.begin, end, ())])
        self._ahead.append(_Ahead(piece.number, piece.begin, found))
        return self._ahead[-1]

    def _fetch(self, request: _Request) -> None:
        self._put(request, self._read(request), begin=request.begin)

    def _read(self, request: _Request) -> U8:
        """Return the bytes of a range, as many as there are."""
        key, size = self._keys[request.number], request.end - request.begin
        raw, _ = self._data.store.read(key, begin=request.begin, bytes=size, given_up=self._given_up)
        return np.frombuffer(raw, dtype=np.uint8)

    def _put(self, request: _Request, found: U8, *, begin: int) -> None:
        """Put bytes of an object, which begin there, where they are wanted."""
        if begin + len(found) < request.end:
            what, size = f"object {self._keys[request.number]!r} gave", request.end - request.begin
            raise ShortFile(f"{what} {max(0, begin + len(found) - request.begin)} of {size} bytes", request.number)
        base = found.ctypes.data - begin
        segments = [(base + offset, target, bytes) for target, offset, bytes in request.parts]
        core.copy(np.array(segments, dtype=np.uint64), threads=1)


def _requests(reads: Reads) -> Iterator[_Request]:
    """Put reads together that lie close to each other, and take those apart that are long."""
    order = np.lexsort((reads.places[:, 1], reads.fds))
    numbers = reads.fds[order].tolist()
    number, begin, end, wanted = NOT_OPEN, 0, 0, 0
    parts: list[tuple[int, int, int]] = []
    for own, (target, offset, bytes) in zip(numbers, reads.places[order].tolist(), strict=True):
        while bytes:
            count = min(bytes, REQUEST_BYTES_MAX)
            span = offset + count - begin
            is_near = own == number and offset >= end and span <= (1 + GAP_SHARE) * (wanted + count)
            if not (parts and is_near and span <= REQUEST_BYTES_MAX):
                if parts:
                    yield _Request(number, begin, end, tuple(parts))
                number, begin, wanted, parts = own, offset, 0, []
            parts.append((target, offset, count))
            end, wanted = offset + count, wanted + count
            target, offset, bytes = target + count, offset + count, bytes - count
    if parts:
        yield _Request(number, begin, end, tuple(parts))
