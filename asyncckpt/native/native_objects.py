"""Objects that live in the compiled core: memory, a digester, an id map.

Each owns what an `ac_*_new` or `ac_memory_map` call returned and frees it when it is closed or collected. Nothing is
freed at interpreter exit: the process ends anyway, and another thread may still be inside a call.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from ctypes import byref, c_uint64, c_void_p

import numpy as np

from asyncckpt.native.arrays import check_ids
from asyncckpt.native.contract import DIGEST_BYTES, I64, U8, CancelledDrain, CoreIOError, ShortFile
from asyncckpt.native.declarations import CANCELLED, INVALID, NO_MEMORY, OK, SHORT, AcError

_RUNS_ROOM = 256


def call(function: Callable[..., int], *arguments: object) -> None:
    """Call a function whose last argument is an ac_error and raise what it reports."""
    error = AcError()
    if function(*arguments, byref(error)) != OK:
        raise_error(error)


def raise_error(error: AcError) -> None:
    """Raise what an ac_error says."""
    message = error.message.decode("utf-8", "replace")
    if error.status == INVALID:
        raise ValueError(message)
    if error.status == NO_MEMORY:
        raise MemoryError(message)
    if error.status == CANCELLED:
        raise CancelledDrain(message)
    if error.status == SHORT:
        raise ShortFile(message, error.item)
    raise CoreIOError(error.sys_errno, message, error.item)


class _Window:
    """Gives NumPy access to memory of the core, and keeps its owner alive as long as the array."""

    def __init__(self, owner: object, address: int, count: int, typestr: str) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (count,), "typestr": typestr}


class NativeMemory:
    """A mapped region; see contract.Memory. Forked children do not have it and must not access it."""

    def __init__(self, library: ctypes.CDLL, bytes: int) -> None:
        self._library = library
        base = c_void_p()
        call(library.ac_memory_map, bytes, byref(base))
        self._hold(base, bytes)

    @property
    def address(self) -> int:
        return self._address

    @property
    def bytes(self) -> int:
        return self._bytes

    def view(self) -> U8:
        if not self._bytes:
            return np.empty(0, dtype=np.uint8)
        return np.asarray(_Window(self, self._address, self._bytes, "|u1"))

    def resize(self, bytes: int) -> None:
        base = c_void_p()
        call(self._library.ac_memory_resize, self._address, self._bytes, bytes, byref(base))
        self._release.detach()
        self._hold(base, bytes)

    def touch(self, begin: int, end: int, *, threads: int = 0) -> None:
        if not 0 <= begin <= end <= self._bytes:
            raise ValueError(f"range [{begin}, {end}) is outside a mapping of {self._bytes} bytes")
        call(self._library.ac_memory_touch, self._address, begin, end, threads)

    def close(self) -> None:
        self._release()
        self._address = self._bytes = 0

    def _hold(self, base: c_void_p, bytes: int) -> None:
        self._address = base.value or 0
        self._bytes = _rounded(bytes)
        self._release: weakref.finalize[..., NativeMemory] = weakref.finalize(
            self, _unmap, self._library, self._address, self._bytes, os.getpid()
        )
        self._release.atexit = False


def _rounded(bytes: int) -> int:
    return -(-bytes // (2 << 20)) * (2 << 20)


def _unmap(library: ctypes.CDLL, address: int, bytes: int, owner_pid: int) -> None:
    # A forked child never had the mapping, and may have something else at that address.
    if os.getpid() == owner_pid:
        library.ac_memory_unmap(address, bytes, None)


class NativeDigester:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._handle = _handle_of(library.ac_digester_new())
        weakref.finalize(self, library.ac_digester_free, self._handle).atexit = False

    def update(self, address: int, bytes: int) -> None:
        self._library.ac_digester_update(self._handle, address, bytes)

    def end(self) -> bytes:
        digest = ctypes.create_string_buffer(DIGEST_BYTES)
        self._library.ac_digester_end(self._handle, digest)
        return digest.raw


class NativeIdMap:
    """int64 id -> row in open addressing; see contract.IdMap."""

    def __init__(self, library: ctypes.CDLL, capacity: int) -> None:
        self._library = library
        self._handle = _handle_of(library.ac_idmap_new(capacity))
        weakref.finalize(self, library.ac_idmap_free, self._handle).atexit = False

    def __len__(self) -> int:
        return int(self._library.ac_idmap_size(self._handle))

    @property
    def rows_end(self) -> int:
        return int(self._library.ac_idmap_rows_end(self._handle))

    def ids_by_row(self) -> I64:
        count = self.rows_end
        if not count:
            return np.empty(0, dtype=np.int64)
        ids: I64 = np.asarray(_Window(self, self._library.ac_idmap_ids(self._handle), count, "<i8"))
        return ids

    def reserve(self, capacity: int) -> None:
        call(self._library.ac_idmap_reserve, self._handle, capacity)

    def find(self, ids: I64) -> I64:
        return self._rows_by(self._library.ac_idmap_find, ids)

    def insert(self, ids: I64) -> tuple[I64, I64]:
        ids = check_ids(ids)
        rows, new_rows = np.empty_like(ids), np.empty_like(ids)
        new_count = c_uint64()
        places = ids.ctypes.data, len(ids), rows.ctypes.data, new_rows.ctypes.data
        call(self._library.ac_idmap_insert, self._handle, *places, byref(new_count))
        return rows, new_rows[: new_count.value].copy()

    def remove(self, ids: I64) -> I64:
        return self._rows_by(self._library.ac_idmap_remove, ids)

    def runs(self) -> I64:
        room = _RUNS_ROOM
        while True:
            runs: I64 = np.empty((room, 2), dtype=np.int64)
            count = c_uint64()
            call(self._library.ac_idmap_runs, self._handle, runs.ctypes.data, room, byref(count))
            found = int(count.value)
            if found <= room:
                used: I64 = runs[:found].copy()
                return used
            room = found

    def clear(self) -> None:
        self._library.ac_idmap_clear(self._handle)

    def _rows_by(self, function: Callable[..., int], ids: I64) -> I64:
        ids = check_ids(ids)
        rows = np.empty(len(ids), dtype=np.int64)
        call(function, self._handle, ids.ctypes.data, len(ids), rows.ctypes.data)
        return rows


def _handle_of(address: int | None) -> int:
    if not address:
        raise MemoryError("the compiled core has no memory for a new object")
    return address
