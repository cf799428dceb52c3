"""Read stored blocks beside training, and copy them into the shard files of a new attempt: for compaction, and where
tensors are removed.

Saves and loads of this process go first: they share disk and cores with whatever rewrites a checkpoint, and somebody
waits for them. Before each read, which is of a window, a PatientReader waits while a save or load is in flight. In all
it waits WAIT_S, and WAITS_PER_WORK times as long as it has worked, and no longer, so it also ends where one save
follows the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from asyncckpt.commit.root import WriteRoot
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.format.head import FileFacts
from asyncckpt.format.manifest import Chain
from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.model.source import ByteSource
from asyncckpt.native import I64, U8, Progress, core
from asyncckpt.pipeline.threads import IdleEndingThreads
from asyncckpt.plan.image import ImagePlan, plan_image
from asyncckpt.shard.files import ShardTarget
from asyncckpt.shard.reader import ChainReader
from asyncckpt.shard.stored_rows import stored_source
from asyncckpt.shard.stream import stream_sources
from asyncckpt.signals import STEP_S
from asyncckpt.staging.chunks import Chunks, chunk_bytes
from asyncckpt.staging.limits import spare_bytes


@dataclass(frozen=True)
class BlockCopy:
    """A block of the new checkpoint: `rows` of the stored block `number`; None: all of it, as it is stored."""

    number: int
    rows: I64 | None
    spec: BlockSpec


@dataclass(frozen=True)
class CopiedBlocks:
    """The new shard files of one rank, and where the blocks are in them."""

    files: tuple[FileFacts, ...]
    blocks: Sequence[PlacedBlock]
    digests: U8


def copy_blocks(copies: Sequence[BlockCopy], reader: ChainReader, target: ShardTarget, *, rank: int) -> CopiedBlocks:
    """Write the shard files of one rank. Every stored block is verified on the way: CorruptError."""
    sources = [stored_source(reader, copy.number, copy.rows) for copy in copies]
    return write_blocks([copy.spec for copy in copies], sources, target, rank=rank)


def write_blocks(
    specs: Sequence[BlockSpec], sources: Sequence[ByteSource], target: ShardTarget, *, rank: int
) -> CopiedBlocks:
    """Write blocks into the shard files of one rank."""
    image = plan_image(specs, parallel=target.options.parallel, rank=rank)
    files, digests = write_apart(image, sources, target)
    return CopiedBlocks(files=files, blocks=image.blocks, digests=digests)


def write_apart(
    image: ImagePlan, sources: Sequence[ByteSource], target: ShardTarget
) -> tuple[tuple[FileFacts, ...], U8]:
    """Write the files of an image through buffers of its own: those of saves are held by a save while it lasts."""
    size = chunk_bytes(max(file.bytes for file in image.files), spare=spare_bytes())
    memory = core.map_memory(2 * size)
    try:
        buffers = Chunks((memory.address, memory.address + size), size)
        return stream_sources(image, sources, target, buffers=buffers, writer=IdleEndingThreads("asyncckpt-copy", 1))
    finally:
        memory.close()


WAIT_S = 1.0
WAITS_PER_WORK = 4.0


class PatientReader(ChainReader):
    """Reads with one thread. `cancelled` ends a wait; it does not end a read."""

    def __init__(self, root: WriteRoot, chain: Chain, *, cancelled: Progress) -> None:
        self._cancelled = cancelled
        self._begun = time.monotonic()
        self._waited_s = 0.0
        super().__init__(root.data, chain, threads=1, verify=True, progress=Progress())

    def run(self) -> None:
        self._give_way()
        super().run()

    def _give_way(self) -> None:
        began = time.monotonic()
        worked_s = began - self._begun - self._waited_s
        until = began + WAIT_S + WAITS_PER_WORK * worked_s - self._waited_s
        while not self._cancelled.cancelled and (left_s := until - time.monotonic()) > 0:
            if save_lock.wait_until_free(min(left_s, STEP_S)):
                break
        self._waited_s += time.monotonic() - began
