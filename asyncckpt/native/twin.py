"""The portable twin of the compiled core: the same results and errors from NumPy, xxhash and plain system calls.

It is slower: one thread, buffered writes, and a copy where the core remaps.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncckpt import system
from asyncckpt.model.block import DIGEST_BYTES, LEAF_BYTES
from asyncckpt.native.contract import (
    I64,
    PAGE_BYTES,
    U8,
    U64,
    CancelledDrain,
    CoreIOError,
    Digester,
    DrainOptions,
    FileImage,
    IdMap,
    Memory,
    Progress,
    Reads,
    RowUpdate,
    ShortFile,
    check_files,
    check_ids,
    check_mark,
    check_marks,
    check_reads,
    check_row_pairs,
    check_table,
    check_update,
    checked_row_columns,
)
from asyncckpt.native.twin_id_map import TwinIdMap
from asyncckpt.native.twin_update import update_rows

_MAPPED_UNIT_BYTES = 2 << 20
_READ_BYTES_MAX = 8 << 20
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


def memory_at(address: int, bytes: int) -> memoryview:
    """Return the bytes at an address; the caller keeps them alive."""
    return memoryview((ctypes.c_uint8 * bytes).from_address(address)).cast("B") if bytes else memoryview(bytearray())


def _rows_of(data: memoryview) -> U8:
    digester = TwinDigester()
    digester.update_from(data)
    return digester.end_rows()


class TwinDigester:
    def __init__(self) -> None:
        self._restart()

    def update(self, address: int, bytes: int) -> None:
        self.update_from(memory_at(address, bytes))

    def update_from(self, data: memoryview) -> None:
        while data:
            room = LEAF_BYTES - self._leaf_bytes
            self._leaf.update(data[:room])
            self._leaf_bytes += len(data[:room])
            data = data[room:]
            if self._leaf_bytes == LEAF_BYTES:
                self._end_leaf()

    def end(self) -> bytes:
        return bytes(self.end_rows()[0])

    def end_rows(self) -> U8:
        if self._leaf_bytes:
            self._end_leaf()
        leaves = b"".join(self._leaf_digests)
        own = leaves if len(self._leaf_digests) > 1 else b""
        self._restart()
        return np.frombuffer(xxhash.xxh3_128(leaves).digest() + own, dtype=np.uint8).reshape(-1, DIGEST_BYTES)

    def _restart(self) -> None:
        self._leaf = xxhash.xxh3_128()
        self._leaf_bytes = 0
        self._leaf_digests: list[bytes] = []

    def _end_leaf(self) -> None:
        self._leaf_digests.append(self._leaf.digest())
        self._leaf.reset()
        self._leaf_bytes = 0


class TwinMemory:
    """A page-aligned window of a NumPy array."""

    def __init__(self, bytes: int) -> None:
        self._window = self._allocate(bytes)

    @property
    def address(self) -> int:
        return int(self._window.ctypes.data)

    @property
    def bytes(self) -> int:
        return len(self._window)

    def view(self) -> U8:
        return self._window

    def resize(self, bytes: int) -> None:
        grown = self._allocate(bytes)
        kept = min(len(grown), len(self._window))
        grown[:kept] = self._window[:kept]
        self._window = grown

    def touch(self, begin: int, end: int, *, threads: int = 0) -> None:
        if not 0 <= begin <= end <= self.bytes:
            raise ValueError(f"range [{begin}, {end}) is outside a mapping of {self.bytes} bytes")
        self._window[begin:end:PAGE_BYTES] |= 0

    def close(self) -> None:
        self._window = np.empty(0, dtype=np.uint8)

    @staticmethod
    def _allocate(bytes: int) -> U8:
        if bytes <= 0:
            raise ValueError(f"cannot map {bytes} bytes")
        rounded = -(-bytes // _MAPPED_UNIT_BYTES) * _MAPPED_UNIT_BYTES
        raw = np.zeros(rounded + PAGE_BYTES, dtype=np.uint8)
        start = -int(raw.ctypes.data) % PAGE_BYTES
        return raw[start : start + rounded]


class TwinCore:
    """Implements contract.Core; see there."""

    implementation = "twin"
    cpu_variant = "portable"

    @property
    def cores_count(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def copy(self, segments: U64, *, threads: int = 0) -> None:
        check_table(segments, columns_count=3, name="segments")
        for source, target, bytes in segments.tolist():
            ctypes.memmove(target, source, bytes)

    def copy_rows(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None, *, threads: int = 0) -> None:
        check_table(columns, columns_count=3, name="columns")
        sources, targets, count = check_row_pairs(source_rows, target_rows)
        if any(rows is not None and count and int(rows.min()) < 0 for rows in (sources, targets)):
            raise ValueError("a row to copy is negative")
        for source_address, target_address, row_bytes in columns.tolist():
            if count and row_bytes:
                source = _rows_at(source_address, row_bytes, sources, count)
                target = _rows_at(target_address, row_bytes, targets, count)
                target[_index(targets, count)] = source[_index(sources, count)]

    def fingerprints(self, columns: U64, rows_count: int, *, threads: int = 1) -> U64:
        checked_row_columns(columns, rows_count)
        found = [0] * rows_count
        for address, row_bytes in columns.tolist():
            rows = memory_at(address, rows_count * row_bytes)
            for row, seed in enumerate(found):
                found[row] = xxhash.xxh3_64_intdigest(rows[row * row_bytes : (row + 1) * row_bytes], seed)
        return np.array(found, dtype=np.uint64)

    def mark(self, marks: U8, rows: I64, value: int) -> None:
        check_marks(marks, writable=True)
        check_mark(value, name="value")
        rows = check_ids(rows, name="rows")
        if len(rows) and (int(rows.min()) < -1 or int(rows.max()) >= len(marks)):
            raise ValueError("a row to mark is neither -1 nor one of the rows")
        marks[rows[rows >= 0]] = value

    def marked(self, marks: U8, above: int, *, threads: int = 0) -> I64:
        check_marks(marks, writable=False)
        check_mark(above, name="above")
        return np.flatnonzero(marks > above).astype(np.int64, copy=False)

    def update_rows(self, update: RowUpdate, rows: I64, *, threads: int = 1) -> None:
        update_rows(update, check_update(update, rows))

    def map_memory(self, bytes: int) -> Memory:
        return TwinMemory(bytes)

    def advise_huge(self, address: int, bytes: int) -> None:
        """Do nothing: a system may refuse, too."""

    def digest(self, spans: U64, *, threads: int = 1, leaves: bool = False) -> U8:
        return self._digests(spans, Progress(), leaves=leaves)

    def digester(self) -> Digester:
        return TwinDigester()

    def drain(self, files: Sequence[FileImage], spans: U64, options: DrainOptions, progress: Progress) -> U8:
        check_table(spans, columns_count=2, name="spans")
        check_files(files)
        for item, file in enumerate(files):
            try:
                self._write_file(file, options, progress)
            except OSError as error:
                raise _io_error(error, f"cannot write file {item} of {file.bytes} bytes", item) from error
        return self._digests(spans, progress, leaves=True)

    def write(self, fd: int, address: int, bytes: int, *, offset: int, direct: bool) -> None:
        if direct and (address | bytes | offset) % PAGE_BYTES:
            raise ValueError(f"a direct write needs address, bytes and offset in multiples of {PAGE_BYTES}")
        try:
            _clear_direct(fd)
            _write_all(fd, memory_at(address, bytes), offset)
        except OSError as error:
            raise _io_error(error, f"cannot write {bytes} bytes at offset {offset}", 0) from error

    def read(self, reads: Reads, *, digests: bool, threads: int, progress: Progress) -> U8 | None:
        check_reads(reads)
        places, fds = reads.places.tolist(), reads.fds.tolist()
        for item, ((address, offset, bytes), fd) in enumerate(zip(places, fds, strict=True)):
            try:
                _clear_direct(fd)
                _read_all(fd, memory_at(address, bytes), offset, item, progress)
            except OSError as error:
                raise _io_error(error, f"cannot read {bytes} bytes at offset {offset}", item) from error
        # The spans are the places without their file offsets.
        spans = np.ascontiguousarray(reads.places[:, [0, 2]])
        return self._digests(spans, progress, leaves=False) if digests else None

    def id_map(self, capacity: int) -> IdMap:
        return TwinIdMap()

    def _digests(self, spans: U64, progress: Progress, *, leaves: bool) -> U8:
        check_table(spans, columns_count=2, name="spans")
        found = [np.empty((0, DIGEST_BYTES), dtype=np.uint8)]
        for address, bytes in spans.tolist():
            _check_cancelled(progress)
            rows = _rows_of(memory_at(address, bytes))
            found.append(rows if leaves else rows[:1])
        return np.concatenate(found)

    def _write_file(self, file: FileImage, options: DrainOptions, progress: Progress) -> None:
        _clear_direct(file.fd)
        offset = 0
        for address, bytes in file.extents:
            for block in _blocks_of(memory_at(address, bytes), options.block_bytes or _READ_BYTES_MAX):
                _check_cancelled(progress)
                _write_all(file.fd, block, offset)
                offset += len(block)
                progress._done[0] += np.uint64(len(block))
        os.ftruncate(file.fd, file.bytes)
        if options.sync:
            system.fsync(file.fd)


def _clear_direct(fd: int) -> None:
    """Clear O_DIRECT of a descriptor, because the twin's writes may have any length."""
    if _O_DIRECT:
        flags = system.fcntl.fcntl(fd, system.fcntl.F_GETFL)
        if flags & _O_DIRECT:
            system.fcntl.fcntl(fd, system.fcntl.F_SETFL, flags & ~_O_DIRECT)


def _blocks_of(data: memoryview, bytes_max: int) -> Iterator[memoryview]:
    return (data[begin : begin + bytes_max] for begin in range(0, len(data), bytes_max))


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = system.pwrite(fd, data, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data, offset = data[written:], offset + written


def _read_all(fd: int, target: memoryview, offset: int, item: int, progress: Progress) -> None:
    while target:
        _check_cancelled(progress)
        count = system.read_into(fd, target[:_READ_BYTES_MAX], offset)
        if count == 0:
            raise ShortFile(f"file ended at offset {offset}, {len(target)} bytes before the end of read {item}", item)
        target, offset = target[count:], offset + count
        progress._done[0] += np.uint64(count)


def _check_cancelled(progress: Progress) -> None:
    if progress.cancelled:
        raise CancelledDrain("cancelled")


def _io_error(error: OSError, what: str, item: int) -> CoreIOError:
    return CoreIOError(error.errno or 0, f"{what}: {error.strerror}", item)


def _rows_at(address: int, row_bytes: int, rows: I64 | None, count: int) -> NDArray[np.void]:
    """Return the rows of a column up to the last one in rows, each as one opaque value."""
    rows_count = count if rows is None else int(rows.max()) + 1
    return np.frombuffer(memory_at(address, rows_count * row_bytes), dtype=np.dtype((np.void, row_bytes)))


def _index(rows: I64 | None, count: int) -> I64 | slice:
    return slice(count) if rows is None else rows
