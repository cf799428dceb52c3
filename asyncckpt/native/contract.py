"""The interface of the compiled core and of its portable twin, and the checks of arguments that both make.

Two implementations, one Protocol: `library.py` calls the C++ core through ctypes, `twin.py` does the same with NumPy,
xxhash and plain system calls. Both pass tests/unit/native. Memory is given as address (int) and size in bytes; the
caller keeps it alive during a call. Every call releases the GIL around its long part. Arrays are checked before any
address is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncckpt.native.row_rules import Rule

PAGE_BYTES = 4096

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
U8 = NDArray[np.uint8]


def paged(bytes: int) -> int:
    """Round bytes up to whole pages."""
    return -(-bytes // PAGE_BYTES) * PAGE_BYTES


class CoreIOError(OSError):
    """A system call failed with `errno`; `item` is the index of the segment, file, span or read."""

    def __init__(self, errno: int, message: str, item: int) -> None:
        super().__init__(errno, message)
        self.item = item


class CancelledDrain(Exception):
    """The cancel flag was set while a native call ran."""


class ShortFile(Exception):
    """A file ended before the requested bytes; `item` is the index of the read."""

    def __init__(self, message: str, item: int) -> None:
        super().__init__(message)
        self.item = item


@dataclass(frozen=True)
class FileImage:
    """A file to write from memory: `fd` is open for writing and empty; direct means it was opened with O_DIRECT.

    The file consists of its extents (address, bytes), one after another. direct: every extent begins at a page and all
    but the last one are whole pages; the last one is readable up to its size rounded up to a page.
    """

    fd: int
    extents: tuple[tuple[int, int], ...]
    direct: bool

    @property
    def bytes(self) -> int:
        """The length of the file."""
        return sum(bytes for _, bytes in self.extents)


@dataclass(frozen=True)
class Reads:
    """Parts of files to read, each from a descriptor of fds [n].

    places: uint64 [n, 3] of (target address, file offset, bytes). direct [n]: whether a file was opened with O_DIRECT.
    """

    places: U64
    fds: NDArray[np.int32]
    direct: NDArray[np.int32]


@dataclass(frozen=True)
class DrainOptions:
    """Options of a drain, in the order of ac_drain_options in asyncckpt.h; see there."""

    block_bytes: int = 16 << 20
    writers: int = 1
    digest_threads: int = 1
    background: int = 1
    sync: bool = True


@dataclass
class Progress:
    """Shared with a running call: `bytes_done` grows; `cancel()` from any thread ends it soon.

    bytes_expected: about how many there are going to be; 0: not known.
    """

    bytes_expected: int = 0
    _done: U64 = field(default_factory=lambda: np.zeros(1, dtype=np.uint64))
    _cancel: NDArray[np.int32] = field(default_factory=lambda: np.zeros(1, dtype=np.int32))

    @property
    def bytes_done(self) -> int:
        return int(self._done[0])

    @property
    def cancelled(self) -> bool:
        return bool(self._cancel[0])

    def cancel(self) -> None:
        self._cancel[0] = 1

    def advance(self, bytes: int) -> None:
        """Count bytes that were written outside a native call."""
        self._done[0] += bytes


# ac_float: what the numbers of a column are.
FLOAT32, FLOAT16, BFLOAT16 = range(3)


@dataclass(frozen=True)
class FloatRows:
    """The memory of rows of numbers: row r begins r * width numbers after `address`; kind is FLOAT32, ..."""

    address: int
    width: int
    kind: int


@dataclass(frozen=True)
class RowUpdate:
    """One step of a rule (native/row_rules.py) on rows of columns in memory, as ac_row_update in asyncckpt.h.

    gradient: row i belongs to the i-th of the rows. weight, slots: `rows_count` rows. marks: None, or uint8
    [rows_count] in which the rows get `mark`. Nothing overlaps anything else.
    """

    rule: Rule
    numbers: tuple[float, ...]
    gradient: FloatRows
    weight: FloatRows
    slots: tuple[FloatRows, ...]
    rows_count: int
    rowwise: bool = False
    marks: U8 | None = None
    mark: int = 0


class Memory(Protocol):
    """A mapped region of at least the requested bytes. `address` may change on resize."""

    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def view(self) -> U8:
        """Return the region as a writable uint8 array; invalid after resize or close."""
        ...

    def resize(self, bytes: int) -> None: ...
    def touch(self, begin: int, end: int, *, threads: int = 0) -> None:
        """Fault in the bytes [begin, end) on `threads` threads, 0 for all cores."""
        ...

    def close(self) -> None: ...


class Digester(Protocol):
    def update(self, address: int, bytes: int) -> None: ...
    def end(self) -> bytes:
        """Return the 16-byte digest and start again."""
        ...

    def end_rows(self) -> U8:
        """Return the digest with those of the leaves (row_begins) and start again."""
        ...


class IdMap(Protocol):
    """int64 id -> row; see ac_idmap_* in asyncckpt.h. Used by one thread at a time."""

    def __len__(self) -> int: ...
    @property
    def rows_end(self) -> int: ...
    @property
    def bytes(self) -> int:
        """The memory of ids and index, used or not."""
        ...

    def ids_by_row(self) -> I64:
        """Return a view of the id of every row below rows_end, undefined for free rows, until an insert or reserve."""
        ...

    def reserve(self, capacity: int) -> None: ...
    def find(self, ids: I64) -> I64: ...
    def insert(self, ids: I64, marks: tuple[U8, int] | None = None) -> tuple[I64, I64]:
        """Return (row of every id, rows that are new in order of first appearance).

        marks: an array by row, as of Core.mark, and a mark to set where a row of an id has another than 0; rows beyond
        the array have none.
        """
        ...

    def remove(self, ids: I64) -> I64: ...
    def runs(self) -> I64:
        """Return used rows as ascending maximal ranges, shape [k, 2]."""
        ...

    def clear(self) -> None: ...


class Core(Protocol):
    @property
    def implementation(self) -> str:
        """`"native"` or `"twin"`."""
        ...

    @property
    def cpu_variant(self) -> str: ...
    @property
    def cores_count(self) -> int: ...
    def copy(self, segments: U64, *, threads: int = 0) -> None:
        """Copy segments, a C-contiguous uint64 array [n, 3] of (source address, target address, bytes)."""
        ...

    def copy_rows(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None, *, threads: int = 0) -> None:
        """Copy row source_rows[i] of every column to row target_rows[i]; one of them may be None: row i.

        columns: C-contiguous uint64 [c, 3] of (source address, target address, row bytes). Rows are 0 or more, else
        ValueError before anything is copied; target rows are distinct. No target overlaps another one or a source.
        """
        ...

    def fingerprints(self, columns: U64, rows_count: int, *, threads: int = 1) -> U64:
        """Return the fingerprint of every row over all its columns, uint64 [rows_count].

        columns: C-contiguous uint64 [c, 2] of (address, row bytes). A fingerprint starts from 0 and becomes, column by
        column, XXH3-64 of the row's bytes with the fingerprint so far as seed.
        """
        ...

    def mark(self, marks: U8, rows: I64, value: int) -> None:
        """Set marks[row] = value for every row; skip -1.

        marks: uint8 [n], writable, C-contiguous. Raises ValueError, and sets no mark, for any other row out of range.
        """
        ...

    def marked(self, marks: U8, above: int, *, threads: int = 0) -> I64:
        """Return the rows whose mark is greater than `above`, ascending int64. The marks must not change meanwhile."""
        ...

    def update_rows(self, update: RowUpdate, rows: I64, *, threads: int = 1) -> None:
        """Update every row of rows, int64 [n], distinct, by its gradient; skip -1. The bits are defined in asyncckpt.h.

        Raises ValueError, and changes nothing, for any other row out of range and for slots that the rule has not.
        """
        ...

    def map_memory(self, bytes: int) -> Memory: ...
    def advise_huge(self, address: int, bytes: int) -> None:
        """Request huge pages for memory that was not touched yet; the system may refuse."""
        ...

    def digest(self, spans: U64, *, threads: int = 1, leaves: bool = False) -> U8:
        """Return digests, uint8 [n, 16], of spans, uint64 [n, 2] of (address, bytes); leaves: see `drain`."""
        ...

    def digester(self) -> Digester: ...
    def drain(self, files: Sequence[FileImage], spans: U64, options: DrainOptions, progress: Progress) -> U8:
        """Write all files and return the digests of spans with those of their leaves, as row_begins says. Raises
        CoreIOError or CancelledDrain."""
        ...

    def write(self, fd: int, address: int, bytes: int, *, offset: int, direct: bool) -> None: ...
    def read(self, reads: Reads, *, digests: bool, threads: int, progress: Progress) -> U8 | None:
        """Fill the memory of all reads and return their digests, uint8 [n, 16], if asked.

        Raises CoreIOError, ShortFile or CancelledDrain.
        """
        ...

    def id_map(self, capacity: int) -> IdMap: ...


def check_table(array: U64, *, columns_count: int, name: str) -> None:
    """Raise ValueError unless `array` is a C-contiguous uint64 array [n, columns_count]."""
    fits = array.dtype == np.uint64 and array.ndim == 2 and array.shape[1] == columns_count
    if not (fits and array.flags.c_contiguous):
        raise ValueError(f"{name} must be a C-contiguous uint64 array [n, {columns_count}], found {_shown(array)}")


def checked_row_columns(columns: U64, rows_count: int) -> U64:
    """Return columns, uint64 [n, 2] of (address, row bytes), as ac_row_column without targets; raises ValueError."""
    check_table(columns, columns_count=2, name="columns")
    check_count(rows_count, name="rows_count")
    row_columns = np.zeros((len(columns), 3), dtype=np.uint64)
    row_columns[:, [0, 2]] = columns
    return row_columns


def check_reads(reads: Reads) -> None:
    """Raise ValueError unless the arrays are as Reads says."""
    check_table(reads.places, columns_count=3, name="places")
    count = len(reads.places)
    for name, array in (("fds", reads.fds), ("direct", reads.direct)):
        if array.dtype != np.int32 or array.shape != (count,):
            raise ValueError(f"{name} must be an int32 array [{count}], found {_shown(array)}")


def check_ids(ids: I64, *, name: str = "ids") -> I64:
    """Return `ids` as a C-contiguous array; raise ValueError unless it is int64 [n]."""
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError(f"{name} must be an int64 array [n], found {_shown(ids)}")
    return np.ascontiguousarray(ids)


def check_row_pairs(source_rows: I64 | None, target_rows: I64 | None) -> tuple[I64 | None, I64 | None, int]:
    """Return both as C-contiguous arrays and their length; raise ValueError unless one is there and both fit."""
    sources = None if source_rows is None else check_ids(source_rows, name="source_rows")
    targets = None if target_rows is None else check_ids(target_rows, name="target_rows")
    counts = {len(rows) for rows in (sources, targets) if rows is not None}
    if len(counts) != 1:
        found = " and ".join("none" if rows is None else str(len(rows)) for rows in (sources, targets))
        raise ValueError(f"source_rows and target_rows must be equally long, at most one of them None, found {found}")
    return sources, targets, counts.pop()


def check_marks(marks: U8, *, writable: bool) -> None:
    """Raise ValueError unless `marks` is a C-contiguous uint8 array [n], writable where it is written."""
    if marks.dtype != np.uint8 or marks.ndim != 1 or not marks.flags.c_contiguous:
        raise ValueError(f"marks must be a C-contiguous uint8 array [n], found {_shown(marks)}")
    if writable and not marks.flags.writeable:
        raise ValueError("marks must be writable")


def check_mark(value: int, *, name: str) -> None:
    """Raise ValueError unless `value` is what a mark can be."""
    if not 0 <= value <= 255:
        raise ValueError(f"{name} must be from 0 to 255, found {value}")


def check_update(update: RowUpdate, rows: I64) -> I64:
    """Return `rows` as a C-contiguous array; raise ValueError unless the update is as RowUpdate says."""
    width = update.weight.width
    narrow = len(update.slots) - 1 if update.rowwise else -1
    if len(update.slots) != update.rule.slots_count(update.numbers) or width < 1:
        raise ValueError(f"the slots are not those of the rule: {update}")
    if update.rowwise and not update.rule.has_rowwise:
        raise ValueError(f"the rule has no row-wise form: {update}")
    widths = [slot.width for slot in update.slots]
    if widths != [1 if index == narrow else width for index in range(len(widths))] or update.gradient.width != width:
        raise ValueError(f"the widths of the columns do not fit: {update}")
    if len(update.numbers) != update.rule.numbers_count:
        raise ValueError(f"the numbers are not those of the rule: {update}")
    if update.marks is not None:
        check_marks(update.marks, writable=True)
        check_mark(update.mark, name="mark")
        if len(update.marks) != update.rows_count:
            raise ValueError(f"there are {len(update.marks)} marks for {update.rows_count} rows")
    return check_ids(rows, name="rows")


def check_count(count: int, *, name: str) -> None:
    """Raise ValueError when a count is negative."""
    if count < 0:
        raise ValueError(f"{name} must be 0 or more, found {count}")


def check_files(files: Sequence[FileImage]) -> None:
    """Raise ValueError unless the extents of every file are as FileImage says."""
    for item, file in enumerate(files):
        for index, (address, bytes) in enumerate(file.extents):
            what = f"extent {index} of file {item}"
            if bytes < 0 or address < 0 or (bytes and not address):
                raise ValueError(f"{what} has address {address:#x} and {bytes} bytes")
            if not file.direct or not bytes:
                continue
            what += " is direct"
            if address % PAGE_BYTES:
                raise ValueError(f"{what} but its address {address:#x} is not a multiple of {PAGE_BYTES}")
            if index + 1 < len(file.extents) and bytes % PAGE_BYTES:
                raise ValueError(f"{what} and not the last one but has {bytes} bytes, no multiple of {PAGE_BYTES}")


def _shown(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"
