"""The bytes of a block for a new shard file, taken out of a stored one: all of it, or some of its rows.

A stored block is read once, from start to end, window by window. Its digest is taken over what was read and checked
before the last byte that came out of it is given away, so nothing gets into a new file unverified.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.encodings import decode, stored_as
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.source import ByteSource, MadeBytes, as_bytes
from asyncckpt.native import I64, U8, core
from asyncckpt.shard.reader import ChainReader

WINDOW_BYTES = 16 << 20
# Encodings that store every row by itself, so that rows can be taken out of what is stored.
_ROWWISE = ("cast", "quantize")


def copied_spec(spec: BlockSpec, rows: I64 | None) -> BlockSpec:
    """Return what the copy of a block is: `rows` of it, ascending positions; None: all, as it is stored.

    The steps of an encoding that store every row by itself stay, and decoding gives the same bits either way. Doing the
    others again for fewer rows is left to the caller.
    """
    if rows is None:
        return spec
    return _rows_apart(spec).with_rows(len(rows))


def stored_source(reader: ChainReader, number: int, rows: I64 | None) -> ByteSource:
    """Return the bytes of `copied_spec` of a block; CorruptError out of `pieces` when the stored block is damaged."""
    spec = reader.block(number).placed.spec
    size = copied_spec(spec, rows).bytes
    if rows is None:
        return MadeBytes(_windows(reader, number, WINDOW_BYTES), size)
    if _rows_apart(spec) == spec:
        return MadeBytes(_chosen_rows(reader, number, rows), size)
    return MadeBytes(_decoded_rows(reader, number, rows), size)


def plain_source(reader: ChainReader, number: int, rows: I64 | None) -> ByteSource:
    """Return the bytes of a block, or of some of its rows, without any encoding; CorruptError as `stored_source`."""
    spec = reader.block(number).placed.spec
    if not spec.encoding:
        return stored_source(reader, number, rows)
    shape = spec.shape if rows is None else (len(rows), *spec.shape[1:])
    size = math.prod(shape) * dtype_by_name(spec.dtype, owner=spec.name).itemsize
    return MadeBytes(_plain_rows(reader, number, rows), size)


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


def _windows(reader: ChainReader, number: int, window_bytes: int) -> Iterator[U8]:
    """Read a block from start to end. The last window comes when all of it has been checked, by its digest."""
    digester = core.digester() if reader.has_digests else None
    total = reader.block(number).placed.spec.bytes
    for begin in range(0, total, window_bytes):
        window = np.empty(min(window_bytes, total - begin), dtype=np.uint8)
        reader.add(number, window.ctypes.data, begin=begin, bytes=len(window))
        reader.run()
        if digester is not None:
            digester.update(window.ctypes.data, len(window))
        if begin + len(window) == total:
            reader.check(number, b"" if digester is None else digester.end())
        yield window


def _chosen_rows(reader: ChainReader, number: int, rows: I64) -> Iterator[U8]:
    """Return some rows, as they are stored. The last ones are held back until the block has been checked."""
    spec = reader.block(number).placed.spec
    row_bytes = max(1, spec.bytes // max(1, spec.shape[0]))
    window_rows = max(1, WINDOW_BYTES // row_bytes)
    for index, window in enumerate(_windows(reader, number, window_rows * row_bytes)):
        begin = index * window_rows
        low, high = np.searchsorted(rows, [begin, begin + window_rows])
        if low < high:
            found = gather(window, rows[low:high] - begin, row_bytes)
            if high < len(rows):
                yield found
    yield found


def _decoded_rows(reader: ChainReader, number: int, rows: I64) -> Iterator[U8]:
    """Return some rows of a block that has to be decoded as a whole; blocks that are encoded are small parts."""
    spec = reader.block(number).placed.spec
    for stored in _windows(reader, number, spec.bytes):
        raw = _undone(stored, spec, _rows_apart(spec))
        yield gather(raw, rows, raw.nbytes // spec.shape[0])


def _plain_rows(reader: ChainReader, number: int, rows: I64 | None) -> Iterator[U8]:
    spec = reader.block(number).placed.spec
    for stored in _windows(reader, number, max(1, spec.bytes)):
        raw = as_bytes(decode(stored, spec))
        yield raw if rows is None else gather(raw, rows, raw.nbytes // spec.shape[0])


def gather(raw: U8, rows: I64, row_bytes: int) -> U8:
    """Return rows of `row_bytes` bytes each, one after the other."""
    chosen = np.empty(len(rows) * row_bytes, dtype=np.uint8)
    column = np.array([[raw.ctypes.data, chosen.ctypes.data, row_bytes]], dtype=np.uint64)
    core.copy_rows(column, rows, None)
    return chosen
