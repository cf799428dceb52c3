"""Write an arena that holds the image of shard files: headers stamped in, then one native call for all of it.

No gather and no second copy: the arena itself is the source of the O_DIRECT writes, be it in one piece or, for tables,
column by column. Digests are taken beside the writes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from asyncckpt.errors import SaveCancelledError
from asyncckpt.format.manifest import FileFacts
from asyncckpt.native import PAGE_BYTES, U8, DrainOptions, FileImage, core
from asyncckpt.options import SaveOptions
from asyncckpt.plan.image import FilePlan, ImagePlan
from asyncckpt.shard.files import OpenShard, ShardFiles, ShardTarget
from asyncckpt.shard.sent import send_file
from asyncckpt.storage.store_folder import StoreFolder

DIGEST_THREADS_MAX = 4  # Beside a trainer on all cores: so many are as fast as the memory of most machines.


def drain_images(
    images: Sequence[tuple[ImagePlan, int]], arena: U8, target: ShardTarget
) -> tuple[tuple[FileFacts, ...], U8]:
    """Write every file of some images, each with where it begins in the arena.

    Returns the files' facts and the digests of the blocks, with those of their leaves (native/digest_rows.py).
    """
    address = int(arena.ctypes.data)
    facts: list[FileFacts] = []
    extents: list[list[tuple[int, int]]] = []
    headers: list[U8] = []
    for plan, base in images:
        for offset, size in plan.pads:
            arena[base + offset : base + offset + size] = 0
        for file in plan.files:
            header = file.header.stamp(target.attempt)
            pieces = [(address + base + offset, size) for offset, size in file.extents]
            if file.has_header_room:
                at = base + file.extents[0][0]
                arena[at : at + len(header)] = np.frombuffer(header, dtype=np.uint8)
            else:
                headers.append(_on_page(header))
                pieces.insert(0, (headers[-1].ctypes.data, len(header)))
            extents.append(pieces)
            facts.append(target.facts(file, header))
    files = [file for plan, _ in images for file in plan.files]
    places = np.concatenate([plan.offsets + (address + base) for plan, base in images])
    lengths = np.concatenate([plan.lengths for plan, _ in images])
    spans = np.ascontiguousarray(np.stack([places, lengths], axis=1).astype(np.uint64))
    if isinstance(target.folder, StoreFolder):
        with target.recorder.span("drain"):
            digests = core.digest(spans, leaves=True)
            _send_all(target.folder, files, extents, target)
        return tuple(facts), digests
    with ShardFiles(target, files) as shards:
        writes = [
            FileImage(fd=shard.fd, extents=tuple(pieces), direct=shard.direct)
            for shard, pieces in zip(shards, extents, strict=True)
            if isinstance(shard, OpenShard)
        ]
        with target.recorder.span("drain"):
            digests = core.drain(writes, spans, drain_options(target.options, len(writes)), target.progress)
    return tuple(facts), digests


def _on_page(header: bytes) -> U8:
    """Return the header in memory that begins on a page, as direct writes need."""
    room = np.empty(len(header) + PAGE_BYTES, dtype=np.uint8)
    begin = -int(room.ctypes.data) % PAGE_BYTES
    room[begin : begin + len(header)] = np.frombuffer(header, dtype=np.uint8)
    return room[begin : begin + len(header)]


def drain_options(options: SaveOptions, files_count: int) -> DrainOptions:
    """Choose the threads. One writer reaches the limit of one disk; machines with more cores have more disks.

    A trainer on all cores waits in each operation for its slowest thread: to take a bit of every core for digests
    costs it less time than to take one core for longer.
    """
    writers = max(1, min(options.parallel, files_count, core.cores_count // 4))
    takes_all = torch.get_num_threads() >= core.cores_count
    digest_threads = max(writers, min(DIGEST_THREADS_MAX, core.cores_count)) if takes_all else writers
    return DrainOptions(writers=writers, digest_threads=digest_threads, sync=options.durability == "fsync")


def _send_all(
    folder: StoreFolder, files: Sequence[FilePlan], extents: Sequence[Sequence[tuple[int, int]]], target: ShardTarget
) -> None:
    """Upload files at once; returns when nothing reads the arena any more, also with the first error."""
    assert target.sender is not None
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise SaveCancelledError("another file of the save could not be uploaded")
        if target.progress.cancelled:
            raise SaveCancelledError(f"save of step {target.attempt.step} was cancelled")

    running: list[Future[None]] = []
    errors: list[BaseException] = []
    try:
        for file, pieces in zip(files, extents, strict=True):
            send = partial(send_file, folder, file.name, pieces, sent=target.progress.advance, check=check)
            running.append(target.sender.submit(send))
    except BaseException as error:
        failed.set()
        errors.append(error)
    for sending in running:
        if (raised := sending.exception()) is not None:
            failed.set()
            errors.append(raised)
    if errors:
        raise errors[0]
