"""The two chunk buffers of a blocking or filtered save: one fills while the other drains.

They belong to the process, like the arenas: touched once, then reused. Only the save that holds the save lock's head
uses them. Where memory is short they are smaller, down to a MiB, and are given back at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from asyncckpt.native import Memory, core
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.signals import Guard
from asyncckpt.staging.limits import spare_bytes
from asyncckpt.system import register_at_fork

CHUNKS_COUNT = 2
LEAST_BYTES = 1 << 20
SHARE = 8  # Each of them may take an eighth of what is to spare: other things take memory, too.
PLENTY_BYTES = 16 * CHUNK_BYTES  # With so much to spare they are kept.


class Chunks(NamedTuple):
    """The addresses of the buffers, and the bytes of each."""

    addresses: tuple[int, ...]
    bytes: int


def chunk_bytes(bytes: int, *, spare: int, least: int = LEAST_BYTES) -> int:
    """Return how large each of two buffers is for files of up to `bytes`, with `spare` bytes of memory."""
    size = min(CHUNK_BYTES, max(least, spare // SHARE // LEAST_BYTES * LEAST_BYTES))
    return min(size, -(-max(bytes, 1) // LEAST_BYTES) * LEAST_BYTES)


class ChunkBuffers:
    """A pair of buffers of CHUNK_BYTES each, or less."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._memory: Memory | None = None
        self._touched = 0

    @contextmanager
    def borrow(self, bytes: int, *, least: int = LEAST_BYTES) -> Iterator[Chunks]:
        """Yield two buffers for files of up to `bytes`, each of `least` bytes or more; held until the block ends."""
        with self._guard:
            spare = spare_bytes(self._touched)
            size = chunk_bytes(bytes, spare=spare, least=least)
            wanted = CHUNKS_COUNT * size
            if self._memory is None or wanted > self._memory.bytes:
                self._memory, self._touched = core.map_memory(CHUNKS_COUNT * CHUNK_BYTES), 0
            try:
                if wanted > self._touched:
                    self._memory.touch(self._touched, wanted)
                    self._touched = wanted
                yield Chunks(tuple(self._memory.address + index * size for index in range(CHUNKS_COUNT)), size)
            finally:
                if spare < PLENTY_BYTES:
                    self._memory.close()
                    self.forget()

    def forget(self) -> None:
        self._memory, self._touched = None, 0


chunk_buffers = ChunkBuffers()
register_at_fork(after_in_child=chunk_buffers.forget)
