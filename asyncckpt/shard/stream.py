"""Write shard files chunk by chunk through two buffers: what no arena holds as it is written.

1. Fill a chunk. From sources (a blocking save, or one whose filter changed blocks) it is the next 64 MiB of the file,
   header, then blocks, by one native copy; what of it lies on devices is brought over before, all together.
   A table that was deferred at the cut says which window comes next, the one for which it keeps most old values, and
   exports it with the rows as they were at the cut, while training goes on. An object gets its windows in their order.
2. Hand it to the writer thread, which has ended the chunk before by then.
3. Cut the file to its length, sync it, close it.

Of files that were written in part before (storage/written_chunks.py), chunks are read back that are there, and not
written again.

Digests are taken from the chunk, never from the source, so they always fit the bytes that were written.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from asyncckpt.devices.fetch import to_host_all
from asyncckpt.format.head import FileFacts
from asyncckpt.model.source import ByteSource, DeviceRows, RestartingSource, one_behind_the_other
from asyncckpt.model.table import DeferredCut
from asyncckpt.native import DIGEST_BYTES, I64, U8, core, row_begins
from asyncckpt.plan.deferred_tables import DeferredTables, Window
from asyncckpt.plan.image import FilePlan, ImagePlan
from asyncckpt.shard.files import ShardFiles, ShardTarget
from asyncckpt.staging.chunks import Chunks


@dataclass(frozen=True)
class Chunk:
    """Bytes [offset, offset + bytes) of a file. `fill` puts them at an address. is_written: they are there already, as
    all chunks before them."""

    offset: int
    bytes: int
    fill: Callable[[int], None]
    is_written: bool = False


def write_chunks(
    files: Sequence[FilePlan],
    chunks_of: Callable[[int, bytes], Iterable[Chunk]],
    target: ShardTarget,
    *,
    buffers: Sequence[int],
    writer: Executor,
) -> tuple[FileFacts, ...]:
    """Write every file from its chunks, in any order: one is filled while the one before is written.

    chunks_of: the chunks of file number i of these, with this header. On the calling thread, except the writes.
    """
    facts = []
    with ShardFiles(target, files) as shards:
        for number, (shard, file) in enumerate(zip(shards, files, strict=True)):
            header = file.header.stamp(target.attempt)
            facts.append(target.facts(file, header))
            running: list[Future[None]] = []
            try:
                for chunk, address in zip(chunks_of(number, header), itertools.cycle(buffers), strict=False):
                    target.check_not_cancelled()
                    filling = time.perf_counter()
                    chunk.fill(address)
                    target.note("fill", filling)
                    if running:
                        running.pop().result()
                    if not chunk.is_written:
                        running.append(writer.submit(target.write, shard, address, chunk.bytes, offset=chunk.offset))
                    target.progress.advance(chunk.bytes)
            finally:  # Nobody else may use the buffers while one is written.
                if running:
                    running.pop().result()
            target.end_file(shard, bytes=file.bytes)
    return tuple(facts)


def stream_sources(
    plan: ImagePlan,
    sources: Sequence[ByteSource],
    target: ShardTarget,
    *,
    buffers: Chunks,
    writer: Executor,
) -> tuple[tuple[FileFacts, ...], U8]:
    """Write every file; `sources` and the returned digests (native.row_begins) are in the plan's block order."""
    digests = _Digests(plan.lengths)

    def chunks_of(number: int, header: bytes) -> Iterator[Chunk]:
        file = plan.files[number]
        stream = _FileStream(plan, file, header, sources, digests, target)
        for begin in range(0, file.bytes, buffers.bytes):
            end = min(begin + buffers.bytes, file.bytes)
            yield Chunk(begin, end - begin, partial(stream.fill, begin, end), is_written=end <= stream.reused_bytes)

    return write_chunks(plan.files, chunks_of, target, buffers=buffers.addresses, writer=writer), digests.rows


class _Digests:
    """The digests of blocks of these bytes, as they come."""

    def __init__(self, bytes: I64) -> None:
        self._begins = row_begins(bytes)
        self.rows = np.zeros((int(self._begins[-1]), DIGEST_BYTES), dtype=np.uint8)

    def put(self, numbers: Sequence[int], rows: U8) -> None:
        """Set those of some blocks, one after the other."""
        places = [np.arange(self._begins[number], self._begins[number + 1]) for number in numbers]
        self.rows[np.concatenate(places)] = rows


class _FileStream:
    """The bytes of one file in order, with a digester for the block that the last chunk ended in.

    The first `reused_bytes` were written before, and are read back. They end with a block, or where the source of one
    can begin: what is checked when a source ends is checked of all of it.
    """

    def __init__(
        self,
        plan: ImagePlan,
        file: FilePlan,
        header: bytes,
        sources: Sequence[ByteSource],
        digests: _Digests,
        target: ShardTarget,
    ) -> None:
        self._name, self._target = file.name, target
        self._header = np.frombuffer(header, dtype=np.uint8)
        self._numbers = [number for number in file.blocks if plan.lengths[number] > 0]
        self._begins = [plan.blocks[number].offset for number in self._numbers]
        self._ends = [plan.blocks[number].offset + int(plan.lengths[number]) for number in self._numbers]
        self._sources = sources
        self._digests = digests
        self._digester = core.digester()
        nothing = self._digester.end_rows()
        for number in file.blocks:
            if plan.lengths[number] == 0:
                self._digests.put([number], nothing)
        self.reused_bytes = self._reusable(min(target.sound_bytes(file.name), file.bytes))
        if target.written is not None:
            target.written.reused_bytes += self.reused_bytes

    def _reusable(self, sound: int) -> int:
        if sound < len(self._header):
            return 0
        at = bisect_right(self._ends, sound)
        if at == len(self._ends) or self._begins[at] >= sound:
            return sound
        source, begin = self._sources[self._numbers[at]], self._begins[at]
        return begin + (source.restart(sound - begin) if isinstance(source, RestartingSource) else 0)

    def fill(self, begin: int, end: int, address: int) -> None:
        """Put file bytes [begin, end) at `address`, and digest them."""
        first = min(max(begin, self.reused_bytes), end)  # From here on out of the sources.
        if begin < first:
            self._target.read_back(self._name, address, offset=begin, bytes=first - begin)
        parts = [self._part(position, first, end) for position in self._between(first, end)]
        _fetch(parts)
        segments: list[NDArray[np.uint64]] = [np.empty((0, 3), dtype=np.uint64)]
        if first < len(self._header):
            stop = min(end, len(self._header))
            source = self._header.ctypes.data + first
            segments.append(np.array([[source, address, stop - first]], dtype=np.uint64))
        segments += [one_behind_the_other(part.pieces(), address + part.offset - begin) for part in parts]
        core.copy(np.ascontiguousarray(np.concatenate(segments)))
        for part in parts:
            part.source.release()
        for position in self._between(begin, end):
            at, stop = max(begin, self._begins[position]), min(end, self._ends[position])
            self._digester.update(address + at - begin, stop - at)
            if stop == self._ends[position]:
                self._digests.put([self._numbers[position]], self._digester.end_rows())

    def _between(self, begin: int, end: int) -> range:
        """Return the positions of the blocks that have bytes in [begin, end)."""
        return range(bisect_right(self._ends, begin), bisect_left(self._begins, end)) if begin < end else range(0)

    def _part(self, position: int, begin: int, end: int) -> _Part:
        at = self._begins[position]
        first, last = max(begin, at), min(end, self._ends[position])
        return _Part(self._sources[self._numbers[position]], begin=first - at, end=last - at, offset=first)


@dataclass(frozen=True)
class _Part:
    """Bytes [begin, end) of a block; they are at `offset` of the file."""

    source: ByteSource
    begin: int
    end: int
    offset: int

    def pieces(self) -> NDArray[np.uint64]:
        return self.source.pieces(self.begin, self.end)


def _fetch(parts: Sequence[_Part]) -> None:
    """Bring what is on devices to the host in one go. DeviceError."""
    sources = [(part.source, part) for part in parts if isinstance(part.source, DeviceRows)]
    values = to_host_all([source.device_slice(part.begin, part.end) for source, part in sources])
    for (source, _), own in zip(sources, values, strict=True):
        source.supply(own)


def export_tables(
    opened: DeferredTables,
    cuts: Sequence[DeferredCut],
    target: ShardTarget,
    *,
    buffers: Sequence[int],
    writer: Executor,
) -> tuple[tuple[FileFacts, ...], U8]:
    """Write a file per table; return their facts and the digests (native.row_begins) of their blocks in manifest
    order."""
    digests = _Digests(np.array([block.spec.bytes for block in opened.blocks], dtype=np.int64))

    def chunks_of(number: int, header: bytes) -> Iterator[Chunk]:
        yield Chunk(0, len(header), partial(_copy_header, header))
        cut, windows = cuts[number], opened.tables[number].windows
        left = list(range(len(windows)))
        while left:
            index = left[0] if target.is_store else cut.most_urgent(left)
            left.remove(index)
            window = windows[index]
            yield Chunk(window.offset, window.bytes, partial(_export_window, window, cut, index, digests))

    files = [table.file for table in opened.tables]
    return write_chunks(files, chunks_of, target, buffers=buffers, writer=writer), digests.rows


def _copy_header(header: bytes, address: int) -> None:
    raw = np.frombuffer(header, dtype=np.uint8)
    core.copy(np.array([[raw.ctypes.data, address, len(header)]], dtype=np.uint64))


def _export_window(window: Window, cut: DeferredCut, index: int, digests: _Digests, address: int) -> None:
    """Export one window, and take the digests of its blocks."""
    cut.export(index, {column: address + at for column, _, at in window.blocks})
    ends = [*(at for _, _, at in window.blocks[1:]), window.bytes]
    spans = [(address + at, end - at) for (_, _, at), end in zip(window.blocks, ends, strict=True)]
    numbers = [number for _, number, _ in window.blocks]
    digests.put(numbers, core.digest(np.array(spans, dtype=np.uint64), leaves=True))
