"""Calls that not every system has: the one place that says what runs instead.

The compiled core needs Linux. On macOS and Windows its twin runs, and there

    forked children    Windows has none, so nothing is registered for them
    reads and writes   Windows has none at an offset: seek, then read or write, for one thread at a time
    syncs              macOS leaves what is synced in the cache of the drive; F_FULLFSYNC empties that too
    room on the disk   macOS and Windows do not take it before it is used
    read pages         they stay in memory there, for whoever wants them read from the disk again
    locks              OFD locks are Linux's; macOS has `flock`, of the same meaning, and Windows locks a byte

Folders by descriptor, which Windows lacks too, are in storage/os_by_path.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

NICE_BEHIND_TRAINING = 10  # A tenth of the time that a thread of the trainer gets on the same core.
F_OFD_SETLK = 37  # Of Linux. Not every build of Python has the name.
# Of the file that is locked: behind what is ever written there, for Windows lets nobody read a locked byte.
_LOCKED_BYTE = 1 << 30
_NO_FULL_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY)


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


fcntl = _module("fcntl")
_msvcrt: Any = None if fcntl else _module("msvcrt")
_seeking = threading.Lock()


def register_at_fork(**calls: Callable[[], object]) -> None:
    """Do as os.register_at_fork does, where processes fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**calls)


def lower_priority() -> None:
    """Let the current thread run only where others leave time, where the system knows priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE_BEHIND_TRAINING)


def pread(fd: int, bytes: int, offset: int) -> bytes:
    """Read at an offset."""
    if hasattr(os, "pread"):
        return os.pread(fd, bytes, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, bytes)


def take_room(fd: int, begin: int, bytes: int) -> None:
    """Make a file longer, with room on the disk for it; OSError where there is none."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, begin, bytes)
    else:
        os.ftruncate(fd, begin + bytes)


def forget_pages(fd: int) -> None:
    """Let what was written to a file, and is synced, be read from the disk again."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(fd: int, size: int) -> bool:
    """Return whether a file is in memory, by a look at a few of its pages; False where that cannot be told."""
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None or not size:
        return False
    try:
        return all(os.preadv(fd, [bytearray(1)], place, flag) for place in (0, size // 3, 2 * size // 3, size - 1))
    except OSError:  # It would have to be read from the disk, or the file system cannot tell.
        return False


def read_into(fd: int, target: memoryview, offset: int) -> int:
    """Read at an offset into memory; return how many bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [target], offset)
    data = pread(fd, len(target), offset)
    target[: len(data)] = data
    return len(data)


def pwrite(fd: int, data: Any, offset: int) -> int:
    """Write what has a buffer at an offset; return how many bytes."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def fsync(fd: int) -> None:
    """Make a file durable."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
    os.fsync(fd)


def lock(fd: int) -> None:
    """Lock an open file for its open file description; BlockingIOError or PermissionError if another one has it."""
    if fcntl is None:
        at = os.lseek(fd, 0, os.SEEK_CUR)
        os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
        try:
            _msvcrt.locking(fd, _msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(fd, at, os.SEEK_SET)
    elif sys.platform == "linux":
        # struct flock: type, whence, start, length, pid; an OFD lock wants pid 0.
        fcntl.fcntl(fd, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked_elsewhere(error: OSError) -> bool:
    """Return whether this is how `lock` says that another one has it."""
    return error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
