"""Try out in a folder what saves need of its file system, and leave nothing behind.

All is done in a folder of its own, which is removed at the end; the bytes that are written to see how fast the disk is
have no name.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import statistics
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from asyncckpt import system
from asyncckpt.errors import CheckpointError, ConflictError
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import Directory, at, io_failed
from asyncckpt.storage.owner_lock import _lock_file, _read_record
from asyncckpt.system import F_OFD_SETLK, fcntl

CHUNK_BYTES = 16 << 20
SECONDS_MAX = 2.0  # Of writing.
SYNCS_COUNT = 9
PREFIX = ".asyncckpt-doctor-"
_F_OFD_GETLK = F_OFD_SETLK - 1


@dataclass(frozen=True)
class DiskFacts:
    """What a folder's file system does.

    direct           takes writes past the page cache (O_DIRECT)
    renames          publishes a file under a new name, and refuses to replace one
    locks            a lock that somebody holds is refused to others
    sync_s           median seconds until a small new file and its name are durable
    bytes_per_s      of direct writes of 16 MiB, until durable; None where there was no room to try
    """

    direct: bool
    renames: bool
    locks: bool
    sync_s: float
    bytes_per_s: float | None


def probe_disk(path: Path, *, bytes: int) -> DiskFacts:
    """Try out a folder that exists, with at most `bytes` bytes. IOFailedError where nothing can be written."""
    with uninterrupted:
        try:
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=path))
        except OSError as error:
            raise io_failed(f"nothing can be written to {str(path)!r}", error) from error
        try:
            with Directory.open(made) as folder:
                return _probe(folder, bytes)
        except OSError as error:
            raise io_failed(f"{str(path)!r} cannot be written to", error) from error
        finally:
            shutil.rmtree(made, ignore_errors=True)


def holder_of(path: Path, lock_name: str) -> str | None:
    """Return who holds the lock of a directory, None if nobody does; changes nothing."""
    if sys.platform != "linux":
        return None  # Other systems do not say.
    with contextlib.suppress(OSError):
        fd = os.open(path / lock_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = struct.unpack("hhqqi4x", fcntl.fcntl(fd, _F_OFD_GETLK, asked))
            return None if found[0] == fcntl.F_UNLCK else _read_record(fd)
        finally:
            os.close(fd)
    return None


def _probe(folder: Directory, bytes: int) -> DiskFacts:
    syncs = []
    for number in range(SYNCS_COUNT):
        uninterrupted.look()
        begun = time.perf_counter()
        _make_small(folder, f"new{number}")
        folder.publish(f"new{number}", f"name{number}")
        folder.sync()
        syncs.append(time.perf_counter() - begun)
    direct, speed = _write(folder, bytes)
    return DiskFacts(
        direct=direct, renames=_keeps(folder), locks=_locks(folder), sync_s=statistics.median(syncs), bytes_per_s=speed
    )


def _make_small(folder: Directory, name: str) -> None:
    fd, _ = folder.create_file(name)
    try:
        os.write(fd, b"asyncckpt")
        system.fsync(fd)
    finally:
        os.close(fd)


def _keeps(folder: Directory) -> bool:
    """Return whether a file that exists is not replaced."""
    _make_small(folder, "again")
    try:
        folder.publish("again", "name0")
    except ConflictError:
        return True
    except CheckpointError:
        return False
    return False


def _locks(folder: Directory) -> bool:
    first = _lock_file(folder, "LOCK")
    try:
        os.close(_lock_file(folder, "LOCK"))
    except ConflictError:
        return True
    finally:
        os.close(first)
    return False


def _write(folder: Directory, bytes: int) -> tuple[bool, float | None]:
    """Write to a file without a name; return whether direct writes work, and bytes per second."""
    chunks = min(bytes, shutil.disk_usage(folder.path).free // 4) // CHUNK_BYTES
    fd, direct = folder.create_file("bytes", direct=True)
    try:
        with contextlib.suppress(PermissionError):  # Windows keeps the name of a file that is open.
            at.unlink("bytes", dir_fd=folder.fd)
        with mmap.mmap(-1, CHUNK_BYTES) as memory:
            memory.write(os.urandom(CHUNK_BYTES))
            begun, done = time.perf_counter(), 0
            while done < chunks and time.perf_counter() - begun < SECONDS_MAX:
                uninterrupted.look()
                try:
                    written = system.pwrite(fd, memory, done * CHUNK_BYTES)
                except OSError:
                    if not direct:
                        raise
                    direct = False  # It was accepted, and is refused now.
                    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                    continue
                if written < CHUNK_BYTES:
                    break
                done += 1
            system.fsync(fd)
        return direct, done * CHUNK_BYTES / (time.perf_counter() - begun) if done else None
    finally:
        os.close(fd)
