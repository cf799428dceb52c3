"""Write an arena that holds the image of shard files: headers stamped in, then one native call for all of it.

No gather and no second copy: the arena itself is the source of the O_DIRECT writes, be it in one piece or, for tables,
column by column. Digests are taken beside the writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from asyncckpt.errors import SaveCancelledError
from asyncckpt.format.manifest import FileFacts
from asyncckpt.format.names import Attempt, shard_path
from asyncckpt.native import PAGE_BYTES, U8, CancelledDrain, DrainOptions, FileImage, Progress, core
from asyncckpt.options import SaveOptions
from asyncckpt.plan.image import ImagePlan
from asyncckpt.shard.target import OpenShard, ShardFiles
from asyncckpt.storage.directory import Directory, io_failed


@dataclass(frozen=True)
class ArenaImage:
    """An arena at `address`, of which `raw` is all bytes, and the files it holds: plans, and where each begins."""

    plans: Sequence[tuple[ImagePlan, int]]
    address: int
    raw: U8


def drain_image(
    image: ArenaImage, *, folder: Directory, attempt: Attempt, options: SaveOptions, progress: Progress
) -> tuple[tuple[FileFacts, ...], U8]:
    """Write every file of the image; returns the files' facts and the digests of the blocks (uint8 [blocks, 16])."""
    facts: list[FileFacts] = []
    extents: list[list[tuple[int, int]]] = []
    headers: list[U8] = []
    for plan, base in image.plans:
        for offset, size in plan.pads:
            image.raw[base + offset : base + offset + size] = 0
        for file in plan.files:
            header = file.header.stamp(attempt)
            pieces = [(image.address + base + offset, size) for offset, size in file.extents]
            if file.has_header_room:
                at = base + file.extents[0][0]
                image.raw[at : at + len(header)] = np.frombuffer(header, dtype=np.uint8)
            else:
                headers.append(_on_page(header))
                pieces.insert(0, (headers[-1].ctypes.data, len(header)))
            extents.append(pieces)
            facts.append(file_facts(file.name, header, file_bytes=file.bytes, attempt=attempt))
    places = np.concatenate([plan.offsets + (image.address + base) for plan, base in image.plans])
    lengths = np.concatenate([plan.lengths for plan, _ in image.plans])
    spans = np.ascontiguousarray(np.stack([places, lengths], axis=1).astype(np.uint64))
    with shard_files(folder, [file.name for plan, _ in image.plans for file in plan.files], attempt) as shards:
        images = [
            FileImage(fd=shard.fd, extents=tuple(pieces), direct=shard.direct)
            for shard, pieces in zip(shards, extents, strict=True)
        ]
        digests = core.drain(images, spans, drain_options(options, len(images)), progress)
    return tuple(facts), digests


@contextmanager
def shard_files(folder: Directory, names: Sequence[str], attempt: Attempt) -> Iterator[list[OpenShard]]:
    """New files, closed in the end; an error is one of this library then."""
    shards = ShardFiles(folder, names)
    try:
        yield shards.files
    except BaseException as error:
        shards.abandon()
        raise write_failed(error, attempt) from error
    shards.close()


def end_file(shard: OpenShard, *, bytes: int, options: SaveOptions) -> None:
    """Cut a file to its length, and sync it."""
    os.ftruncate(shard.fd, bytes)
    if options.durability == "fsync":
        os.fsync(shard.fd)


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
