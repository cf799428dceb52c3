"""Bring blocks to where their rows belong, by way of windows in memory.

For what cannot be read straight into place: rows that are scattered over a table, or of which only some are wanted;
encoded blocks; other devices; strides. Many small blocks share one window, and a large one takes several; each block
is read once, and its digest is taken over all of it. An encoded block is read whole, verified, then decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.encodings import decode
from asyncckpt.model.block import BlockSpec
from asyncckpt.native import PAGE_BYTES, core
from asyncckpt.native.contract import I64, U8, Digester
from asyncckpt.snapshot.block_reader import BlockReader

WINDOW_BYTES = 64 << 20


@dataclass(frozen=True)
class Scatter:
    """A block and where its rows go.

    target: of the block's true dtype, `[..., *row shape]`. rows: the target's row for every wanted row, int64 [n];
    None: row i of the block is row i of the target (a block without dimensions is the target). mine: positions of the
    wanted rows in the block, ascending int64 [n]; None: all.
    """

    number: int
    target: torch.Tensor
    rows: torch.Tensor | None
    mine: I64 | None


@dataclass(frozen=True)
class _Piece:
    """Rows [begin, end) of a block, which lie in `memory`; all of them when the block is encoded."""

    item: Scatter
    spec: BlockSpec
    begin: int
    end: int
    memory: U8


def scatter_all(items: Sequence[Scatter], reader: BlockReader) -> None:
    """Read every block and put its rows in place; CorruptError naming a damaged one."""
    digesters: dict[int, Digester] = {}
    for batch in _batches(items, reader):
        for piece in batch:
            begin = piece.begin * _row_bytes(piece.spec) if piece.begin else 0
            reader.add(piece.item.number, piece.memory.ctypes.data, begin=begin, bytes=piece.memory.nbytes)
        reader.run()  # Verifies the blocks that are read in one piece.
        for piece in batch:
            if reader.verify and piece.memory.nbytes < piece.spec.bytes:
                digester = digesters.setdefault(id(piece.item), core.digester())
                digester.update(piece.memory.ctypes.data, piece.memory.nbytes)
                if piece.end == _rows_count(piece.spec):
                    reader.check(piece.item.number, digester.end())
            _put(piece)


def _batches(items: Sequence[Scatter], reader: BlockReader) -> Iterator[list[_Piece]]:
    """Pieces of the blocks, in their order, as many as fit the window; the memory is used again for the next batch."""
    specs = [reader.block(item.number).placed.spec for item in items]
    wanted = sum(_paged(spec.bytes) for spec in specs)
    window = np.empty(min(WINDOW_BYTES, wanted), dtype=np.uint8)
    batch: list[_Piece] = []
    used = 0
    for item, spec in zip(items, specs, strict=True):
        for begin, end in _ranges(spec):
            size = spec.bytes if spec.encoding else (end - begin) * _row_bytes(spec)
            if batch and used + size > len(window):
                yield batch
                batch, used = [], 0
            # One row, or one encoded block, may be larger than a window.
            memory = window[used : used + size] if size <= len(window) else np.empty(size, dtype=np.uint8)
            batch.append(_Piece(item=item, spec=spec, begin=begin, end=end, memory=memory))
            used += _paged(size)
    if batch:
        yield batch


def _ranges(spec: BlockSpec) -> Iterator[tuple[int, int]]:
    """The rows of a block, window by window; an encoded one has to be read whole."""
    count = _rows_count(spec)
    step = max(1, count if spec.encoding else WINDOW_BYTES // max(1, _row_bytes(spec)))
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)


def _put(piece: _Piece) -> None:
    item = piece.item
    values = _values(piece)
    if item.rows is None:
        (item.target[piece.begin : piece.end] if piece.spec.shape else item.target).copy_(values)
        return
    if item.mine is None:
        positions, rows = None, item.rows[piece.begin : piece.end]
    else:
        low, high = (int(at) for at in np.searchsorted(item.mine, [piece.begin, piece.end]))
        positions, rows = item.mine[low:high] - piece.begin, item.rows[low:high]
    if not len(rows):
        return
    if item.target.is_cpu and item.target.is_contiguous():
        row_bytes = item.target[:1].nbytes
        columns = np.array([[values.data_ptr(), item.target.data_ptr(), row_bytes]], dtype=np.uint64)
        core.copy_rows(columns, positions, np.ascontiguousarray(rows.numpy()))
        return
    if positions is not None:
        values = values[torch.from_numpy(positions)]
    item.target[rows.to(item.target.device)] = values.to(item.target.device)


def _values(piece: _Piece) -> torch.Tensor:
    """The piece's rows as the array they are, contiguous on the CPU; they may share the window's memory."""
    spec = piece.spec
    if spec.encoding:
        return decode(piece.memory, spec)
    dtype = dtype_by_name(spec.dtype, owner=spec.name).dtype
    shape = (piece.end - piece.begin, *spec.shape[1:]) if spec.shape else ()
    return torch.from_numpy(piece.memory).view(dtype).reshape(shape)


def _rows_count(spec: BlockSpec) -> int:
    return spec.shape[0] if spec.shape else 1


def _row_bytes(spec: BlockSpec) -> int:
    """Of a block that is not encoded."""
    return spec.bytes // max(1, _rows_count(spec))


def _paged(bytes: int) -> int:
    return -(-bytes // PAGE_BYTES) * PAGE_BYTES
