"""What only a step of an optimizer changes: copied after the call, and watched until the step.

    training     call | forward, backward       | step: copy the rest, wait, compare, then write
    background        | chunk, chunk, chunk ... |

1. The call lists the memory of each optimizer as one part, and that of each of its tables as another: what the host has
   to copy, in chunks, and how often it was written, also of tensors that devices copy.
2. One thread of the background copies chunks, part by part, in the order in which the optimizers have stepped last.
3. A step copies what is left of the parts that it is about to write, on all cores, waits for the chunk that is being
   copied, compares the counts, and closes these parts: from here on their memory may change. A table does the same
   before it writes or moves rows of its part for anybody else.
4. Any other wait for the copies, at the latest the commit's, closes all that is open in the same way.
5. A count that has moved says that something else than a step has written: the save is refused, and names the tensor.

torch counts a write when it has ended. So step 3, on the thread that writes, sees all of them; step 4 sees all but
those that have begun before the copy and not ended when the files are on disk. Memory is held by its storage, so that a
tensor may be dropped, or get other memory by `.data`. A storage that was freed, or has moved, is found before each
chunk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from asyncckpt.devices.stepped_memory import SteppedMemory
from asyncckpt.devices.watches import TableWatch, Watch
from asyncckpt.errors import DeadlineError
from asyncckpt.model.table import WatchedCut
from asyncckpt.native import I64, U64, core
from asyncckpt.options import DEVICE_DEADLINE_S
from asyncckpt.signals import STEP_S, Guard, uninterrupted

CHUNK_BYTES = 16 << 20
PATIENCE_S = 20.0
"""How long `settle` leaves all to the thread of `run`, which may starve beside a trainer that never steps again."""


@dataclass(frozen=True)
class Chunk:
    """A copy of memory of tensors, by their numbers in a Watch. run: takes how many threads may copy."""

    run: Callable[[int], None]
    watch: Watch
    numbers: Sequence[int]

    def copy(self, *, threads: int) -> None:
        self.watch.check_in_place(self.numbers)
        self.run(threads)


def chunks_of(segments: U64, of: I64, watch: Watch) -> list[Chunk]:
    """Return chunks of at most CHUNK_BYTES, in order; segment i is of tensor of[i] of the watch."""
    bytes = segments[:, 2].astype(np.int64)
    counts = -(-bytes // CHUNK_BYTES)
    begins = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK_BYTES
    pieces, numbers = np.repeat(segments, counts, axis=0), np.repeat(of, counts)
    pieces[:, :2] += begins.astype(np.uint64)[:, None]
    pieces[:, 2] = np.minimum(np.repeat(bytes, counts) - begins, CHUNK_BYTES)
    last = np.cumsum(pieces[:, 2].astype(np.int64)) - 1
    ends = np.flatnonzero(np.diff(last // CHUNK_BYTES)) + 1
    return [
        Chunk(partial(_copy_segments, np.ascontiguousarray(own)), watch, sorted(set(of_own.tolist())))
        for own, of_own in zip(np.split(pieces, ends), np.split(numbers, ends), strict=True)
        if len(own)
    ]


def row_chunks(columns: U64, rows: I64, places: I64 | None, watch: Watch, numbers: Sequence[int]) -> list[Chunk]:
    """Return chunks of at most CHUNK_BYTES that copy rows of columns (source, target, row bytes) to their places.

    places: None: one after the other.
    """
    count = max(1, CHUNK_BYTES // int(columns[:, 2].sum()))
    if places is None:
        places = np.arange(len(rows), dtype=np.int64)
    return [
        Chunk(partial(_copy_rows, columns, rows[begin : begin + count], places[begin : begin + count]), watch, numbers)
        for begin in range(0, len(rows), count)
    ]


def _copy_segments(segments: U64, threads: int) -> None:
    core.copy(segments, threads=threads)


def _copy_rows(columns: U64, rows: I64, places: I64, threads: int) -> None:
    core.copy_rows(columns, rows, places, threads=threads)


@dataclass(eq=False)
class Part:
    """What the steps of one optimizer change. make: makes the chunks, when one is asked for. copying_count: chunks that
    are being copied now.
    """

    owner: int
    watched: list[Watch] = field(default_factory=list)
    make: Callable[[], Sequence[Chunk]] | None = None
    chunks: deque[Chunk] = field(default_factory=deque)
    copying_count: int = 0
    is_closed: bool = False

    @property
    def is_copied(self) -> bool:
        return self.make is None and not self.chunks and not self.copying_count

    def next_chunk(self) -> Chunk | None:
        """Take the next chunk, to be copied by the caller; None: there is none left."""
        if self.make is not None:
            self.chunks += self.make()
            self.make = None
        if not self.chunks:
            return None
        self.copying_count += 1
        return self.chunks.popleft()

    def leave(self) -> None:
        """Leave what nobody has begun."""
        self.make = None
        self.chunks.clear()


class StepCopies:
    """The copies of one save, see the module. Used by any thread.

    waited_seconds: how long steps have waited for them, or copied themselves.
    """

    def __init__(self, memory: SteppedMemory) -> None:
        self.memory = memory
        self.waited_seconds = 0.0
        guard = Guard()
        self._changed = threading.Condition(guard)
        self._parts: list[Part] = []
        self._refused: Exception | None = None
        self._is_dropped = False

    # -- before anything else is called --------------------------------------------------------------------------------

    def add(self, owner: int, watch: Watch, segments: U64, of: I64) -> None:
        """Add memory of an optimizer, by its number; the host has to copy segments, of tensors of[i] of the watch."""
        part = Part(owner, [watch])
        if len(segments):
            part.make = partial(chunks_of, segments, of, watch)
        self._parts.append(part)

    def add_table(
        self,
        owner: int,
        table: str,
        cut: WatchedCut,
        columns: Mapping[str, torch.Tensor],
        chunks: Callable[[Watch], Sequence[Chunk]],
    ) -> None:
        """Add columns of a table of an optimizer, which the table itself asks for, too. chunks: makes the copies."""
        part = Part(owner)
        watch = TableWatch(table, cut, columns, partial(self._let_write, part))
        part.watched.append(watch)
        part.chunks += chunks(watch)
        self._parts.append(part)

    def begin(self) -> None:
        """Begin to watch, before the call returns."""
        for part in self._parts:
            for watch in part.watched:
                watch.begin()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a step has to ask before it writes."""
        return any(not part.is_closed for part in self._parts)

    @property
    def is_copied(self) -> bool:
        """Whether the host has nothing left to copy."""
        return all(part.is_copied for part in self._parts)

    @property
    def is_whole(self) -> bool:
        """Whether what was copied is the state at the call, as far as is known by now."""
        return self._refused is None and not self._is_dropped

    def run(self, order: Sequence[int], *, threads: int) -> None:
        """Copy all on this thread, parts in this order."""
        self._copy([part for owner in order for part in self._parts if part.owner == owner], threads=threads)

    def wait(self, owners: Collection[int]) -> None:
        """Copy what is left of the parts that a step is about to write, wait for the rest, and let it write.

        Raises what signal handlers raise: then the step does not begin, and the background copies what is left.
        """
        self._wait([part for part in self._parts if part.owner in owners and not part.is_closed])

    def close(self) -> None:
        """Let anything write, when all is copied; refuse the save if something has written already."""
        if self.is_copied:
            self._close(self._parts)

    def check(self) -> None:
        """Raise that for which the save was refused."""
        if self._refused is not None:
            raise self._refused

    def settle(self) -> None:
        """Wait until the host has copied all, in the background. Raises as `check`, and DeadlineError."""
        if not self._wait_copied(self._parts, seconds=PATIENCE_S):
            self._copy(self._parts, threads=1)
            self._wait_copied(self._parts)
        self.check()

    def drop(self) -> None:
        """Copy no more, and wait for what is being copied: the memory that it goes to has another use then."""
        with self._changed:
            for part in self._parts:
                self._is_dropped |= not part.is_copied
                part.leave()
                _end(part)
        self._wait_copied(self._parts)

    def _let_write(self, part: Part) -> None:
        """Let a table write, which is in the middle of something: handlers of signals run after that."""
        if not part.is_closed:
            self._wait([part], looks=False)

    def _wait(self, parts: Sequence[Part], *, looks: bool = True) -> None:
        begun = time.perf_counter()
        try:
            self._copy(parts, threads=0, looks=looks)
            self._wait_copied(parts, looks=looks)
        finally:
            self.waited_seconds += time.perf_counter() - begun
        self._close(parts)

    def _copy(self, parts: Sequence[Part], *, threads: int, looks: bool = True) -> None:
        """Copy what no other thread has begun. looks: between two chunks, handlers of signals run."""
        for part in parts:
            while (chunk := self._take(part)) is not None:
                try:
                    chunk.copy(threads=threads)
                except Exception as error:
                    self._refuse(error)
                finally:
                    with self._changed:
                        part.copying_count -= 1
                        self._changed.notify_all()
                if looks:
                    uninterrupted.look()

    def _take(self, part: Part) -> Chunk | None:
        try:
            with self._changed:
                return part.next_chunk()
        except Exception as error:  # Not the step's.
            self._refuse(error)
            return None

    def _wait_copied(self, parts: Sequence[Part], *, seconds: float | None = None, looks: bool = True) -> bool:
        """Wait until parts are copied; return whether they are after `seconds`. None: DeadlineError, but late."""
        until = time.monotonic() + (DEVICE_DEADLINE_S if seconds is None else seconds)
        with self._changed:
            while not all(part.is_copied for part in parts):
                left_s = until - time.monotonic()
                if left_s <= 0 and seconds is None:
                    raise DeadlineError(f"copies of the host did not end within {DEVICE_DEADLINE_S} s")
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, STEP_S))
                if looks:
                    uninterrupted.look(self._changed)
        return True

    def _close(self, parts: Sequence[Part]) -> None:
        for part in parts:
            for watch in tuple(part.watched):
                watch.await_counts()
            with self._changed:  # Of two threads only one compares: the other may write behind it.
                if part.is_closed:
                    continue
                try:
                    for watch in part.watched:
                        watch.check_unchanged()
                except Exception as error:  # Also what a tensor raises that has become another one; not the step's.
                    self._refused = self._refused or error
                _end(part)

    def _refuse(self, error: Exception) -> None:
        """Let the save fail, and copy nothing more for it."""
        with self._changed:
            self._refused = self._refused or error
            for part in self._parts:
                part.leave()


def _end(part: Part) -> None:
    part.is_closed = True
    for watch in part.watched:
        watch.end()
    part.watched.clear()  # Of what is being copied the chunk holds the memory.
