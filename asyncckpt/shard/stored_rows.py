"""The bytes of a block for a new shard file, taken out of a stored one: all of it, or some of its rows.

A stored block is read once, from its begin to its end, window by window. Its digest is taken over what was read and
checked before the last byte that came out of it is given away, so nothing gets into a new file unverified.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace

import numpy as np

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.encodings import decode, stored_as
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.source import ByteSource, as_bytes
from asyncckpt.native import I64, U8, U64, core
from asyncckpt.shard.reader import ChainReader

WINDOW_BYTES = 16 << 20
# Encodings that store every row by itself, so that rows can be taken out of what is stored.
_ROWWISE = ("cast", "quantize")


def copied_spec(spec: BlockSpec, rows: I64 | None) -> BlockSpec:
    """Return what the copy of a block is: `rows` of it, ascending positions; None: all, as it is stored.

    Of an encoding those steps stay that store every row by itself, and decoding gives the same bits either way. Doing
    the others anew for fewer rows is left to whoever wants it.
    """
    if rows is None:
        return spec
    return _rows_apart(spec).with_rows(len(rows))


def stored_source(reader: ChainReader, number: int, rows: I64 | None) -> ByteSource:
    """Return the bytes of `copied_spec` of a block; CorruptError out of `pieces` when the stored block is damaged."""
    spec = reader.block(number).placed.spec
    if rows is None:
        return _WholeBlock(reader, number)
    if _rows_apart(spec) == spec:
        return _ChosenRows(reader, number, rows)
    return _DecodedRows(reader, number, rows)


def _rows_apart(spec: BlockSpec) -> BlockSpec:
    """Return the block with as much of its encoding undone as is needed to take rows out of it."""
    kept = tuple(itertools.takewhile(lambda step: step.get("kind") in _ROWWISE, spec.encoding))
    if len(kept) == len(spec.encoding):
        return spec
    if len(kept) != len(spec.encoding) - 1 or spec.encoding[-1].get("kind") != "zstd":
        kept = ()
    stored = stored_as(dtype_by_name(spec.dtype, owner=spec.name).dtype, spec.shape, kept)
    assert stored is not None, "the size of rows that lie apart is known"
    return replace(
        spec,
        stored_dtype=stored.dtype,
        stored_itemsize=stored.itemsize,
        stored_shape=stored.shape,
        encoding=kept,
    )


def _undone(raw: U8, spec: BlockSpec, apart: BlockSpec) -> U8:
    """Return the bytes of `apart` out of those of `spec`."""
    if apart.encoding:
        shape = (spec.shape[0], apart.bytes // spec.shape[0])
        spec = replace(spec, dtype="uint8", shape=shape, encoding=spec.encoding[-1:])
    values = decode(raw, spec)
    assert values.is_contiguous()
    return as_bytes(values)


class _Stored:
    """A ByteSource over a stored block, read from begin to end, for byte ranges that ascend without gaps.

    `_next` returns the next bytes of the copy, an empty array at its end.
    """

    def __init__(self, reader: ChainReader, number: int) -> None:
        self._reader = reader
        self._number = number
        self._spec = reader.block(number).placed.spec
        self._digester = core.digester()
        self._read_bytes = 0
        self._held: deque[tuple[int, U8]] = deque()  # (first byte, bytes)
        self._made = 0
        self._given = 0

    def pieces(self, begin: int, end: int) -> U64:
        while self._made < end:
            found = self._next()
            assert len(found), "a block gave fewer bytes than its rows have"
            self._held.append((self._made, found))
            self._made += len(found)
        self._given = end
        spans = [
            (raw.ctypes.data + max(0, begin - at), min(end, at + len(raw)) - max(begin, at)) for at, raw in self._held
        ]
        return np.array(spans, dtype=np.uint64).reshape(-1, 2)

    def release(self) -> None:
        while self._held and self._held[0][0] + len(self._held[0][1]) <= self._given:
            self._held.popleft()

    def _next(self) -> U8:
        raise NotImplementedError

    def _read(self, size: int) -> U8:
        """Return the next `size` bytes of the stored block, fewer at its end, where its digest is checked."""
        size = min(size, self._spec.bytes - self._read_bytes)
        window = np.empty(size, dtype=np.uint8)
        if size:
            self._reader.add(self._number, window.ctypes.data, begin=self._read_bytes, bytes=size)
            self._reader.run()
            self._digester.update(window.ctypes.data, size)
            self._read_bytes += size
            if self._read_bytes == self._spec.bytes:
                self._reader.check(self._number, self._digester.end())
        return window


class _WholeBlock(_Stored):
    """All bytes, as they are stored."""

    def _next(self) -> U8:
        return self._read(WINDOW_BYTES)


class _ChosenRows(_Stored):
    """Some rows, in the form in which they are stored."""

    def __init__(self, reader: ChainReader, number: int, rows: I64) -> None:
        super().__init__(reader, number)
        self._rows = rows
        self._row_bytes = max(1, self._spec.bytes // max(1, self._spec.shape[0]))
        self._window_rows = max(1, WINDOW_BYTES // self._row_bytes)

    def _next(self) -> U8:
        """The chosen rows of the next window that has some. Behind the last one the rest of the block is read, too."""
        while self._read_bytes < self._spec.bytes:
            begin = self._read_bytes // self._row_bytes
            window = self._read(self._window_rows * self._row_bytes)
            low, high = np.searchsorted(self._rows, [begin, begin + self._window_rows])
            chosen = self._rows[low:high] - begin
            if len(chosen) and high < len(self._rows):
                return gather(window, chosen, self._row_bytes)
            if len(chosen):
                last = gather(window, chosen, self._row_bytes)
                while self._read_bytes < self._spec.bytes:
                    self._read(WINDOW_BYTES)
                return last
        return np.empty(0, dtype=np.uint8)


class _DecodedRows(_Stored):
    """Some rows of a block that has to be decoded as a whole; blocks that are encoded are small parts."""

    def __init__(self, reader: ChainReader, number: int, rows: I64) -> None:
        super().__init__(reader, number)
        self._rows = rows

    def _next(self) -> U8:
        if self._read_bytes:
            return np.empty(0, dtype=np.uint8)
        raw = _undone(self._read(self._spec.bytes), self._spec, _rows_apart(self._spec))
        return gather(raw, self._rows, raw.nbytes // self._spec.shape[0])


def gather(raw: U8, rows: I64, row_bytes: int) -> U8:
    """Rows of `row_bytes` bytes each, one behind the other."""
    chosen = np.empty(len(rows) * row_bytes, dtype=np.uint8)
    column = np.array([[raw.ctypes.data, chosen.ctypes.data, row_bytes]], dtype=np.uint64)
    core.copy_rows(column, rows, None)
    return chosen
