"""The files of one attempt while they are written: created, ended and closed in one place.

Where an arena holds their images, headers are stamped in and one native call writes all of it: the arena itself is the
source of the O_DIRECT writes, in one piece or, for tables, column by column, without a second copy. Digests are taken
beside the writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from asyncckpt import system
from asyncckpt.errors import CheckpointError, SaveCancelledError
from asyncckpt.format.head import FileFacts
from asyncckpt.format.names import Attempt, shard_path
from asyncckpt.native import PAGE_BYTES, U8, CancelledDrain, DrainOptions, FileImage, Progress, core, paged
from asyncckpt.options import SaveOptions
from asyncckpt.plan.image import FilePlan, ImagePlan
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import Directory, io_failed, set_direct

if TYPE_CHECKING:
    from asyncckpt.shard.sent import SentShard
    from asyncckpt.storage.store_folder import StoreFolder
    from asyncckpt.storage.written_chunks import WrittenChunks

if TYPE_CHECKING:
    from asyncckpt.model.event import EventName, Recorder

DIGEST_THREADS_MAX = 4  # Beside a trainer on all cores: so many are as fast as the memory of most machines.


@dataclass(frozen=True)
class ShardTarget:
    """Where the shard files of a rank are written to, and how. Cancelling the progress ends the write. recorder: notes
    how long its parts take. written: notes what is written, and knows what was before. sender: uploads objects, where
    the folder is one of a store.
    """

    folder: Directory | StoreFolder
    attempt: Attempt
    options: SaveOptions
    progress: Progress
    recorder: Recorder | None = None
    written: WrittenChunks | None = None
    sender: Executor | None = None

    @property
    def is_store(self) -> bool:
        """Whether files are objects, which are written from begin to end."""
        return not isinstance(self.folder, Directory)

    def check_not_cancelled(self) -> None:
        uninterrupted.look()
        if self.progress.cancelled:
            raise SaveCancelledError(f"save of step {self.attempt.step} was cancelled")

    def note(self, name: EventName, begun: float) -> None:
        """Note a span that ends now, where somebody listens."""
        if self.recorder is not None:
            self.recorder.note(name, begun)

    def facts(self, file: FilePlan, header: bytes) -> FileFacts:
        """Return what the manifest says of a file."""
        return FileFacts(
            path=shard_path(self.attempt, file.name),
            rank=int(file.name[1:6]),
            bytes=file.bytes,
            header_bytes=len(header),
            header_digest=xxhash.xxh3_128_digest(header),
        )

    def open_file(self, name: str, *, bytes: int) -> OpenShard | SentShard:
        """Make a file, or open one that is written in part."""
        if not isinstance(self.folder, Directory):
            from asyncckpt.shard.sent import SentShard  # A save to a disk does not load it.

            assert self.sender is not None
            return SentShard(self.folder, name, bytes=bytes, sender=self.sender)
        if self.written is not None and self.written.has(self.folder, name):
            from asyncckpt.storage.written_chunks import reopen_file  # Of an import that goes on.

            fd = reopen_file(self.folder, name)
            return OpenShard(name=name, fd=fd, direct=set_direct(fd))
        fd, direct = self.folder.create_file(name, direct=True)
        return OpenShard(name=name, fd=fd, direct=direct)

    def sound_bytes(self, name: str) -> int:
        """Return how many bytes of a file, from its start, were written before and are so still."""
        return 0 if self.written is None else self.written.sound_bytes(self._on_disk, name)

    def read_back(self, name: str, address: int, *, offset: int, bytes: int) -> None:
        """Read what was written before."""
        assert self.written is not None
        self.written.read(self._on_disk, name, address, offset=offset, bytes=bytes)

    def write(self, shard: OpenShard | SentShard, address: int, size: int, *, offset: int) -> None:
        """Write bytes of a file, and note them."""
        writing = time.perf_counter()
        shard.write(address, size, offset=offset)
        if self.written is not None:
            self.written.note(self._on_disk, shard.name, address, offset=offset, bytes=size)
        self.note("chunk", writing)

    def end_file(self, shard: OpenShard | SentShard, *, bytes: int) -> None:
        """Make a file of this length durable."""
        syncing = time.perf_counter()
        if not isinstance(shard, OpenShard):
            shard.end(bytes=bytes)
        else:
            os.ftruncate(shard.fd, bytes)
            if self.options.durability != "fsync":
                return
            system.fsync(shard.fd)
        self.note("sync", syncing)

    @property
    def _on_disk(self) -> Directory:
        assert isinstance(self.folder, Directory)
        return self.folder


@dataclass
class OpenShard:
    """A shard file that is written."""

    name: str
    fd: int
    direct: bool

    def write(self, address: int, size: int, *, offset: int) -> None:
        """Write bytes from an address. A direct write ends on a page; `end_file` cuts off what is too much."""
        rounded = paged(size) if self.direct else size
        core.write(self.fd, address, rounded, offset=offset, direct=self.direct)

    def close(self) -> None:
        os.close(self.fd)


class ShardFiles:
    """New files in an attempt's folder, closed in the end; an error is one of this library then."""

    def __init__(self, target: ShardTarget, files: Sequence[FilePlan]) -> None:
        self._attempt, self._folder = target.attempt, target.folder
        self._bytes = sum(file.bytes for file in files)
        self._files: list[OpenShard | SentShard] = []
        try:
            for file in files:
                self._files.append(target.open_file(file.name, bytes=file.bytes))
        except BaseException:
            with contextlib.suppress(CheckpointError):
                self.close()
            raise

    def close(self) -> None:
        """Close all files, then report the first failed close: some file systems report a failed write only here."""
        files, self._files = self._files, []
        failed: list[tuple[str, OSError]] = []
        for file in files:
            try:
                file.close()
            except OSError as error:
                failed.append((file.name, error))
        if failed:
            name, first = failed[0]
            raise io_failed(f"shard file {str(self._folder.path / name)!r} cannot be closed", first) from first

    def __enter__(self) -> list[OpenShard | SentShard]:
        return self._files

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
            return
        opened, held = [file.fd for file in self._files if isinstance(file, OpenShard)], 0
        with contextlib.suppress(OSError):  # A disk that is gone says nothing of them.
            held = sum(512 * getattr(os.fstat(fd), "st_blocks", 0) for fd in opened)
        with contextlib.suppress(CheckpointError):  # The save has failed already, for a better reason.
            self.close()
        if isinstance(error, CancelledDrain):
            raise SaveCancelledError(f"save of step {self._attempt.step} was cancelled") from error
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            run = Path(str(self._folder.path)).parents[1]
            what = f"shard files of step {self._attempt.step} in {str(run)!r} cannot be written"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                with contextlib.suppress(OSError):
                    free = held + shutil.disk_usage(run).free
                    what += f", {self._bytes / 2**20:.1f} MiB wanted and {free / 2**20:.1f} MiB free on the disk"
            raise io_failed(what, error) from error


# -- from an arena -----------------------------------------------------------------------------------------------------


def drain_images(
    images: Sequence[tuple[ImagePlan, int]], arena: U8, target: ShardTarget
) -> tuple[tuple[FileFacts, ...], U8]:
    """Write every file of some images, each with where it begins in the arena.

    Returns the files' facts and the digests of the blocks, with those of their leaves (native.row_begins).
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
    draining = time.perf_counter()
    if not isinstance(target.folder, Directory):
        digests = core.digest(spans, leaves=True)
        _send_all(target.folder, files, extents, target)
        target.note("drain", draining)
        return tuple(facts), digests
    with ShardFiles(target, files) as shards:
        writes = [
            FileImage(fd=shard.fd, extents=tuple(pieces), direct=shard.direct)
            for shard, pieces in zip(shards, extents, strict=True)
            if isinstance(shard, OpenShard)
        ]
        digests = core.drain(writes, spans, drain_options(target.options, len(writes)), target.progress)
        target.note("drain", draining)
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
    from asyncckpt.shard.sent import send_file  # A save to a disk does not load it.

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
