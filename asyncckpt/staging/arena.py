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
pinned when devices copy to it, and stays so.
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
            self._memory.resize(rounded)
        self._memory.touch(self.touched_bytes, rounded, threads=threads)
        self.touched_bytes = rounded
        self.touches_count += 1
        if pinner is not None and self._pinner is None:
            with contextlib.suppress(DeviceError):  # Whoever needs it pinned will try again, and say so.
                self.pin(*pinned, pinner)

    @property
    def pinned(self) -> tuple[int, int]:
        """(address, bytes) of what is pinned."""
        begin, end = self._pinned
        return self.address + begin, end - begin

    def pinned_bytes_with(self, begin: int, end: int) -> int:
        """Return how much would be pinned after `pin`."""
        first, last = self._range_with(begin, end)
        return last - first

    def pin(self, begin: int, end: int, pinner: Pinner) -> None:
        """Pin the bytes [begin, end), beside what is pinned, in one piece; free when they are.

        Takes long. What the pinner raises leaves nothing pinned.
        """
        first, last = self._range_with(begin, end)
        if (first, last) == self._pinned:
            return
        self.unpin()
        pinner.register(self.address + first, last - first)
        self._pinned, self._pinner = (first, last), pinner

    def unpin(self) -> None:
        """Let go of what is pinned."""
        pinner, self._pinner = self._pinner, None
        if pinner is not None:
            with contextlib.suppress(DeviceError):  # A device that is lost holds on to nothing either.
                pinner.unregister(self.pinned[0])
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
