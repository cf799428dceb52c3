"""Rows by index, marks and fingerprints of the portable twin. Arrays have been checked; see contract.Core."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncckpt.native.contract import I64, U8, U64
from asyncckpt.native.twin_memory import memory_at


def copy_rows(columns: U64, source_rows: I64 | None, target_rows: I64 | None, count: int) -> None:
    for rows in (source_rows, target_rows):
        if rows is not None and count and int(rows.min()) < 0:
            raise ValueError("a row to copy is negative")
    for source_address, target_address, row_bytes in columns.tolist():
        if count and row_bytes:
            source = _rows_at(source_address, row_bytes, source_rows, count)
            target = _rows_at(target_address, row_bytes, target_rows, count)
            target[_index(target_rows, count)] = source[_index(source_rows, count)]


def fingerprints(columns: U64, rows_count: int) -> U64:
    fingerprints = [0] * rows_count
    for address, row_bytes in columns.tolist():
        rows = memory_at(address, rows_count * row_bytes)
        for row, seed in enumerate(fingerprints):
            fingerprints[row] = xxhash.xxh3_64_intdigest(rows[row * row_bytes : (row + 1) * row_bytes], seed)
    return np.array(fingerprints, dtype=np.uint64)


def mark(marks: U8, rows: I64, value: int) -> None:
    if len(rows) and (int(rows.min()) < -1 or int(rows.max()) >= len(marks)):
        raise ValueError("a row to mark is neither -1 nor one of the rows")
    marks[rows[rows >= 0]] = value


def _rows_at(address: int, row_bytes: int, rows: I64 | None, count: int) -> NDArray[np.void]:
    """Return the rows of a column up to the last one in rows, each as one opaque value."""
    rows_count = count if rows is None else int(rows.max()) + 1
    return np.frombuffer(memory_at(address, rows_count * row_bytes), dtype=np.dtype((np.void, row_bytes)))


def _index(rows: I64 | None, count: int) -> I64 | slice:
    return slice(count) if rows is None else rows
