"""The files of one attempt while they are written: created, ended and closed in one place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import xxhash

from asyncckpt import system
from asyncckpt.errors import CheckpointError, SaveCancelledError
from asyncckpt.format.manifest import FileFacts
from asyncckpt.format.names import Attempt, shard_path
from asyncckpt.model.event import NOT_RECORDED, Recorder
from asyncckpt.native import CancelledDrain, Progress, core, paged
from asyncckpt.options import SaveOptions
from asyncckpt.plan.image import FilePlan
from asyncckpt.shard.sent import SentShard
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import Directory, io_failed, set_direct
from asyncckpt.storage.store_folder import StoreFolder
from asyncckpt.storage.written_chunks import WrittenChunks, reopen_file


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
    recorder: Recorder = NOT_RECORDED
    written: WrittenChunks | None = None
    sender: Executor | None = None

    @property
    def is_store(self) -> bool:
        """Whether files are objects, which are written from begin to end."""
        return isinstance(self.folder, StoreFolder)

    def check_not_cancelled(self) -> None:
        uninterrupted.look()
        if self.progress.cancelled:
            raise SaveCancelledError(f"save of step {self.attempt.step} was cancelled")

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
        if isinstance(self.folder, StoreFolder):
            assert self.sender is not None
            return SentShard(self.folder, name, bytes=bytes, sender=self.sender)
        if self.written is not None and self.written.has(self.folder, name):
            fd = reopen_file(self.folder, name)
            return OpenShard(name=name, fd=fd, direct=set_direct(fd))
        fd, direct = self.folder.create_file(name, direct=True)
        return OpenShard(name=name, fd=fd, direct=direct)

    def sound_bytes(self, name: str) -> int:
        """Return how many bytes of a file, from its begin on, were written before and are so still."""
        return 0 if self.written is None else self.written.sound_bytes(self._on_disk, name)

    def read_back(self, name: str, address: int, *, offset: int, bytes: int) -> None:
        """Read what was written before."""
        assert self.written is not None
        self.written.read(self._on_disk, name, address, offset=offset, bytes=bytes)

    def write(self, shard: OpenShard | SentShard, address: int, size: int, *, offset: int) -> None:
        """Write bytes of a file, and note them."""
        shard.write(address, size, offset=offset)
        if self.written is not None:
            self.written.note(self._on_disk, shard.name, address, offset=offset, bytes=size)

    def end_file(self, shard: OpenShard | SentShard, *, bytes: int) -> None:
        """Make a file of this length durable."""
        if isinstance(shard, SentShard):
            with self.recorder.span("sync"):
                shard.end(bytes=bytes)
            return
        os.ftruncate(shard.fd, bytes)
        if self.options.durability == "fsync":
            with self.recorder.span("sync"):
                system.fsync(shard.fd)

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
        self._attempt = target.attempt
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
            raise io_failed(f"shard file {name!r} cannot be closed", first) from first

    def __enter__(self) -> list[OpenShard | SentShard]:
        return self._files

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(CheckpointError):  # The save has failed already, for a better reason.
            self.close()
        if isinstance(error, CancelledDrain):
            raise SaveCancelledError(f"save of step {self._attempt.step} was cancelled") from error
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise io_failed(f"shard files of step {self._attempt.step} cannot be written", error) from error
