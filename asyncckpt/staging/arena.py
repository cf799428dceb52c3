"""One staging arena: a region of host memory that holds the image of a checkpoint's shard files.

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
from enum import Enum
from typing import Protocol

from asyncckpt.errors import DeviceError
from asyncckpt.model.row_places import ArenaContents
from asyncckpt.native import U8, core

MAPPED_UNIT_BYTES = 2 << 20
RESERVED_FACTOR = 2
PINNED_PIECE_BYTES = 1 << 30
"""Other calls of a device wait while a piece is pinned."""

_fillings = itertools.count(1)


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
