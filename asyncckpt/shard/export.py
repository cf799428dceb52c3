"""Write the files of tables that were deferred at the cut: window by window, while training goes on.

1. The table says which window comes next: the one for which it keeps most old values.
2. It exports the window into a chunk: rows as they were at the cut. Digests are taken from there.
3. The writer thread writes the chunk to the window's place, having ended the one before.
4. The file is cut to its length, synced and closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np

from asyncckpt.format.manifest import FileFacts
from asyncckpt.model.table import DeferredCut
from asyncckpt.native import DIGEST_BYTES, U8, core
from asyncckpt.plan.deferred_tables import DeferredTables, Window
from asyncckpt.shard.stream import Chunk, write_chunks
from asyncckpt.shard.target import ShardTarget


def export_tables(
    opened: DeferredTables,
    cuts: Sequence[DeferredCut],
    target: ShardTarget,
    *,
    buffers: Sequence[int],
    writer: Executor,
) -> tuple[tuple[FileFacts, ...], U8]:
    """Write a file per table; returns their facts and the digests of their blocks in manifest order (uint8 [n, 16])."""
    digests = np.zeros((len(opened.blocks), DIGEST_BYTES), dtype=np.uint8)

    def chunks_of(number: int, header: bytes) -> Iterator[Chunk]:
        yield Chunk(0, len(header), partial(_copy_header, header))
        cut, windows = cuts[number], opened.tables[number].windows
        left = list(range(len(windows)))
        while left:
            index = cut.most_urgent(left)
            left.remove(index)
            window = windows[index]
            yield Chunk(window.offset, window.bytes, partial(_export_window, window, cut, index, digests))

    files = [table.file for table in opened.tables]
    return write_chunks(files, chunks_of, target, buffers=buffers, writer=writer), digests


def _copy_header(header: bytes, address: int) -> None:
    raw = np.frombuffer(header, dtype=np.uint8)
    core.copy(np.array([[raw.ctypes.data, address, len(header)]], dtype=np.uint64))


def _export_window(window: Window, cut: DeferredCut, index: int, digests: U8, address: int) -> None:
    """Export one window, and take the digests of its blocks."""
    cut.export(index, {column: address + at for column, _, at in window.blocks})
    ends = [*(at for _, _, at in window.blocks[1:]), window.bytes]
    spans = [(address + at, end - at) for (_, _, at), end in zip(window.blocks, ends, strict=True)]
    digests[[number for _, number, _ in window.blocks]] = core.digest(np.array(spans, dtype=np.uint64))
