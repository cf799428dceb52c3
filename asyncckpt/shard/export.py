"""Write the files of tables that were left open at the cut: window by window, while training goes on.

1. The table says which window comes next: the one for which it keeps most old values.
2. It exports the window into a chunk: rows as they were at the cut. Digests are taken from there.
3. The writer thread writes the chunk to the window's place, having ended the one before.
4. The file is cut to its length, synced and closed.
"""

from __future__ import annotations

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
from asyncckpt.plan.open_tables import OpenTables, Window
from asyncckpt.shard.drain import end_file, file_facts, shard_files
from asyncckpt.shard.target import OpenShard, write_piece
from asyncckpt.storage.directory import Directory


class WindowExporter(Protocol):
    """What an export asks of a table's cut; see `asyncckpt.model.table.OpenCut`."""

    def most_urgent(self, left: Sequence[int]) -> int: ...
    def export(self, index: int, targets: Mapping[str, int]) -> None: ...


def export_tables(
    opened: OpenTables,
    cuts: Sequence[WindowExporter],
    *,
    buffers: Sequence[int],
    writer: Executor,
    folder: Directory,
    attempt: Attempt,
    options: SaveOptions,
    progress: Progress,
) -> tuple[tuple[FileFacts, ...], NDArray[np.uint8]]:
    """Write a file per table; returns their facts and the digests of their blocks in manifest order (uint8 [n, 16])."""
    facts = []
    digests = np.zeros((len(opened.blocks), DIGEST_BYTES), dtype=np.uint8)
    with shard_files(folder, [table.file.name for table in opened.tables], attempt) as shards:
        for table, cut, shard in zip(opened.tables, cuts, shards, strict=True):
            file = table.file
            header = file.header.stamp(attempt)
            facts.append(file_facts(file.name, header, file_bytes=file.bytes, attempt=attempt))
            chunks = _Chunks(shard, buffers, writer)
            try:
                chunks.write_header(header)
                left = list(range(len(table.windows)))
                while left:
                    if progress.cancelled:
                        raise SaveCancelledError("the save was cancelled")
                    index = cut.most_urgent(left)
                    left.remove(index)
                    chunks.write_window(table.windows[index], cut, index, digests)
                    progress.advance(table.windows[index].bytes)
            finally:
                chunks.wait()
            end_file(shard, bytes=file.bytes, options=options)
            progress.advance(len(header))
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

    def write_window(self, window: Window, cut: WindowExporter, index: int, digests: NDArray[np.uint8]) -> None:
        """Export and write one window, and take the digests of its blocks."""
        address = self._next_buffer()
        cut.export(index, {column: address + at for column, _, at in window.blocks})
        ends = [*(at for _, _, at in window.blocks[1:]), window.bytes]
        spans = np.array(
            [(address + at, end - at) for (_, _, at), end in zip(window.blocks, ends, strict=True)], dtype=np.uint64
        )
        digests[[number for _, number, _ in window.blocks]] = core.digest(spans)
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
