"""The files of a checkpoint of RecSDK, checked (embcache/recsdk_files.py) and open."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncckpt.embcache.recsdk_files import (
    ADMIT_COUNT,
    DATA_FILE,
    EMBEDDING,
    EVICT_KEY_FILE,
    EVICT_TIME_FILE,
    EVICT_TIMESTAMP,
    INT64,
    KEY,
    MOMENTUM,
    RecsdkCheckpoint,
    StoredArray,
    StoredPart,
    folder_below,
    read_recsdk_checkpoint,
)
from asyncckpt.errors import CorruptError
from asyncckpt.format import limits
from asyncckpt.format.dtypes import known_dtype
from asyncckpt.formats.data_files import DataFiles, FileArray
from asyncckpt.storage.directory import Directory, set_direct


@dataclass(frozen=True)
class OpenPart:
    """What one rank wrote of a table, or all of them. arrays: by the names of the folders they are in."""

    stored: StoredPart
    arrays: Mapping[str, FileArray]


@dataclass(frozen=True)
class OpenRecsdk:
    """A checkpoint of RecSDK with its files open. Close it, or use it as a context manager.

    `arrays` lists all of them. An array's key is its path below `base`.
    """

    path: Path
    found: RecsdkCheckpoint
    folder: Directory
    files: DataFiles
    tables: Mapping[str, tuple[OpenPart, ...]]

    @staticmethod
    def open(path: Path) -> OpenRecsdk:
        """Open and check. NotFoundError where there is no such checkpoint, CorruptError, UnsupportedError,
        IOFailedError. Takes 8 bytes for each row of all tables, and 16 for each timestamp."""
        return OpenRecsdk.of(path, read_recsdk_checkpoint(path))

    @staticmethod
    def of(path: Path, found: RecsdkCheckpoint) -> OpenRecsdk:
        """Open the files of what was found. CorruptError, IOFailedError."""
        folder, files = Directory.open(found.base), DataFiles([])
        try:
            tables = {
                name: tuple(OpenPart(part, dict(_opened(files, part))) for part in parts)
                for name, parts in found.tables.items()
            }
        except BaseException:
            files.close()
            folder.close()
            raise
        return OpenRecsdk(path, found, folder, files, tables)

    def close(self) -> None:
        self.files.close()
        self.folder.close()

    def __enter__(self) -> OpenRecsdk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def arrays(self) -> Iterator[FileArray]:
        for parts in self.tables.values():
            for part in parts:
                yield from part.arrays.values()

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)


def _opened(files: DataFiles, part: StoredPart) -> Iterator[tuple[str, FileArray]]:
    """Open the files of a part; yield (name, array)."""
    base, above = part.embedding.base, part.embedding.place[:-2]
    stored = {
        KEY: StoredArray(base, (*above, KEY, DATA_FILE), INT64, part.ids.shape),
        EMBEDDING: part.embedding,
        **{f"{MOMENTUM}{number}": momentum for number, momentum in enumerate(part.momenta, 1)},
    }
    if part.counts is not None:
        stored[ADMIT_COUNT] = part.counts
    if part.seen is not None:
        for name in (EVICT_KEY_FILE, EVICT_TIME_FILE):
            stored[name] = StoredArray(base, (*above, EVICT_TIMESTAMP, name), INT64, part.seen[0].shape)
    for name, array in stored.items():
        yield name, _open_array(files, array)


def _open_array(files: DataFiles, array: StoredArray) -> FileArray:
    with folder_below(array.base, array.place[:-1]) as folder:
        fd = folder.open_file(array.place[-1])
    files.fds.append(fd)
    if os.fstat(fd).st_size != array.bytes:
        raise CorruptError(f"file {array.shown!r} was changed while it was opened")
    key = "/".join(array.place)
    files.names.append(key)
    files.sizes.append(array.bytes)
    files.direct.append(set_direct(fd))
    dtype = known_dtype(np.dtype(array.dtype).name)
    assert dtype is not None
    limits.check_array(key, array.shape, dtype)
    return FileArray(key, len(files.fds) - 1, dtype, array.shape, 0, array.bytes)
