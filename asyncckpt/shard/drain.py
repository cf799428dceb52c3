"""Write an arena that holds the image of shard files: headers stamped in, then one native call for all of it.

No gather and no second copy: the arena itself is the source of the O_DIRECT writes, be it in one piece or, for tables,
column by column. Digests are taken beside the writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncckpt.errors import SaveCancelledError
from asyncckpt.format.manifest import FileFacts
from asyncckpt.format.names import Attempt, shard_path
from asyncckpt.native import PAGE_BYTES, U8, CancelledDrain, DrainOptions, FileImage, Progress, core
from asyncckpt.options import SaveOptions
from asyncckpt.plan.image import ImagePlan
from asyncckpt.plan.region_files import RegionFiles
from asyncckpt.shard.target import ShardFiles
from asyncckpt.storage.directory import Directory, io_failed


@dataclass(frozen=True)
class ArenaImage:
    """Shard files in an arena, of which `raw` is all bytes: `plan` from `base` on, and the `regions` of tables."""

    plan: ImagePlan
    base: int
    regions: RegionFiles
    address: int
    raw: U8


def drain_image(
    image: ArenaImage, *, folder: Directory, attempt: Attempt, options: SaveOptions, progress: Progress
) -> tuple[tuple[FileFacts, ...], NDArray[np.uint8]]:
    """Write every file of the image; returns the files' facts and the digests of the blocks (uint8 [blocks, 16]).

    First those of the plan, then those of the regions.
    """
    plan, regions, base = image.plan, image.regions, image.address + image.base
    facts: list[FileFacts] = []
    extents: list[tuple[tuple[int, int], ...]] = []
    headers: list[U8] = []
    for file in plan.files:
        header = file.header.stamp(attempt)
        at = image.base + file.base
        image.raw[at : at + len(header)] = np.frombuffer(header, dtype=np.uint8)
        extents.append(((base + file.base, file.bytes),))
        facts.append(file_facts(file.name, header, file_bytes=file.bytes, attempt=attempt))
    for offset, size in regions.pads:
        image.raw[offset : offset + size] = 0
    for region in regions.files:
        header = region.header.stamp(attempt)
        headers.append(_on_page(header))
        behind = ((image.address + offset, size) for offset, size in region.extents)
        extents.append(((headers[-1].ctypes.data, len(header)), *behind))
        facts.append(file_facts(region.name, header, file_bytes=region.bytes, attempt=attempt))
    offsets = np.concatenate([plan.offsets + base, regions.offsets + image.address])
    spans = np.stack([offsets, np.concatenate([plan.lengths, regions.lengths])], axis=1).astype(np.uint64)
    shards = ShardFiles(folder, [*(file.name for file in plan.files), *(file.name for file in regions.files)])
    try:
        images = [
            FileImage(fd=shard.fd, extents=pieces, direct=shard.direct)
            for shard, pieces in zip(shards.files, extents, strict=True)
        ]
        digests = core.drain(images, np.ascontiguousarray(spans), drain_options(options, len(images)), progress)
    except BaseException as error:
        shards.abandon()
        raise write_failed(error, attempt) from error
    shards.close()
    return tuple(facts), digests


def _on_page(header: bytes) -> U8:
    """The header in memory that begins on a page, as direct writes need."""
    room = np.empty(len(header) + PAGE_BYTES, dtype=np.uint8)
    begin = -int(room.ctypes.data) % PAGE_BYTES
    room[begin : begin + len(header)] = np.frombuffer(header, dtype=np.uint8)
    return room[begin : begin + len(header)]


def write_failed(error: BaseException, attempt: Attempt) -> BaseException:
    """The error of this library for what ended a write; others as they are."""
    if isinstance(error, CancelledDrain):
        return SaveCancelledError(f"save of step {attempt.step} was cancelled")
    if isinstance(error, OSError):
        return io_failed(f"shard files of step {attempt.step} cannot be written", error)
    return error


def drain_options(options: SaveOptions, files_count: int) -> DrainOptions:
    """One writer reaches the limit of one disk; machines with more cores have more disks behind them."""
    writers = max(1, min(options.parallel, files_count, core.cores_count // 4))
    return DrainOptions(writers=writers, digest_threads=writers, sync=options.durability == "fsync")


def file_facts(name: str, header: bytes, *, file_bytes: int, attempt: Attempt) -> FileFacts:
    return FileFacts(
        path=shard_path(attempt, name),
        rank=int(name[1:6]),
        bytes=file_bytes,
        header_bytes=len(header),
        header_digest=xxhash.xxh3_128_digest(header),
    )
