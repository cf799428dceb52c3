"""Memory of a simulated device, and its allocator.

Host memory that nobody may touch outside of `opened`: code that takes an address of a device for one of the host dies.
The allocator is torch's in small: what is dropped goes back at once, to those who allocate on the same stream.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

BLOCK_BYTES = 512
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class OutOfMemory(torch.cuda.OutOfMemoryError):
    """What torch raises; a RuntimeError."""


class Region:
    """Addresses [begin, begin + bytes) of this process; unmapped when nothing uses them any more."""

    def __init__(self, bytes: int, *, protected: bool) -> None:
        protection = _PROT_NONE if protected else _PROT_READ_WRITE
        address = _libc.mmap(None, bytes, protection, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        assert address not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
        self.begin, self.bytes, self._is_protected, self._depth = int(address), bytes, protected, 0
        _regions.add(self)
        weakref.finalize(self, _libc.munmap, address, bytes).atexit = False

    @property
    def end(self) -> int:
        return self.begin + self.bytes

    def holds(self, address: int) -> bool:
        """Whether the byte at an address is one of these; the one behind the last may be other memory of the host."""
        return self.begin <= address < self.end

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let the memory be used; by one thread, which may nest this."""
        self._depth += 1
        if self._depth == 1 and self._is_protected:
            self._protect(_PROT_READ_WRITE)
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._is_protected:
                self._protect(_PROT_NONE)

    def _protect(self, protection: int) -> None:
        if _libc.mprotect(self.begin, self.bytes, protection):  # No assert: tests run without them, too.
            raise OSError(ctypes.get_errno(), "mprotect")


_regions: weakref.WeakSet[Region] = weakref.WeakSet()


def open_all_for_good() -> None:
    """Let everybody read the memory of all devices there are: of a test that has failed, pytest shows what it held."""
    for region in list(_regions):
        region._is_protected = False
        _libc.mprotect(region.begin, region.bytes, _PROT_READ_WRITE)


class Allocator:
    """Hands out pieces of a region, and takes them back when their last tensor is gone. Under the runtime's lock."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._next = region.begin
        self._free: dict[tuple[object, int], list[int]] = {}
        # A finalizer runs wherever the last reference is dropped, so it only leaves a note.
        self._dropped: deque[tuple[object, int, int]] = deque()
        self.live: dict[int, int] = {}

    @property
    def unused_bytes(self) -> int:
        """What was never handed out."""
        return self.region.end - self._next

    def allocate(self, bytes: int, pool: object) -> torch.Tensor:
        """Memory of `bytes` bytes, uint8 [bytes]; the piece that was dropped last on this pool comes first."""
        self.collect()
        size = -(-max(1, bytes) // BLOCK_BYTES) * BLOCK_BYTES
        free = self._free.get((pool, size), [])
        if free:
            address = free.pop()
        elif self._next + size > self.region.end:
            raise OutOfMemory(f"CUDA out of memory. Tried to allocate {size} bytes.")
        else:
            address, self._next = self._next, self._next + size
        self.live[address] = bytes
        piece = _Piece(self.region, address, max(1, bytes))
        weakref.finalize(piece, self._dropped.append, (pool, size, address))
        return torch.from_numpy(np.asarray(piece))[:bytes]

    def collect(self) -> None:
        """Take back what was dropped."""
        while self._dropped:
            pool, size, address = self._dropped.popleft()
            del self.live[address]
            self._free.setdefault((pool, size), []).append(address)


class _Piece:
    """Tells NumPy of a piece of memory; arrays over it keep it alive, and it keeps the region."""

    def __init__(self, region: Region, address: int, bytes: int) -> None:
        self._region = region
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": (bytes,),
            "typestr": "|u1",
        }


def is_mapped(address: int, bytes: int) -> bool:
    """Whether all pages of a range are there."""
    first = address // 4096 * 4096
    pages = (address + bytes - first + 4095) // 4096
    return bool(_libc.mincore(first, pages * 4096, ctypes.create_string_buffer(pages)) == 0)
