"""Checks of the arrays that both implementations are given, made before any address is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncckpt.native.contract import I64, PAGE_BYTES, U8, U64, FileImage, Reads


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
