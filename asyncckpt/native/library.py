"""The compiled core as a contract.Core: each method checks its arrays and makes one C call.

Memory, digesters and id maps live in the core. Each object here owns what an `ac_*_new` or `ac_memory_map` call
returned and frees it when it is closed or collected. Nothing is freed at interpreter exit: the process ends anyway, and
another thread may still be inside a call.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint64, c_void_p
from dataclasses import astuple

import numpy as np

from asyncckpt.model.block import DIGEST_BYTES, LEAF_BYTES, leaves_count
from asyncckpt.native import contract
from asyncckpt.native.contract import (
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
    RowUpdate,
)
from asyncckpt.native.declarations import (
    CANCELLED,
    INVALID,
    NO_MEMORY,
    OK,
    SHORT,
    AcDrainOptions,
    AcError,
    AcFile,
    AcReadOptions,
    AcRowUpdate,
    load_library,
)
from asyncckpt.signals import uninterrupted

# Room for the rows of a first call of ac_marked, as a fraction of all rows; a second call follows if more are marked.
_MARKED_PART = 16
_MARKED_ROOM_MIN = 4096
_RUNS_ROOM = 256
_MAPPED_UNIT_BYTES = 2 << 20
# AC_RULE_NUMBERS.
_RULE_NUMBERS = 8
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
        contract.check_table(segments, columns_count=3, name="segments")
        call(self._library.ac_copy, segments.ctypes.data, len(segments), threads)

    def copy_rows(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None, *, threads: int = 0) -> None:
        contract.check_table(columns, columns_count=3, name="columns")
        sources, targets, count = contract.check_row_pairs(source_rows, target_rows)
        rows = [None if side is None else side.ctypes.data for side in (sources, targets)]
        call(self._library.ac_copy_rows, columns.ctypes.data, len(columns), *rows, count, threads)

    def fingerprints(self, columns: U64, rows_count: int, *, threads: int = 1) -> U64:
        row_columns = contract.checked_row_columns(columns, rows_count)
        found = np.empty(rows_count, dtype=np.uint64)
        places = row_columns.ctypes.data, len(columns), rows_count, found.ctypes.data
        call(self._library.ac_fingerprint, *places, threads)
        return found

    def mark(self, marks: U8, rows: I64, value: int) -> None:
        contract.check_marks(marks, writable=True)
        contract.check_mark(value, name="value")
        rows = contract.check_ids(rows, name="rows")
        call(self._library.ac_mark, marks.ctypes.data, len(marks), rows.ctypes.data, len(rows), value)

    def marked(self, marks: U8, above: int, *, threads: int = 0) -> I64:
        contract.check_marks(marks, writable=False)
        contract.check_mark(above, name="above")
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

    def update_rows(self, update: RowUpdate, rows: I64, *, threads: int = 1) -> None:
        rows = contract.check_update(update, rows)
        numbers = np.zeros(_RULE_NUMBERS, dtype=np.float32)
        numbers[: len(update.numbers)] = update.numbers
        first, second = (*update.slots, None, None)[:2]
        settings = AcRowUpdate(
            gradient=update.gradient.address,
            weight=update.weight.address,
            first=None if first is None else first.address,
            second=None if second is None else second.address,
            marks=None if update.marks is None else update.marks.ctypes.data,
            numbers=numbers.ctypes.data,
            rows_count=update.rows_count,
            dim=update.weight.width,
            rule=update.rule,
            gradient_float=update.gradient.kind,
            weight_float=update.weight.kind,
            first_float=0 if first is None else first.kind,
            second_float=0 if second is None else second.kind,
            rowwise=update.rowwise,
            mark=update.mark,
        )
        call(self._library.ac_update_rows, byref(settings), rows.ctypes.data, len(rows), threads)

    def map_memory(self, bytes: int) -> Memory:
        if bytes <= 0:
            raise ValueError(f"cannot map {bytes} bytes")
        return NativeMemory(self._library, bytes)

    def advise_huge(self, address: int, bytes: int) -> None:
        self._library.ac_memory_advise_huge(address, bytes)

    def digest(self, spans: U64, *, threads: int = 1, leaves: bool = False) -> U8:
        contract.check_table(spans, columns_count=2, name="spans")
        count = _leaf_counts(spans[:, 1]).sum() if leaves else 0
        digests, of_leaves = _empty_digests(len(spans)), _empty_digests(count)
        room = of_leaves.ctypes.data if leaves else None
        call(self._library.ac_digest, spans.ctypes.data, len(spans), digests.ctypes.data, room, threads)
        return _joined_rows(spans[:, 1], digests, of_leaves) if leaves else digests

    def digester(self) -> Digester:
        return NativeDigester(self._library)

    def drain(self, files: Sequence[FileImage], spans: U64, options: DrainOptions, progress: Progress) -> U8:
        contract.check_table(spans, columns_count=2, name="spans")
        contract.check_files(files)
        extents = [np.array(file.extents, dtype=np.uint64).reshape(-1, 2) for file in files]
        tables = [
            AcFile(table.ctypes.data, len(table), file.fd, file.direct)
            for file, table in zip(files, extents, strict=True)
        ]
        digests, leaves = _empty_digests(len(spans)), _empty_digests(_leaf_counts(spans[:, 1]).sum())
        places = spans.ctypes.data, len(spans), digests.ctypes.data, leaves.ctypes.data
        settings = byref(AcDrainOptions(*astuple(options)))
        call(self._library.ac_drain, (AcFile * len(files))(*tables), len(files), *places, settings, *_shared(progress))
        return _joined_rows(spans[:, 1], digests, leaves) if spans[:, 1].max(initial=0) > LEAF_BYTES else digests

    def write(self, fd: int, address: int, bytes: int, *, offset: int, direct: bool) -> None:
        call(self._library.ac_write, fd, address, bytes, offset, direct)

    def read(self, reads: Reads, *, digests: bool, threads: int, progress: Progress) -> U8 | None:
        contract.check_reads(reads)
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


def _leaf_counts(bytes: U64) -> I64:
    return -(-bytes.astype(np.int64) // LEAF_BYTES)


def _shared(progress: Progress) -> tuple[int, int]:
    """Return the addresses of what a running call shares with other threads."""
    return progress._done.ctypes.data, progress._cancel.ctypes.data


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
        raise contract.CancelledDrain(message)
    if error.status == SHORT:
        raise contract.ShortFile(message, error.item)
    raise contract.CoreIOError(error.sys_errno, message, error.item)


class _Window:
    """Gives NumPy access to memory of the core, and keeps its owner alive as long as the array."""

    def __init__(self, owner: object, address: int, count: int, typestr: str) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (count,), "typestr": typestr}


class NativeMemory:
    """A mapped region; see contract.Memory. Forked children do not have it and must not access it.

    The core writes the address to where the finalizer finds it: whatever is raised after a call, the region is known.
    """

    def __init__(self, library: ctypes.CDLL, bytes: int) -> None:
        self._library = library
        self._base = c_void_p()
        self._bytes = [_mapped_bytes(bytes)]
        self._release = weakref.finalize(self, _unmap, library, self._base, self._bytes, os.getpid())
        self._release.atexit = False
        call(library.ac_memory_map, bytes, byref(self._base))

    @property
    def address(self) -> int:
        return self._base.value or 0

    @property
    def bytes(self) -> int:
        return self._bytes[0]

    def view(self) -> U8:
        if not self.bytes:
            return np.empty(0, dtype=np.uint8)
        return np.asarray(_Window(self, self.address, self.bytes, "|u1"))

    def resize(self, bytes: int) -> None:
        before, after, error = self.bytes, _mapped_bytes(bytes), AcError()
        self._bytes[0] = min(before, after)  # So much there is in any case.
        status = self._library.ac_memory_resize(self._base, before, bytes, byref(self._base), byref(error))
        self._bytes[0] = after if status == OK else before
        if status != OK:
            raise_error(error)

    def touch(self, begin: int, end: int, *, threads: int = 0) -> None:
        if not 0 <= begin <= end <= self.bytes:
            raise ValueError(f"range [{begin}, {end}) is outside a mapping of {self.bytes} bytes")
        call(self._library.ac_memory_touch, self.address, begin, end, threads)

    def close(self) -> None:
        self._release()


def _mapped_bytes(bytes: int) -> int:
    return -(-bytes // _MAPPED_UNIT_BYTES) * _MAPPED_UNIT_BYTES


def _unmap(library: ctypes.CDLL, base: c_void_p, held: list[int], owner_pid: int) -> None:
    address, bytes = base.value, held[0]
    base.value, held[0] = None, 0
    # A forked child never had the mapping, and may have something else at that address.
    if address and os.getpid() == owner_pid:
        library.ac_memory_unmap(address, bytes, None)


class NativeDigester:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        with uninterrupted:
            self._handle = _handle_of(library.ac_digester_new())
            weakref.finalize(self, library.ac_digester_free, self._handle).atexit = False
        self._bytes = 0

    def update(self, address: int, bytes: int) -> None:
        # Before the call: whatever is raised behind it, there is room for all leaves that the core holds.
        self._bytes += bytes
        call(self._library.ac_digester_update, self._handle, address, bytes)

    def end(self) -> bytes:
        return bytes(self.end_rows()[0])

    def end_rows(self) -> U8:
        bytes, self._bytes = self._bytes, 0
        leaves = leaves_count(bytes)
        rows = _empty_digests(max(2, 1 + leaves))
        self._library.ac_digester_end(self._handle, rows.ctypes.data, rows[1:].ctypes.data)
        return rows[: 1 + leaves]


class NativeIdMap:
    """int64 id -> row in open addressing; see contract.IdMap."""

    def __init__(self, library: ctypes.CDLL, capacity: int) -> None:
        self._library = library
        with uninterrupted:
            self._handle = _handle_of(library.ac_idmap_new(capacity))
            weakref.finalize(self, library.ac_idmap_free, self._handle).atexit = False

    def __len__(self) -> int:
        return int(self._library.ac_idmap_size(self._handle))

    @property
    def rows_end(self) -> int:
        return int(self._library.ac_idmap_rows_end(self._handle))

    @property
    def bytes(self) -> int:
        return int(self._library.ac_idmap_bytes(self._handle))

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

    def insert(self, ids: I64, marks: tuple[U8, int] | None = None) -> tuple[I64, I64]:
        ids = contract.check_ids(ids)
        mark_places: tuple[int | None, int, int] = (None, 0, 0)
        if marks is not None:
            contract.check_marks(marks[0], writable=True)
            contract.check_mark(marks[1], name="mark")
            mark_places = marks[0].ctypes.data, len(marks[0]), marks[1]
        rows, new_rows, new_count = np.empty_like(ids), np.empty_like(ids), c_uint64()
        places = ids.ctypes.data, len(ids), rows.ctypes.data, new_rows.ctypes.data
        call(self._library.ac_idmap_insert, self._handle, *places, byref(new_count), *mark_places)
        return rows, new_rows[: new_count.value].copy()

    def remove(self, ids: I64) -> I64:
        return self._rows_by(self._library.ac_idmap_remove, ids)

    def runs(self) -> I64:
        room = _RUNS_ROOM
        while True:
            runs: I64 = np.empty((room, 2), dtype=np.int64)
            count = c_uint64()
            call(self._library.ac_idmap_runs, self._handle, runs.ctypes.data, room, byref(count))
            used: I64 = runs[: count.value].copy()
            if count.value <= room:
                return used
            room = count.value

    def clear(self) -> None:
        self._library.ac_idmap_clear(self._handle)

    def _rows_by(self, function: Callable[..., int], ids: I64) -> I64:
        ids = contract.check_ids(ids)
        rows = np.empty(len(ids), dtype=np.int64)
        call(function, self._handle, ids.ctypes.data, len(ids), rows.ctypes.data)
        return rows


def _handle_of(address: int | None) -> int:
    if not address:
        raise MemoryError("the compiled core has no memory for a new object")
    return address


def row_begins(bytes: Sequence[int] | I64 | U64) -> I64:
    """Return the first row of each block among digests, and the end: int64 [blocks + 1] (docs/format.md)."""
    sizes = np.asarray(bytes, dtype=np.int64)
    counts = 1 + np.where(sizes > LEAF_BYTES, -(-sizes // LEAF_BYTES), 0)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def _joined_rows(bytes: U64, digests: U8, leaves: U8) -> U8:
    """Return the rows of blocks, from their digests (uint8 [blocks, 16]) and those of all leaves of all of them."""
    begins = row_begins(bytes)
    rows = np.empty((int(begins[-1]), DIGEST_BYTES), dtype=np.uint8)
    is_leaf = np.ones(len(rows), dtype=np.bool_)
    is_leaf[begins[:-1]] = False
    rows[begins[:-1]] = digests
    counts = _leaf_counts(bytes)
    rows[is_leaf] = leaves[np.repeat(counts > 1, counts)]
    return rows
