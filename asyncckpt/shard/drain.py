"""Write an arena that holds the image of shard files: headers stamped in, then one native call for all of it.

No gather and no second copy: the arena itself is the source of the O_DIRECT writes. Digests are taken beside the
writes.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncckpt.errors import SaveCancelledError
from asyncckpt.format.manifest import FileFacts
from asyncckpt.format.names import Attempt, shard_path
from asyncckpt.native import U8, CancelledDrain, DrainOptions, FileImage, Progress, core
from asyncckpt.options import SaveOptions
from asyncckpt.plan.image import ImagePlan
from asyncckpt.shard.target import ShardFiles
from asyncckpt.storage.directory import Directory, io_failed


def drain_image(
    plan: ImagePlan,
    *,
    address: int,
    image: U8,
    folder: Directory,
    attempt: Attempt,
    options: SaveOptions,
    progress: Progress,
) -> tuple[tuple[FileFacts, ...], NDArray[np.uint8]]:
    """Write every file of the image; returns the files' facts and the digests of the blocks (uint8 [blocks, 16])."""
    facts = []
    for file in plan.files:
        header = file.header.stamp(attempt)
        image[file.base : file.base + len(header)] = np.frombuffer(header, dtype=np.uint8)
        facts.append(file_facts(file.name, header, file_bytes=file.bytes, attempt=attempt))
    spans = np.empty((len(plan.blocks), 2), dtype=np.uint64)
    spans[:, 0] = plan.offsets.astype(np.uint64) + np.uint64(address)
    spans[:, 1] = plan.lengths.astype(np.uint64)
    shards = ShardFiles(folder, [file.name for file in plan.files])
    try:
        images = [
            FileImage(fd=shard.fd, address=address + file.base, bytes=file.bytes, direct=shard.direct)
            for shard, file in zip(shards.files, plan.files, strict=True)
        ]
        digests = core.drain(images, spans, drain_options(options, len(images)), progress)
    except BaseException as error:
        shards.abandon()
        raise write_failed(error, attempt) from error
    shards.close()
    return tuple(facts), digests


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
