"""Write the files of tables that were left open at the cut: window by window, while training goes on.

1. The table says which window comes next: the one for which it keeps most old values.
2. It exports the window into a chunk: rows as they were at the cut. Digests are taken from there.
3. The writer thread writes the chunk to the window's place, having ended the one before.
4. The file is cut to its length, synced and closed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncckpt.errors import SaveCancelledError
from asyncckpt.format.manifest import FileFacts
from asyncckpt.format.names import Attempt
from asyncckpt.native import DIGEST_BYTES, Progress, core
from asyncckpt.options import SaveOptions
from asyncckpt.plan.open_tables import OpenTable, OpenTables
from asyncckpt.shard.drain import file_facts, write_failed
from asyncckpt.shard.target import OpenShard, ShardFiles, write_piece
from asyncckpt.storage.directory import Directory


class WindowSource(Protocol):
    """What an export asks of a table's cut; see `asyncckpt.model.table.OpenCut`."""

    def most_urgent(self, left: Sequence[int]) -> int: ...
    def export(self, index: int, targets: Mapping[str, int]) -> None: ...


def export_tables(
    opened: OpenTables,
    cuts: Sequence[WindowSource],
    *,
    buffers: Sequence[int],
    writer: Executor,
    folder: Directory,
    attempt: Attempt,
    options: SaveOptions,
    progress: Progress,
) -> tuple[tuple[FileFacts, ...], NDArray[np.uint8]]:
    """Write a file per table; returns their facts and the digests of their blocks in plan order (uint8 [n, 16])."""
    facts = []
    digests = np.zeros((len(opened.blocks), DIGEST_BYTES), dtype=np.uint8)
    first = opened.tables[0].blocks.start
    shards = ShardFiles(folder, [table.name for table in opened.tables])
    try:
        for table, cut, shard in zip(opened.tables, cuts, shards.files, strict=True):
            header = table.header.stamp(attempt)
            facts.append(file_facts(table.name, header, file_bytes=table.bytes, attempt=attempt))
            chunks = _Chunks(shard, buffers, writer)
            try:
                chunks.write_header(header)
                left = list(range(len(table.windows)))
                while left:
                    if progress.cancelled:
                        raise SaveCancelledError("the save was cancelled")
                    index = cut.most_urgent(left)
                    left.remove(index)
                    chunks.write_window(table, cut, index, digests[table.blocks.start - first :])
                    progress.advance(table.windows[index].bytes)
            finally:
                chunks.wait()
            os.ftruncate(shard.fd, table.bytes)
            if options.durability == "fsync":
                os.fsync(shard.fd)
            progress.advance(len(header))
    except BaseException as error:
        shards.abandon()
        raise write_failed(error, attempt) from error
    shards.close()
    return tuple(facts), digests


class _Chunks:
    """The two chunk buffers of one file: one is filled while the other is written."""

    def __init__(self, shard: OpenShard, buffers: Sequence[int], writer: Executor) -> None:
        self._shard = shard
        self._buffers = buffers
        self._writer = writer
        self._filled_count = 0
        self._in_flight: Future[None] | None = None

    def write_header(self, header: bytes) -> None:
        address = self._next_buffer()
        raw = np.frombuffer(header, dtype=np.uint8)
        core.copy(np.array([[raw.ctypes.data, address, len(header)]], dtype=np.uint64))
        self._submit(address, len(header), offset=0)

    def write_window(self, table: OpenTable, cut: WindowSource, index: int, digests: NDArray[np.uint8]) -> None:
        """Export and write one window; the digests of the table's blocks go to `digests`, its first block first."""
        window = table.windows[index]
        address = self._next_buffer()
        cut.export(index, {column: address + at for column, _, at in window.blocks})
        ends = [*(at for _, _, at in window.blocks[1:]), window.bytes]
        spans = np.array(
            [(address + at, end - at) for (_, _, at), end in zip(window.blocks, ends, strict=True)], dtype=np.uint64
        )
        numbers = [number - table.blocks.start for _, number, _ in window.blocks]
        digests[numbers] = core.digest(spans)
        self._submit(address, window.bytes, offset=window.offset)

    def wait(self) -> None:
        """Wait for the write in flight; raises its error."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def _next_buffer(self) -> int:
        # The write before last, which was the last one from this buffer, has ended: `_submit` has waited for it.
        self._filled_count += 1
        return self._buffers[self._filled_count % len(self._buffers)]

    def _submit(self, address: int, size: int, *, offset: int) -> None:
        self.wait()
        self._in_flight = self._writer.submit(write_piece, self._shard, address, size, offset=offset)
