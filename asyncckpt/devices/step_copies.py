"""What only a step of an optimizer changes: copied behind the call, and watched until the step.

    training     call | forward, backward       | step: copy the rest, wait, compare, then write
    background        | chunk, chunk, chunk ... |

1. The call lists the memory of each optimizer as one part: what the host has to copy, in chunks, and torch's versions
   of all its tensors, also of those that devices copy.
2. One thread of the background copies chunks, part by part, in the order in which the optimizers have stepped last.
3. A step copies what is left of the parts that it is about to write, on all cores, waits for the chunk that is being
   copied, compares the versions, and closes these parts: from here on their memory may change.
4. Whoever else has waited for the copies closes all that is open in the same way; at the latest the commit.
5. A version that has moved says that something else than a step has written: the save is refused, and names the tensor.

torch counts a write when it has ended. So step 3, on the thread that writes, sees all of them; step 4 sees all but
those that have begun before the copy and not ended when the files are on disk. Memory is held by its storage, so that a
tensor may be dropped, or get other memory by `.data`. A storage that was freed, or has moved, is found before each
chunk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from asyncckpt.devices.stepped_memory import SteppedMemory
from asyncckpt.errors import DeadlineError, UsageError
from asyncckpt.guard import Guard
from asyncckpt.native import I64, U64, core
from asyncckpt.options import DEVICE_DEADLINE_S
from asyncckpt.signals import STEP_S, uninterrupted

CHUNK_BYTES = 16 << 20
PATIENCE_S = 20.0
"""How long `settle` leaves all to the thread of `run`, which may starve beside a trainer that never steps again."""

_HINT = "call wait_staged() before anything but step() changes it, or leave its optimizer out of optimizers="


class Watch:
    """Tensors of a state and, over the same memory, those of an optimizer; their versions and storages at the call.

    RuntimeError for an inference tensor, whose writes torch does not count.
    """

    def __init__(
        self, held: Sequence[torch.Tensor], stepped: Sequence[torch.Tensor], name: Callable[[int], str]
    ) -> None:
        self._tensors = (held, stepped)
        self._name = name
        self._versions = [_versions(tensors) for tensors in self._tensors]
        self._storages = list(map(torch.Tensor.untyped_storage, held))
        self._begins = list(map(torch.UntypedStorage.data_ptr, self._storages))
        self._bytes = list(map(torch.UntypedStorage.nbytes, self._storages))

    def check_unchanged(self) -> None:
        for tensors, before in zip(self._tensors, self._versions, strict=True):
            now = _versions(tensors)
            if now != before:
                number = next(number for number, version in enumerate(now) if version != before[number])
                raise UsageError(
                    f"tensor {self._name(number)!r} was changed behind the call of a save, and before the next step of "
                    "its optimizer",
                    hint=_HINT,
                )

    def check_in_place(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            storage = self._storages[number]
            if storage.data_ptr() != self._begins[number] or storage.nbytes() < self._bytes[number]:
                raise UsageError(
                    f"the memory of tensor {self._name(number)!r} was freed or moved before it was copied", hint=_HINT
                )


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


@dataclass(frozen=True)
class Chunk:
    """Segments (source, target, bytes), uint64 [n, 3], of tensors by their numbers in a Watch."""

    segments: U64
    watch: Watch
    numbers: Sequence[int]

    def copy(self, *, threads: int) -> None:
        self.watch.check_in_place(self.numbers)
        core.copy(self.segments, threads=threads)


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
        Chunk(np.ascontiguousarray(own), watch, sorted(set(of_own.tolist())))
        for own, of_own in zip(np.split(pieces, ends), np.split(numbers, ends), strict=True)
        if len(own)
    ]


@dataclass(eq=False)
class Part:
    """What the step of one optimizer changes. copying_count: chunks that are being copied now."""

    watched: list[Watch] = field(default_factory=list)
    chunks: deque[Chunk] = field(default_factory=deque)
    copying_count: int = 0
    is_closed: bool = False

    @property
    def is_copied(self) -> bool:
        return not self.chunks and not self.copying_count


class StepCopies:
    """The copies of one save, see the module. Used by any thread.

    waited_seconds: how long steps have waited for them, or copied themselves.
    """

    def __init__(self, memory: SteppedMemory) -> None:
        self.memory = memory
        self.waited_seconds = 0.0
        guard = Guard()
        self._changed = threading.Condition(guard)
        self._parts: dict[int, Part] = {}
        self._refused: Exception | None = None

    def add(self, number: int, watch: Watch, segments: U64, of: I64) -> None:
        """Add to a part, before anything else is called; segment i, of the host, is of tensor of[i] of the watch."""
        part = self._parts.setdefault(number, Part())
        part.watched.append(watch)
        part.chunks += chunks_of(segments, of, watch)

    @property
    def is_open(self) -> bool:
        """Whether a step has to ask before it writes."""
        return any(not part.is_closed for part in self._parts.values())

    @property
    def is_copied(self) -> bool:
        """Whether the host has nothing left to copy."""
        return all(part.is_copied for part in self._parts.values())

    def run(self, order: Sequence[int], *, threads: int) -> None:
        """Copy all on this thread, parts in this order."""
        self._copy([self._parts[number] for number in order if number in self._parts], threads=threads)

    def wait(self, numbers: Iterable[int]) -> None:
        """Copy what is left of the parts that a step is about to write, wait for the rest, and let it write.

        Raises what signal handlers raise: then the step does not begin, and the background copies what is left.
        """
        own = (self._parts[number] for number in numbers if number in self._parts)
        parts = [part for part in own if not part.is_closed]
        begun = time.perf_counter()
        try:
            self._copy(parts, threads=0)
            self._wait_copied(parts)
        finally:
            self.waited_seconds += time.perf_counter() - begun
        self._close(parts)

    def close(self) -> None:
        """Let anything write, when all is copied; refuse the save if something has written already."""
        if self.is_copied:
            self._close(list(self._parts.values()))

    def check(self) -> None:
        """Raise that for which the save was refused."""
        if self._refused is not None:
            raise self._refused

    def settle(self) -> None:
        """Wait until the host has copied all, in the background. Raises as `check`, and DeadlineError."""
        parts = list(self._parts.values())
        if not self._wait_copied(parts, seconds=PATIENCE_S):
            self._copy(parts, threads=1)
            self._wait_copied(parts)
        self.check()

    def drop(self) -> None:
        """Copy no more, and wait for what is being copied: the memory that it goes to has another use then."""
        parts = list(self._parts.values())
        with self._changed:
            for part in parts:
                part.chunks.clear()
                _end(part)
        self._wait_copied(parts)

    def _copy(self, parts: Sequence[Part], *, threads: int) -> None:
        """Copy what no other thread has begun; between two chunks, handlers of signals run."""
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
                uninterrupted.look()

    def _take(self, part: Part) -> Chunk | None:
        with self._changed:
            if not part.chunks:
                return None
            part.copying_count += 1
            return part.chunks.popleft()

    def _wait_copied(self, parts: Sequence[Part], *, seconds: float | None = None) -> bool:
        """Wait until parts are copied; return whether they are after so many seconds. None: DeadlineError, but late."""
        until = time.monotonic() + (DEVICE_DEADLINE_S if seconds is None else seconds)
        with self._changed:
            while not all(part.is_copied for part in parts):
                left_s = until - time.monotonic()
                if left_s <= 0 and seconds is None:
                    raise DeadlineError(f"copies of the host did not end within {DEVICE_DEADLINE_S} s")
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, STEP_S))
                uninterrupted.look(self._changed)
        return True

    def _close(self, parts: Sequence[Part]) -> None:
        for part in parts:
            with self._changed:  # Of two threads only one compares: the other may write behind it.
                if part.is_closed:
                    continue
                try:
                    for watch in part.watched:
                        watch.check_unchanged()
                except UsageError as error:
                    self._refused = self._refused or error
                _end(part)

    def _refuse(self, error: Exception) -> None:
        """Let the save fail, and copy nothing more for it."""
        with self._changed:
            self._refused = self._refused or error
            for part in self._parts.values():
                part.chunks.clear()


def _end(part: Part) -> None:
    part.is_closed = True
    part.watched.clear()  # Of what is being copied the chunk holds the memory.
