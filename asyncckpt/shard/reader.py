"""Read shard files of one checkpoint: everything about them is checked before a byte of data is used.

All files are opened first, so that a checkpoint that retention removes meanwhile stays readable to its end. Reading
goes by descriptor, never by mmap: a file truncated under an mmap would kill the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncckpt.errors import CorruptError, NotFoundError, SaveCancelledError
from asyncckpt.format.header import HeaderEntry, decode_header, header_length
from asyncckpt.format.manifest import BlockFacts, FileFacts, Manifest
from asyncckpt.format.names import split_shard_path
from asyncckpt.format.strict_json import looks_like
from asyncckpt.native import CancelledDrain, Progress, ShortFile, core
from asyncckpt.storage.directory import Directory, io_failed, set_direct

_SNIFFED_BYTES = 512  # The length of a header, and enough to tell what else a file may be.


@dataclass(frozen=True)
class BlockRead:
    """Bytes [begin, begin + bytes) of a block, to be read to `address`. Digests are checked for whole blocks only."""

    number: int
    address: int
    begin: int
    bytes: int


class ShardReader:
    """The open files of one checkpoint."""

    def __init__(self, data: Directory, manifest: Manifest, *, threads: int, verify: bool, progress: Progress) -> None:
        self._manifest = manifest
        self._threads = threads
        self.verify = verify
        self._progress = progress
        self._queue: list[BlockRead] = []
        self.bytes_read = 0
        self._checked: set[int] = set()
        self._fds: list[int] = []
        self._direct: list[bool] = []
        try:
            for file in manifest.head.files:
                self._open(data, file)
            self._check_headers()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, number: int, address: int, *, begin: int, bytes: int) -> None:
        """Queue a read; the memory at `address` must live until `run` returns."""
        self._queue.append(BlockRead(number=number, address=address, begin=begin, bytes=bytes))

    def run(self) -> None:
        """Do all queued reads; CorruptError naming the block when the digest of a whole one is wrong."""
        reads, self._queue = self._queue, []
        if not reads:
            return
        items = np.empty((len(reads), 3), dtype=np.uint64)
        fds = np.empty(len(reads), dtype=np.int32)
        direct = np.empty(len(reads), dtype=np.int32)
        for index, read in enumerate(reads):
            placed = self._manifest.blocks[read.number].placed
            items[index] = (read.address, placed.offset + read.begin, read.bytes)
            fds[index] = self._fds[placed.file_index]
            direct[index] = self._direct[placed.file_index]
        step = self._manifest.step
        try:
            digests = core.read(
                items, fds, direct=direct, digests=self.verify, threads=self._threads, progress=self._progress
            )
        except ShortFile as error:
            raise CorruptError(f"a shard file of step {step} ended while it was read: {error}") from error
        except CancelledDrain as error:
            raise SaveCancelledError(f"load of step {step} was cancelled") from error
        except OSError as error:
            raise io_failed(f"shard files of step {step} cannot be read", error) from error
        self.bytes_read += int(items[:, 2].sum())
        if digests is not None:
            self._check_digests(reads, digests)

    @property
    def has_checked_all(self) -> bool:
        """Whether every block that holds bytes was read in full and found sound."""
        blocks = enumerate(self._manifest.blocks)
        return all(number in self._checked for number, block in blocks if block.placed.spec.bytes)

    def block(self, number: int) -> BlockFacts:
        return self._manifest.blocks[number]

    def _open(self, data: Directory, file: FileFacts) -> None:
        folder, name = split_shard_path(file.path, owner=f"manifest of step {self._manifest.step}")
        try:
            with data.child(folder) as directory:
                fd = directory.open_file(name)
        except NotFoundError as error:
            raise CorruptError(
                f"shard file {file.path!r} of rank {file.rank} of step {self._manifest.step} is missing"
            ) from error
        self._fds.append(fd)
        size = os.fstat(fd).st_size
        if size != file.bytes:
            raise CorruptError(
                f"shard file {file.path!r} of step {self._manifest.step} has the wrong size",
                found=size,
                expected=file.bytes,
                hint=_what_it_is(fd),
            )

    def _check_headers(self) -> None:
        """Each file's header is the one that was written, and tells the same places as the manifest."""
        by_file: list[dict[str, BlockFacts]] = [{} for _ in self._fds]
        for block in self._manifest.blocks:
            by_file[block.placed.file_index][block.placed.key] = block
        for fd, file, blocks in zip(self._fds, self._manifest.head.files, by_file, strict=True):
            self._check_header(fd, file, blocks)
            self._direct.append(set_direct(fd))

    def _check_header(self, fd: int, file: FileFacts, blocks: dict[str, BlockFacts]) -> None:
        owner = f"shard file {file.path!r} of step {self._manifest.step}"
        try:
            length = header_length(_read_begin(fd, _SNIFFED_BYTES), file_bytes=file.bytes, owner=owner)
            raw = b"" if length != file.header_bytes else _read_begin(fd, length)
        except OSError as error:
            raise io_failed(f"{owner} cannot be read", error) from error
        found = xxhash.xxh3_128_digest(raw)
        if found != file.header_digest:
            raise CorruptError(
                f"{owner} is corrupt: its header has another digest",
                found=found.hex(),
                expected=file.header_digest.hex(),
            )
        header = decode_header(raw, file_bytes=file.bytes, owner=owner)
        if header.attempt != self._manifest.head.attempt:
            raise CorruptError(
                f"{owner} belongs to another save (mixed steps)",
                found=header.attempt,
                expected=self._manifest.head.attempt,
            )
        places = {key: (entry.offset, entry.bytes, entry.dtype, entry.shape) for key, entry in header.entries.items()}
        listed = {key: _place(block, header.entries.get(key)) for key, block in blocks.items()}
        if places != listed:
            differing = sorted(key for key in places.keys() | listed.keys() if places.get(key) != listed.get(key))
            raise CorruptError(f"{owner} and the manifest disagree on blocks", found=differing[:5])

    def _check_digests(self, reads: Sequence[BlockRead], digests: NDArray[np.uint8]) -> None:
        for read, digest in zip(reads, digests, strict=True):
            if read.bytes == self.block(read.number).placed.spec.bytes:
                self.check(read.number, digest.tobytes())

    def check(self, number: int, digest: bytes) -> None:
        """CorruptError when a block's bytes are not those that were written."""
        block = self._manifest.blocks[number]
        if digest == block.digest:
            self._checked.add(number)
            return
        file = self._manifest.head.files[block.placed.file_index]
        raise CorruptError(
            f"shard file {file.path!r} of step {self._manifest.step} is corrupt: block {block.placed.spec.name!r} at "
            f"offset {block.placed.offset} has another digest",
            found=digest.hex(),
            expected=block.digest.hex(),
            hint="targets of a load may hold parts of this damaged step: load another one before using them",
        )


def _place(block: BlockFacts, entry: HeaderEntry | None) -> tuple[object, ...]:
    """Where the manifest has a block, and as what; of a dtype that is unknown here, the header's word is taken."""
    spec = block.placed.spec
    if entry is not None and not spec.is_known:
        return (block.placed.offset, spec.bytes, entry.dtype, entry.shape)
    return (block.placed.offset, spec.bytes, spec.stored_dtype, spec.stored_shape)


def _read_begin(fd: int, bytes: int) -> bytes:
    """The first bytes of a file, fewer only where it ends: one read may give less than there is."""
    raw = b""
    while len(raw) < bytes and (part := os.pread(fd, bytes - len(raw), len(raw))):
        raw += part
    return raw


def _what_it_is(fd: int) -> str | None:
    """What a file that is no shard looks like."""
    with contextlib.suppress(OSError):
        return looks_like(os.pread(fd, _SNIFFED_BYTES, 0))
    return None
