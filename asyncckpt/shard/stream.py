"""Write shard files from sources, chunk by chunk through two buffers: a blocking save, or one whose filter changed
blocks.

1. Fill a chunk with the next 64 MiB of the file (header, then blocks) by one native copy; update the blocks' digests
   from it. What of it lies on devices is brought over before, all together.
2. Hand it to the writer thread, which has ended the chunk before last by then.
3. Cut the file to its length, sync it, close it.

Digests are taken from the chunk, never from the source, so they always fit the bytes that were written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncckpt.devices.fetch import to_host_all
from asyncckpt.format.manifest import FileFacts
from asyncckpt.model.abilities import is_on_device
from asyncckpt.model.source import ByteSource
from asyncckpt.native import DIGEST_BYTES, core
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.plan.image import FilePlan, ImagePlan
from asyncckpt.shard.target import OpenShard, ShardFiles, ShardTarget


def stream_sources(
    plan: ImagePlan,
    sources: Sequence[ByteSource],
    target: ShardTarget,
    *,
    buffers: Sequence[int],
    writer: Executor,
) -> tuple[tuple[FileFacts, ...], NDArray[np.uint8]]:
    """Write every file; `sources` and the returned digests (uint8 [blocks, 16]) are in the plan's block order."""
    facts = []
    digests = np.zeros((len(plan.blocks), DIGEST_BYTES), dtype=np.uint8)
    with ShardFiles(target, plan.files) as shards:
        for shard, file in zip(shards, plan.files, strict=True):
            header = file.header.stamp(target.attempt)
            facts.append(target.facts(file, header))
            stream = _FileStream(plan, file, header, sources, digests)
            with FileChunks(shard, buffers, writer) as chunks:
                for begin in range(0, file.bytes, CHUNK_BYTES):
                    target.check_not_cancelled()
                    end = min(begin + CHUNK_BYTES, file.bytes)
                    address = chunks.next_buffer()
                    stream.fill(begin, end, address)
                    chunks.write(address, end - begin, offset=begin)
                    target.progress.advance(end - begin)
            target.end_file(shard, bytes=file.bytes)
    return tuple(facts), digests


class FileChunks:
    """The chunk buffers of one file while it is written: one is filled while the one before is written."""

    def __init__(self, shard: OpenShard, buffers: Sequence[int], writer: Executor) -> None:
        self._shard = shard
        self._buffers = itertools.cycle(buffers)
        self._writer = writer
        self._in_flight: Future[None] | None = None

    def next_buffer(self) -> int:
        """The address of a free buffer: the write before last, which was the last one from it, has ended."""
        return next(self._buffers)

    def write(self, address: int, size: int, *, offset: int) -> None:
        """Begin to write a buffer, when the write before has ended; raises its error."""
        self._wait()
        self._in_flight = self._writer.submit(self._shard.write, address, size, offset=offset)

    def _wait(self) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def __enter__(self) -> FileChunks:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()


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
        segments += [_segments(part.source.pieces(part.begin, part.end), part.address) for part in parts]
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
    sources = [(part.source, part) for part in parts if is_on_device(part.source)]
    values = to_host_all([source.device_slice(part.begin, part.end) for source, part in sources])
    for (source, _), own in zip(sources, values, strict=True):
        source.supply(own)


def _segments(pieces: NDArray[np.uint64], target: int) -> NDArray[np.uint64]:
    """(source, target, bytes) of pieces that land one behind the other."""
    ends = np.cumsum(pieces[:, 1])
    result = np.empty((len(pieces), 3), dtype=np.uint64)
    result[:, 0] = pieces[:, 0]
    result[:, 1] = ends - pieces[:, 1] + np.uint64(target)
    result[:, 2] = pieces[:, 1]
    return result
