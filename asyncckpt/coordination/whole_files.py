"""Files that are there in full or not at all, for talk: nothing is synced, for nothing of it outlives the job.

A file is written under a temporary name and renamed, and begins with a digest of the rest, so that neither a reader
that comes early nor a file system that shows a name before its bytes can make half a message of it.
"""

from __future__ import annotations

import contextlib
import os

import xxhash

from asyncckpt.coordination.file_names import new_temporary_name
from asyncckpt.errors import CorruptError
from asyncckpt.storage.directory import Directory, io_failed

_DIGEST_BYTES = 16


def write_whole(folder: Directory, name: str, data: bytes) -> None:
    """Make a file of a new name; ConflictError when there is one, IOFailedError."""
    temporary = new_temporary_name()
    fd, _ = folder.create_file(temporary)
    try:
        try:
            for part in (xxhash.xxh3_128_digest(data), data):
                _write_all(fd, part)
        finally:
            os.close(fd)
        folder.publish(temporary, name)
    except BaseException as error:
        with contextlib.suppress(Exception):
            folder.remove_file(temporary)
        if isinstance(error, OSError):
            raise io_failed(f"file {str(folder.path / name)!r} cannot be written", error) from error
        raise


def read_whole(folder: Directory, name: str, *, bytes_max: int) -> bytes:
    """What `write_whole` wrote; NotFoundError, CorruptError for anything else, IOFailedError."""
    raw = folder.read_file(name, bytes_max=bytes_max + _DIGEST_BYTES)
    data = raw[_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(data) != raw[:_DIGEST_BYTES]:
        raise CorruptError(f"{str(folder.path / name)!r} is not what was written", found=f"{len(raw)} bytes")
    return data


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
