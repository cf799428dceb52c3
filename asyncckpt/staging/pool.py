"""The arenas of the process: one for the save in flight, a second one only when saves are queued (double buffering).

A save that does not fit the limit gets no arena (`fits` tells beforehand) and goes the blocking way instead. An arena
that holds a snapshot which a save can bring up to date is handed to that save; others take it only when they have to.

The default limit is a share of what is free (staging/limits.py), so that a save never gets the process killed.

An arena is a region of host memory that holds the image of a checkpoint's shard files.

#   from       to         done by                    the caller promises
#   FREE       FILLING    ArenaPool.acquire          nobody else holds the arena
#   FREE       PREPARING  ArenaPool.take_to_prepare  to touch it for a later save, and to release it
#   PREPARING  FREE       ArenaPool.release          it is touched
#   FILLING    DRAINING   Arena.seal                 every copy is past its fence
#   FILLING    FREE       ArenaPool.release          the save has failed before its fence
#   DRAINING   FREE       ArenaPool.release          nobody reads the image any more

Memory is mapped once and touched once, because the first touch of a page costs ten times as much as a copy into it. It
grows without moving what is touched, and stays with the process between saves and between Savers. What it holds of
tables is remembered in `contents`, whether that snapshot was written or not: it may be brought up to date. A range is
pinned when devices copy to it, and stays so; when it grows, what is new is pinned. Addresses are reserved for that,
because memory that moves has to be pinned again, which takes longer than copying it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from asyncckpt.errors import DeadlineError, DeviceError
from asyncckpt.model.row_places import ArenaContents
from asyncckpt.native import U8, core
from asyncckpt.options import HEADROOM_BYTES_MAX
from asyncckpt.signals import STEP_S, Guard, uninterrupted
from asyncckpt.staging.limits import default_limit_bytes
from asyncckpt.system import register_at_fork

MAPPED_UNIT_BYTES = 2 << 20
RESERVED_FACTOR = 2
PINNED_PIECE_BYTES = 1 << 30
"""Other calls of a device wait while a piece is pinned."""

_fillings = itertools.count(1)
ARENAS_COUNT_MAX = 2


class Pinner(Protocol):
    """Pins host memory, so that devices copy to it by themselves."""

    def register(self, address: int, bytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...


class Writer(Protocol):
    """What writes to an arena by itself. is_lost: it does not end, so the memory must stay as it is."""

    @property
    def is_lost(self) -> bool: ...


class ArenaState(Enum):
    FREE = "free"
    PREPARING = "preparing"
    FILLING = "filling"
    DRAINING = "draining"


class Arena:
    """A mapped region of which the first `touched_bytes` are backed by pages."""

    def __init__(self) -> None:
        self.state = ArenaState.FREE
        self.is_lent = False
        self.contents: ArenaContents | None = None
        self.filled_at = 0
        self.writer: Writer | None = None
        self._memory = core.map_memory(MAPPED_UNIT_BYTES)
        self._pinned = (0, 0)
        self._pieces: list[tuple[int, int]] = []  # (begin, end), which are _pinned together.
        self._pinner: Pinner | None = None
        self.touched_bytes = 0
        self.touches_count = 0

    @property
    def address(self) -> int:
        return self._memory.address

    def view(self) -> U8:
        """Return the whole region as bytes; dead after the next `ensure`."""
        return self._memory.view()

    def ensure(self, bytes: int, *, threads: int = 0) -> None:
        """Grow to `bytes` of touched memory, on `threads` threads (0: all cores); free when it has that much."""
        if bytes <= self.touched_bytes:
            return
        rounded = -(-bytes // MAPPED_UNIT_BYTES) * MAPPED_UNIT_BYTES
        pinned, pinner = self._pinned, self._pinner
        if rounded > self._memory.bytes:
            self.unpin()  # It may move.
            self._resize(rounded, reserve=pinner is not None)
        self._memory.touch(self.touched_bytes, rounded, threads=threads)
        self.touched_bytes = rounded
        self.touches_count += 1
        if pinner is not None and self._pinner is None:
            with contextlib.suppress(DeviceError):  # Whoever needs it pinned will try again, and say so.
                self.pin(*pinned, pinner)

    def _resize(self, bytes: int, *, reserve: bool) -> None:
        if reserve:
            with contextlib.suppress(MemoryError, OSError):  # Where the system counts addresses as memory.
                self._memory.resize(RESERVED_FACTOR * bytes)
                return
        self._memory.resize(bytes)

    @property
    def pinned(self) -> tuple[int, int]:
        """(address, bytes) of what is pinned."""
        begin, end = self._pinned
        return self.address + begin, end - begin

    @property
    def pinned_pieces(self) -> list[tuple[int, int]]:
        """(address, bytes) of what was pinned as a whole; together they are `pinned`."""
        return [(self.address + begin, end - begin) for begin, end in self._pieces]

    def pinned_bytes_with(self, begin: int, end: int) -> int:
        """Return how much would be pinned after `pin`."""
        first, last = self._range_with(begin, end)
        return last - first

    def pin(self, begin: int, end: int, pinner: Pinner) -> None:
        """Pin the bytes [begin, end), and what lies between them and what is pinned; free when they are.

        Takes long. When the pinner raises, what was pinned by then stays so.
        """
        if self._pinner is not pinner:
            self.unpin()
        first, last = self._range_with(begin, end)
        if self._pinner is None:
            self._pinned = (first, first)
        while self._pinned[0] > first:
            self._pin_piece(max(first, self._pinned[0] - PINNED_PIECE_BYTES), self._pinned[0], pinner)
        while self._pinned[1] < last:
            self._pin_piece(self._pinned[1], min(last, self._pinned[1] + PINNED_PIECE_BYTES), pinner)

    def _pin_piece(self, begin: int, end: int, pinner: Pinner) -> None:
        pinner.register(self.address + begin, end - begin)
        self._pieces.append((begin, end))
        self._pinned = min(begin, self._pinned[0]), max(end, self._pinned[1])
        self._pinner = pinner

    def unpin(self) -> None:
        """Let go of what is pinned."""
        pinner, self._pinner = self._pinner, None
        while self._pieces:
            begin, _ = self._pieces.pop()
            assert pinner is not None
            with contextlib.suppress(DeviceError):  # A device that is lost holds on to nothing either.
                pinner.unregister(self.address + begin)
        self._pinned = (0, 0)

    def _range_with(self, begin: int, end: int) -> tuple[int, int]:
        first = begin // MAPPED_UNIT_BYTES * MAPPED_UNIT_BYTES
        last = min(self.touched_bytes, -(-end // MAPPED_UNIT_BYTES) * MAPPED_UNIT_BYTES)
        if self._pinner is None:
            return first, last
        return min(first, self._pinned[0]), max(last, self._pinned[1])

    def seal(self) -> None:
        """Note that the image is complete and will be read from now on."""
        assert self.state is ArenaState.FILLING
        self.filled_at = next(_fillings)
        self.state = ArenaState.DRAINING

    def close(self) -> None:
        self.unpin()
        self._memory.close()
        self.touched_bytes = 0


# -- the pool ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolStatistics:
    """How many arenas there are, their bytes, and how often memory was allocated or touched so far."""

    arenas_count: int
    touched_bytes: int
    touches_count: int


@dataclass(eq=False)
class ArenaPool:
    """Hands out arenas, smallest sufficient first. Thread-safe; memory is touched outside its lock."""

    _arenas: list[Arena] = field(default_factory=list)
    _lost: list[Arena] = field(default_factory=list)
    guard: Guard = field(default_factory=Guard)

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self.guard)

    @property
    def held_bytes(self) -> int:
        return sum(arena.touched_bytes for arena in self._arenas)

    def fits(self, bytes: int, *, limit_bytes: int | None) -> bool:
        """Return whether a snapshot of `bytes` fits the limit (None: the default share of free memory)."""
        with self._changed:
            free = [a.touched_bytes for a in self._arenas if a.state in (ArenaState.FREE, ArenaState.PREPARING)]
        # The largest free arena is grown; the other ones stay as they are.
        reused = max(free, default=0)
        if limit_bytes is None and bytes <= reused:
            return True  # The process has this memory already; asking what is free takes half a millisecond.
        return self._may_add(max(reused, bytes) - reused, limit_bytes)

    def _may_add(self, bytes: int, limit_bytes: int | None) -> bool:
        held = self.held_bytes
        return held + bytes <= (default_limit_bytes(held) if limit_bytes is None else limit_bytes)

    def acquire(
        self,
        bytes: int,
        *,
        deadline_s: float,
        limit_bytes: int | None = None,
        layout: object = None,
        before_wait: Callable[[], None] = lambda: None,
    ) -> Arena:
        """Return an arena in state FILLING with at least `bytes` touched; waits while both are in use.

        It also waits for one that is being prepared, rather than touch another one. layout: what the save could bring
        up to date; an arena with other contents loses them. before_wait: called before a wait; it may raise.
        """
        until = time.monotonic() + deadline_s
        with self._changed:
            while (arena := self._take(bytes, layout, lambda: self._may_add(bytes, limit_bytes))) is None:
                before_wait()
                left_s = until - time.monotonic()
                if left_s <= 0:
                    what, hint = f"no staging arena became free within {deadline_s} s", "the saves in flight have them"
                    raise DeadlineError(what, found=len(self._arenas), hint=f"{hint}: save less often, or wait longer")
                self._changed.wait(min(left_s, STEP_S))
                uninterrupted.look(self._changed)
        try:
            if arena.contents is not None and arena.contents.layout is not layout:
                arena.contents = None
            arena.ensure(bytes)
        except BaseException:
            self.release(arena)
            raise
        return arena

    def take_to_prepare(self, bytes: int, *, layout: object = None) -> Arena | None:
        """Take an arena only to touch it ahead of a save and release it; None when none is free."""
        with self._changed:
            arena = self._take(bytes, layout, lambda: False)
            if arena is not None:
                arena.state = ArenaState.PREPARING
            return arena

    def _take(self, bytes: int, layout: object, may_add: Callable[[], bool]) -> Arena | None:
        """Return a free arena, the smallest that suffices, else the largest, else a new one. Under the lock.

        One whose contents the save can use comes first, one with contents of use to others last: rather than that, a
        second one is made, if there may_add be one.
        """
        free = [arena for arena in self._arenas if arena.state is ArenaState.FREE]
        usable = [arena for arena in free if arena.contents is not None and arena.contents.layout is layout]
        plain = [arena for arena in free if arena.contents is None]
        is_preparing = any(item.state is ArenaState.PREPARING for item in self._arenas)
        has_room = self._own_count() < ARENAS_COUNT_MAX and not is_preparing
        if usable:
            arena = max(usable, key=lambda item: item.filled_at)  # Least has been written since.
        elif plain:
            arena = _best(plain, bytes)
        elif has_room and (not free or may_add()):
            arena = Arena()
            self._arenas.append(arena)
        elif free:
            arena = _best(free, bytes)
        else:
            return None
        arena.state = ArenaState.FILLING
        return arena

    def touch_ahead(self, arena: Arena, bytes: int, *, limit_bytes: int | None) -> None:
        """Make room for an image somewhat larger than `bytes`, in the background: tables grow between saves.

        Does nothing while half of that room is left, so it touches memory once in many saves.
        """
        headroom = min(bytes // 8, HEADROOM_BYTES_MAX)
        if arena.touched_bytes >= bytes + headroom // 2:
            return
        if self._may_add(bytes + headroom - arena.touched_bytes, limit_bytes):
            arena.ensure(bytes + headroom, threads=1)

    def seal(self, arena: Arena) -> None:
        """Note that a snapshot is complete in an arena, or on its way there."""
        arena.seal()

    def lend(self, arena: Arena) -> None:
        """Let somebody keep a sealed arena for as long as he likes: saves go on with others."""
        with self._changed:
            arena.is_lent = True
            self._changed.notify()

    def release(self, arena: Arena) -> None:
        """Give an arena back and wake a waiter; from any thread, also from within a garbage collection.

        One to which a device that has failed may still write is never used again, nor is its memory given back.
        """
        with self.guard.again():
            writer, arena.writer = arena.writer, None
            arena.state = ArenaState.FREE
            arena.is_lent = False
            if writer is not None and writer.is_lost:
                self._arenas.remove(arena)
                self._lost.append(arena)
            elif self._own_count() > ARENAS_COUNT_MAX:  # It was lent, and others came in its place.
                self._arenas.remove(arena)
                arena.close()
            self._changed.notify()

    def pinned_bytes(self) -> int:
        """Return the pinned bytes of all arenas together."""
        with self._changed:
            return sum(arena.pinned[1] for arena in self._arenas)

    def forget(self, layout: object) -> None:
        """Forget which arenas hold snapshots of this layout: nobody will bring them up to date any more. As release."""
        with self.guard.again():
            for arena in self._arenas:
                if arena.contents is not None and arena.contents.layout is layout:
                    arena.contents = None

    def _own_count(self) -> int:
        return sum(not arena.is_lent for arena in self._arenas)

    def statistics(self) -> PoolStatistics:
        with self._changed:
            return PoolStatistics(
                arenas_count=len(self._arenas),
                touched_bytes=self.held_bytes,
                touches_count=sum(arena.touches_count for arena in self._arenas),
            )


def _best(arenas: list[Arena], bytes: int) -> Arena:
    enough = [arena for arena in arenas if arena.touched_bytes >= bytes]
    if enough:
        return min(enough, key=lambda item: item.touched_bytes)
    return max(arenas, key=lambda item: item.touched_bytes)


pool = ArenaPool()


def _forget_in_child() -> None:
    """Start without arenas in a forked child, which does not inherit their memory."""
    global pool
    pool._arenas = []
    pool._changed = threading.Condition(pool.guard)


register_at_fork(after_in_child=_forget_in_child)
