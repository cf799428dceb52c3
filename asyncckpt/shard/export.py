"""Write the files of tables that were deferred at the cut: window by window, while training goes on.

1. The table says which window comes next: the one for which it keeps most old values.
2. It exports the window into a chunk: rows as they were at the cut. Digests are taken from there.
3. The writer thread writes the chunk to the window's place, having ended the one before.
4. The file is cut to its length, synced and closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np

from asyncckpt.format.manifest import FileFacts
from asyncckpt.model.table import DeferredCut
from asyncckpt.native import DIGEST_BYTES, U8, core
from asyncckpt.plan.deferred_tables import DeferredTables, Window
from asyncckpt.shard.stream import FileChunks
from asyncckpt.shard.target import ShardFiles, ShardTarget


def export_tables(
    opened: DeferredTables,
    cuts: Sequence[DeferredCut],
    target: ShardTarget,
    *,
    buffers: Sequence[int],
    writer: Executor,
) -> tuple[tuple[FileFacts, ...], U8]:
    """Write a file per table; returns their facts and the digests of their blocks in manifest order (uint8 [n, 16])."""
    facts = []
    digests = np.zeros((len(opened.blocks), DIGEST_BYTES), dtype=np.uint8)
    with ShardFiles(target, [table.file for table in opened.tables]) as shards:
        for table, cut, shard in zip(opened.tables, cuts, shards, strict=True):
            file = table.file
            header = file.header.stamp(target.attempt)
            facts.append(target.facts(file, header))
            with FileChunks(shard, buffers, writer) as chunks:
                _write_header(header, chunks)
                left = list(range(len(table.windows)))
                while left:
                    target.check_not_cancelled()
                    index = cut.most_urgent(left)
                    left.remove(index)
                    _write_window(table.windows[index], cut, index, digests, chunks)
                    target.progress.advance(table.windows[index].bytes)
            target.end_file(shard, bytes=file.bytes)
            target.progress.advance(len(header))
    return tuple(facts), digests


def _write_header(header: bytes, chunks: FileChunks) -> None:
    address = chunks.next_buffer()
    raw = np.frombuffer(header, dtype=np.uint8)
    core.copy(np.array([[raw.ctypes.data, address, len(header)]], dtype=np.uint64))
    chunks.write(address, len(header), offset=0)


def _write_window(window: Window, cut: DeferredCut, index: int, digests: U8, chunks: FileChunks) -> None:
    """Export and write one window, and take the digests of its blocks."""
    address = chunks.next_buffer()
    cut.export(index, {column: address + at for column, _, at in window.blocks})
    ends = [*(at for _, _, at in window.blocks[1:]), window.bytes]
    spans = [(address + at, end - at) for (_, _, at), end in zip(window.blocks, ends, strict=True)]
    digests[[number for _, number, _ in window.blocks]] = core.digest(np.array(spans, dtype=np.uint64))
    chunks.write(address, window.bytes, offset=window.offset)
