"""The compiled core as a contract.Core: each method checks its arrays and makes one C call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_uint64
from dataclasses import astuple

import numpy as np

from asyncckpt.native import arrays
from asyncckpt.native.contract import (
    DIGEST_BYTES,
    I64,
    U8,
    U64,
    Digester,
    DrainOptions,
    FileImage,
    IdMap,
    Memory,
    Progress,
    Reads,
)
from asyncckpt.native.declarations import AcDrainOptions, AcFile, AcReadOptions, load_library
from asyncckpt.native.native_objects import NativeDigester, NativeIdMap, NativeMemory, call

# Room for the rows of a first call of ac_marked, as a fraction of all rows; a second call follows if more are marked.
_MARKED_PART = 16
_MARKED_ROOM_MIN = 4096
# The fields of ac_read_item.
_READ_ITEM = np.dtype([("place", np.uint64, 3), ("fd", np.int32), ("direct", np.int32)])


class NativeCore:
    """Implements contract.Core; see there."""

    implementation = "native"

    def __init__(self) -> None:
        """Load the library; raises UnusableLibrary."""
        self._library: ctypes.CDLL = load_library()
        self.cpu_variant: str = self._library.ac_cpu_variant().decode()

    @property
    def cores_count(self) -> int:
        return int(self._library.ac_cores_count())

    def copy(self, segments: U64, *, threads: int = 0) -> None:
        arrays.check_table(segments, columns_count=3, name="segments")
        call(self._library.ac_copy, segments.ctypes.data, len(segments), threads)

    def copy_rows(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None, *, threads: int = 0) -> None:
        arrays.check_table(columns, columns_count=3, name="columns")
        sources, targets, count = arrays.check_row_pairs(source_rows, target_rows)
        rows = [None if side is None else side.ctypes.data for side in (sources, targets)]
        call(self._library.ac_copy_rows, columns.ctypes.data, len(columns), *rows, count, threads)

    def fingerprints(self, columns: U64, rows_count: int, *, threads: int = 1) -> U64:
        row_columns = arrays.checked_row_columns(columns, rows_count)
        found = np.empty(rows_count, dtype=np.uint64)
        places = row_columns.ctypes.data, len(columns), rows_count, found.ctypes.data
        call(self._library.ac_fingerprint, *places, threads)
        return found

    def mark(self, marks: U8, rows: I64, value: int) -> None:
        arrays.check_marks(marks, writable=True)
        arrays.check_mark(value, name="value")
        rows = arrays.check_ids(rows, name="rows")
        call(self._library.ac_mark, marks.ctypes.data, len(marks), rows.ctypes.data, len(rows), value)

    def marked(self, marks: U8, above: int, *, threads: int = 0) -> I64:
        arrays.check_marks(marks, writable=False)
        arrays.check_mark(above, name="above")
        room = max(_MARKED_ROOM_MIN, len(marks) // _MARKED_PART)
        while True:
            rows: I64 = np.empty(room, dtype=np.int64)
            count = c_uint64()
            places = marks.ctypes.data, len(marks), above, rows.ctypes.data, room
            call(self._library.ac_marked, *places, byref(count), threads)
            if count.value == room:
                return rows
            if count.value < room:
                found: I64 = rows[: count.value].copy()
                return found
            room = count.value

    def map_memory(self, bytes: int) -> Memory:
        if bytes <= 0:
            raise ValueError(f"cannot map {bytes} bytes")
        return NativeMemory(self._library, bytes)

    def advise_huge(self, address: int, bytes: int) -> None:
        self._library.ac_memory_advise_huge(address, bytes)

    def digest(self, spans: U64, *, threads: int = 1) -> U8:
        arrays.check_table(spans, columns_count=2, name="spans")
        digests = _empty_digests(len(spans))
        call(self._library.ac_digest, spans.ctypes.data, len(spans), digests.ctypes.data, threads)
        return digests

    def digester(self) -> Digester:
        return NativeDigester(self._library)

    def drain(self, files: Sequence[FileImage], spans: U64, options: DrainOptions, progress: Progress) -> U8:
        arrays.check_table(spans, columns_count=2, name="spans")
        arrays.check_files(files)
        extents = [np.array(file.extents, dtype=np.uint64).reshape(-1, 2) for file in files]
        tables = [
            AcFile(table.ctypes.data, len(table), file.fd, file.direct)
            for file, table in zip(files, extents, strict=True)
        ]
        digests = _empty_digests(len(spans))
        places = spans.ctypes.data, len(spans), digests.ctypes.data
        settings = byref(AcDrainOptions(*astuple(options)))
        call(self._library.ac_drain, (AcFile * len(files))(*tables), len(files), *places, settings, *_shared(progress))
        return digests

    def write(self, fd: int, address: int, bytes: int, *, offset: int, direct: bool) -> None:
        call(self._library.ac_write, fd, address, bytes, offset, direct)

    def read(self, reads: Reads, *, digests: bool, threads: int, progress: Progress) -> U8 | None:
        arrays.check_reads(reads)
        items = np.empty(len(reads.places), dtype=_READ_ITEM)
        items["place"], items["fd"], items["direct"] = reads.places, reads.fds, reads.direct
        taken = _empty_digests(len(items)) if digests else None
        target = None if taken is None else taken.ctypes.data
        options = byref(AcReadOptions(0, threads))
        call(self._library.ac_read, items.ctypes.data, len(items), target, options, *_shared(progress))
        return taken

    def id_map(self, capacity: int) -> IdMap:
        return NativeIdMap(self._library, capacity)


def _empty_digests(count: int) -> U8:
    return np.empty((count, DIGEST_BYTES), dtype=np.uint8)


def _shared(progress: Progress) -> tuple[int, int]:
    """Return the addresses of what a running call shares with other threads."""
    return progress._done.ctypes.data, progress._cancel.ctypes.data
