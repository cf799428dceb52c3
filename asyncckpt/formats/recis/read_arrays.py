"""Read the bytes of stored arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncckpt.errors import CorruptError
from asyncckpt.formats.recis.directory import RecisDirectory, StoredArray
from asyncckpt.native import Progress, Reads, ShortFile, core
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import io_failed

READ_THREADS = 4
WINDOW_BYTES = 64 << 20


def read_arrays(directory: RecisDirectory, wanted: Sequence[tuple[StoredArray, int, int, int]]) -> None:
    """Read ranges (array, begin, bytes, address) in one parallel call. CorruptError, IOFailedError."""
    items = [item for item in wanted if item[2]]
    uninterrupted.look()
    if not items:
        return
    files = directory.files
    places = np.array([(address, array.offset + begin, size) for array, begin, size, address in items], dtype=np.uint64)
    fds = np.array([files.fds[item[0].file] for item in items], dtype=np.int32)
    direct = np.array([files.direct[item[0].file] for item in items], dtype=np.int32)
    shown = repr(str(directory.path))
    try:
        core.read(Reads(places, fds, direct), digests=False, threads=READ_THREADS, progress=Progress())
    except ShortFile as error:
        raise CorruptError(f"a file of {shown} ended while it was read: {error}") from error
    except OSError as error:
        raise io_failed(f"files of {shown} cannot be read", error) from error


def digest_of(directory: RecisDirectory, array: StoredArray, progress: Progress) -> bytes:
    """Read an array window by window and return its digest."""
    digester = core.digester()
    window = np.empty(min(WINDOW_BYTES, array.bytes), dtype=np.uint8)
    for begin in range(0, array.bytes, WINDOW_BYTES):
        count = min(WINDOW_BYTES, array.bytes - begin)
        read_arrays(directory, [(array, begin, count, window.ctypes.data)])
        digester.update(window.ctypes.data, count)
        progress.advance(count)
    return digester.end()
