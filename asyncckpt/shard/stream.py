"""Write shard files chunk by chunk through two buffers: what no arena holds as it is written.

1. Fill a chunk. From sources (a blocking save, or one whose filter changed blocks) it is the next 64 MiB of the file,
   header, then blocks, by one native copy; what of it lies on devices is brought over before, all together.
2. Hand it to the writer thread, which has ended the chunk before by then.
3. Cut the file to its length, sync it, close it.

Digests are taken from the chunk, never from the source, so they always fit the bytes that were written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from asyncckpt.devices.fetch import to_host_all
from asyncckpt.format.manifest import FileFacts
from asyncckpt.model.source import ByteSource, DeviceRows, one_behind_the_other
from asyncckpt.native import DIGEST_BYTES, core
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.plan.image import FilePlan, ImagePlan
from asyncckpt.shard.target import ShardFiles, ShardTarget


@dataclass(frozen=True)
class Chunk:
    """Bytes [offset, offset + bytes) of a file. `fill` puts them at an address."""

    offset: int
    bytes: int
    fill: Callable[[int], None]


def write_chunks(
    files: Sequence[FilePlan],
    chunks_of: Callable[[int, bytes], Iterable[Chunk]],
    target: ShardTarget,
    *,
    buffers: Sequence[int],
    writer: Executor,
) -> tuple[FileFacts, ...]:
    """Write every file from its chunks, in any order: one is filled while the one before is written.

    chunks_of: the chunks of file number i of these, with this header. On the calling thread, but for the writes.
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
                    chunk.fill(address)
                    if running:
                        running.pop().result()
                    running.append(writer.submit(shard.write, address, chunk.bytes, offset=chunk.offset))
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
    buffers: Sequence[int],
    writer: Executor,
) -> tuple[tuple[FileFacts, ...], NDArray[np.uint8]]:
    """Write every file; `sources` and the returned digests (uint8 [blocks, 16]) are in the plan's block order."""
    digests = np.zeros((len(plan.blocks), DIGEST_BYTES), dtype=np.uint8)

    def chunks_of(number: int, header: bytes) -> Iterator[Chunk]:
        file = plan.files[number]
        stream = _FileStream(plan, file, header, sources, digests)
        for begin in range(0, file.bytes, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, file.bytes)
            yield Chunk(begin, end - begin, partial(stream.fill, begin, end))

    return write_chunks(plan.files, chunks_of, target, buffers=buffers, writer=writer), digests


@dataclass(frozen=True)
class _Part:
    """Bytes [begin, end) of the block at a position of the file, which go to an address."""

    position: int
    source: ByteSource
    begin: int
    end: int
    address: int


class _FileStream:
    """The bytes of one file in order, with a digester for the block that the last chunk ended in."""

    def __init__(
        self,
        plan: ImagePlan,
        file: FilePlan,
        header: bytes,
        sources: Sequence[ByteSource],
        digests: NDArray[np.uint8],
    ) -> None:
        self._header = np.frombuffer(header, dtype=np.uint8)
        self._numbers = [number for number in file.blocks if plan.lengths[number] > 0]
        self._begins = [plan.blocks[number].offset for number in self._numbers]
        self._lengths = [int(plan.lengths[number]) for number in self._numbers]
        self._sources = sources
        self._digests = digests
        self._digester = core.digester()
        self._next = 0
        empty = [number for number in file.blocks if plan.lengths[number] == 0]
        self._digests[empty] = np.frombuffer(self._digester.end(), dtype=np.uint8)

    def fill(self, begin: int, end: int, address: int) -> None:
        """Copy file bytes [begin, end) to `address`, and digest them."""
        parts = self._next_parts(begin, end, address)
        _fetch(parts)
        segments: list[NDArray[np.uint64]] = []
        if begin < len(self._header):
            stop = min(end, len(self._header))
            source = self._header.ctypes.data + begin
            segments.append(np.array([[source, address, stop - begin]], dtype=np.uint64))
        segments += [one_behind_the_other(part.source.pieces(part.begin, part.end), part.address) for part in parts]
        core.copy(np.ascontiguousarray(np.concatenate(segments)))
        for part in parts:
            part.source.release()
            self._digester.update(part.address, part.end - part.begin)
            if part.end == self._lengths[part.position]:
                digest = self._digester.end()
                self._digests[self._numbers[part.position]] = np.frombuffer(digest, dtype=np.uint8)

    def _next_parts(self, begin: int, end: int, address: int) -> list[_Part]:
        """What of blocks lies in the file bytes [begin, end), in its order."""
        parts: list[_Part] = []
        while self._next < len(self._numbers) and self._begins[self._next] < end:
            at, length = self._begins[self._next], self._lengths[self._next]
            first, last = max(begin, at), min(end, at + length)
            parts.append(
                _Part(
                    position=self._next,
                    source=self._sources[self._numbers[self._next]],
                    begin=first - at,
                    end=last - at,
                    address=address + first - begin,
                )
            )
            if at + length > end:
                break
            self._next += 1
        return parts


def _fetch(parts: Sequence[_Part]) -> None:
    """Bring what is on devices to the host in one go. DeviceError."""
    sources = [(part.source, part) for part in parts if isinstance(part.source, DeviceRows)]
    values = to_host_all([source.device_slice(part.begin, part.end) for source, part in sources])
    for (source, _), own in zip(sources, values, strict=True):
        source.supply(own)
