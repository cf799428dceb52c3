"""Safetensors files of other libraries: opened by descriptor, every header checked, read and digested by ranges.

Other libraries keep no digests, so flipped bytes within the data go unseen. Files are never mapped: one that is
truncated meanwhile would kill the process. What is in memory already is taken from there, and not from the disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from asyncckpt import system
from asyncckpt.errors import CorruptError, NotFoundError, UnsupportedError
from asyncckpt.format import limits
from asyncckpt.format.dtypes import StoredDtype, known_dtype
from asyncckpt.format.manifest import HeaderEntry, decode_header, header_length
from asyncckpt.format.strict_json import looks_like
from asyncckpt.native import Progress, Reads, ShortFile, core
from asyncckpt.shard.reader import READ_THREADS
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import Directory, io_failed, set_direct

WINDOW_BYTES = 64 << 20
_PREFIX_BYTES = 512


@dataclass(frozen=True)
class FileArray:
    """One array, by its stored name, and where it is. `offset` counts from the start of the file."""

    key: str
    file: int
    dtype: StoredDtype
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass
class DataFiles:
    """The open data files, by their numbers."""

    names: list[str]
    fds: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    direct: list[bool] = field(default_factory=list)

    def open_next(self, folder: Directory, name: str, *, owner: str) -> Mapping[str, HeaderEntry]:
        """Open the next file and return its arrays: no gaps, no overlaps, as long as the file. CorruptError."""
        try:
            fd = folder.open_file(name)
        except NotFoundError as error:
            raise CorruptError(f"{owner} is missing") from error
        self.fds.append(fd)
        try:
            size = os.fstat(fd).st_size
            prefix = _read_begin(fd, _PREFIX_BYTES)
            length = header_length(prefix, file_bytes=size, owner=owner)
            raw = _read_begin(fd, length)
        except OSError as error:
            raise io_failed(f"{owner} cannot be read", error) from error
        if len(raw) < length:
            raise CorruptError(f"{owner} ended while it was read")
        if raw[8:9] != b"{":
            raise CorruptError(f"{owner} is not a safetensors file", hint=looks_like(prefix))
        self.sizes.append(size)
        self.direct.append(not system.is_cached(fd, size) and set_direct(fd))
        return decode_header(raw, file_bytes=size, owner=owner).entries

    def close(self) -> None:
        fds, self.fds = self.fds, []
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


class OpenArrays(Protocol):
    """What has data files open."""

    @property
    def path(self) -> Path: ...
    @property
    def files(self) -> DataFiles: ...


def array_of(
    key: str, file: int, entry: HeaderEntry, dtypes: Mapping[str, str], *, owner: str, library: str
) -> FileArray:
    """Return an array of a header. dtypes: what the library can store, by its code. CorruptError, UnsupportedError."""
    name = dtypes.get(entry.dtype)
    dtype = None if name is None else known_dtype(name)
    if dtype is None:
        raise UnsupportedError(f"{owner}: array {key!r} has a dtype that {library} does not have", found=entry.dtype)
    limits.check_array(key, entry.shape, dtype)
    expected = dtype.itemsize
    for size in entry.shape:
        expected *= size
    if entry.bytes != expected:
        raise CorruptError(
            f"{owner}: array {key!r} has data_offsets that do not fit", found=entry.bytes, expected=expected
        )
    return FileArray(key, file, dtype, entry.shape, entry.offset, entry.bytes)


def read_arrays(opened: OpenArrays, wanted: Sequence[tuple[FileArray, int, int, int]]) -> None:
    """Read ranges (array, begin, bytes, address) in one parallel call. CorruptError, IOFailedError."""
    items = [item for item in wanted if item[2]]
    uninterrupted.look()
    if not items:
        return
    files = opened.files
    places = np.array([(address, array.offset + begin, size) for array, begin, size, address in items], dtype=np.uint64)
    fds = np.array([files.fds[item[0].file] for item in items], dtype=np.int32)
    direct = np.array([files.direct[item[0].file] for item in items], dtype=np.int32)
    shown = repr(str(opened.path))
    try:
        core.read(Reads(places, fds, direct), digests=False, threads=READ_THREADS, progress=Progress())
    except ShortFile as error:
        raise CorruptError(f"a file of {shown} ended while it was read: {error}") from error
    except OSError as error:
        raise io_failed(f"files of {shown} cannot be read", error) from error


def digest_of(opened: OpenArrays, array: FileArray, progress: Progress) -> bytes:
    """Read an array window by window and return its digest."""
    digester = core.digester()
    window = np.empty(min(WINDOW_BYTES, array.bytes), dtype=np.uint8)
    for begin in range(0, array.bytes, WINDOW_BYTES):
        count = min(WINDOW_BYTES, array.bytes - begin)
        read_arrays(opened, [(array, begin, count, window.ctypes.data)])
        digester.update(window.ctypes.data, count)
        progress.advance(count)
    return digester.end()


def _read_begin(fd: int, bytes: int) -> bytes:
    raw = b""
    while len(raw) < bytes and (part := system.pread(fd, bytes - len(raw), len(raw))):
        raw += part
    return raw
