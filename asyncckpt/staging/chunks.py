"""The two chunk buffers of a blocking or filtered save: one fills while the other drains.

They belong to the process, like the arenas: touched once, then reused. Only the save that holds the save lock's head
uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncckpt.native import Memory, core
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.signals import Guard
from asyncckpt.system import register_at_fork

CHUNKS_COUNT = 2


class ChunkBuffers:
    """A pair of buffers of CHUNK_BYTES each."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._memory: Memory | None = None

    @contextmanager
    def borrow(self, bytes: int) -> Iterator[tuple[int, ...]]:
        """Yield the addresses of the two buffers, touched for `bytes` of use; held until the block ends."""
        with self._guard:
            if self._memory is None:
                self._memory = core.map_memory(CHUNKS_COUNT * CHUNK_BYTES)
                self._touched = 0
            wanted = min(CHUNKS_COUNT * CHUNK_BYTES, 2 * bytes)
            if wanted > self._touched:
                self._memory.touch(self._touched, wanted)
                self._touched = wanted
            yield tuple(self._memory.address + index * CHUNK_BYTES for index in range(CHUNKS_COUNT))

    def forget(self) -> None:
        self._memory = None


chunk_buffers = ChunkBuffers()
register_at_fork(after_in_child=chunk_buffers.forget)
