"""Read the shard files of one checkpoint: a full one, or a delta and its bases.

All files are opened first, and everything about them is checked before a byte of data is used: each header is the one
that was written, and says the same as the manifest. They are opened by descriptor, never mapped: a file truncated under
an mmap would kill the process. And all at once, so that a checkpoint that retention removes meanwhile stays readable to
its end. Those in an object store are looked at instead, and read by ranges (store_files.py).

Blocks are numbered through the manifests of the chain; what is queued is read in one parallel call, whichever
checkpoints it lies in.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import xxhash

from asyncckpt import system
from asyncckpt.errors import CorruptError, NotFoundError, SaveCancelledError, Words
from asyncckpt.format.head import FileFacts
from asyncckpt.format.manifest import BlockFacts, Chain, HeaderEntry, Manifest, decode_header, header_length
from asyncckpt.format.names import split_shard_path
from asyncckpt.format.strict_json import looks_like
from asyncckpt.native import CancelledDrain, Progress, Reads, ShortFile, core
from asyncckpt.shard.store_files import StoreReader
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import Directory, io_failed, set_direct
from asyncckpt.storage.folder import ReadFolder
from asyncckpt.storage.store_folder import StoreFolder

if TYPE_CHECKING:
    import torch

READ_THREADS = 4  # Keep one disk busy.
NOT_OPEN = -1
_SNIFFED_BYTES = 512  # The length of a header, and enough to see what else a file may be.


def read_threads(parallel: int) -> int:
    """Return how many threads read, at most, for who asks for `parallel`: where there are more cores there are more
    disks. The core starts no more than it has reads of 4 MiB, and no more than 16."""
    return min(parallel, max(READ_THREADS, core.cores_count))


class FilesOfManifest(Protocol):
    """The files of one manifest, in its order: descriptors (in a store: numbers), and which are read directly."""

    @property
    def fds(self) -> Sequence[int]: ...
    @property
    def direct(self) -> Sequence[bool]: ...
    def close(self) -> None: ...


class OpenFiles:
    """The open shard files of one manifest on a disk: `fds` in its order, and whether each is open for direct reads.

    wanted: numbers of the files to open; None: all. The other ones have no descriptor.
    """

    def __init__(self, data: Directory, manifest: Manifest, *, wanted: Collection[int] | None = None) -> None:
        self._manifest, self._place = manifest, data.path.parent
        self.fds: list[int] = []
        self.direct: list[bool] = []
        try:
            for number, file in enumerate(manifest.head.files):
                if wanted is None or number in wanted:
                    self._open(data, file)
                else:
                    self.fds.append(NOT_OPEN)
            self._check_headers()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        fds, self.fds = self.fds, []
        for fd in fds:
            with contextlib.suppress(OSError):
                if fd != NOT_OPEN:
                    os.close(fd)

    def _open(self, data: Directory, file: FileFacts) -> None:
        folder, name = split_shard_path(file.path, owner=f"manifest of step {self._manifest.step}")
        try:
            with data.child(folder) as directory:
                fd = directory.open_file(name)
        except NotFoundError as error:
            raise CorruptError(
                f"shard file {file.path!r} of rank {file.rank} of step {self._manifest.step} is missing"
            ) from error
        self.fds.append(fd)
        try:
            size = os.fstat(fd).st_size
        except OSError as error:
            raise io_failed(f"shard file {str(data.path.parent / file.path)!r} cannot be looked at", error) from error
        if size != file.bytes:
            raise CorruptError(
                f"shard file {file.path!r} of step {self._manifest.step} has the wrong size",
                found=size,
                expected=file.bytes,
                hint=_what_it_is(fd),
            )

    def _check_headers(self) -> None:
        """Check that each file's header is the one that was written, with the same places as the manifest."""
        for fd, file, blocks in zip(self.fds, self._manifest.head.files, blocks_by_file(self._manifest), strict=True):
            if fd != NOT_OPEN:
                self._check_header(fd, file, blocks)
            self.direct.append(fd != NOT_OPEN and set_direct(fd))

    def _check_header(self, fd: int, file: FileFacts, blocks: dict[str, BlockFacts]) -> None:
        owner = owner_of(file, self._manifest)
        try:
            length = header_length(_read_begin(fd, _SNIFFED_BYTES), file_bytes=file.bytes, owner=owner)
            raw = b"" if length != file.header_bytes else _read_begin(fd, length)
        except OSError as error:
            raise io_failed(f"{owner} in {str(self._place)!r} cannot be read", error) from error
        check_header(raw, file, blocks, self._manifest)


def _read_begin(fd: int, bytes: int) -> bytes:
    """Return the first bytes of a file, fewer only where it ends: one read may give less than there is."""
    raw = b""
    while len(raw) < bytes and (part := system.pread(fd, bytes - len(raw), len(raw))):
        raw += part
    return raw


def _what_it_is(fd: int) -> str | None:
    """Return what a file that is not a shard looks like."""
    with contextlib.suppress(OSError):
        return looks_like(system.pread(fd, _SNIFFED_BYTES, 0))
    return None


class StoreFiles:
    """The shard files of one manifest in a store, which were looked at: their numbers, in its order.

    wanted: which files may be read; None: all.
    """

    def __init__(self, reader: StoreReader, manifest: Manifest, *, wanted: Collection[int] | None) -> None:
        files = manifest.head.files
        used = [number for number in range(len(files)) if wanted is None or number in wanted]
        self.fds: list[int] = [NOT_OPEN] * len(files)
        self.direct: Sequence[bool] = [False] * len(files)
        for number in used:
            self.fds[number] = reader.open(files[number].path)
        blocks = blocks_by_file(manifest)

        def look(number: int) -> None:
            header = _header_of(reader, self.fds[number], files[number], manifest)
            check_header(header, files[number], blocks[number], manifest)

        for _ in reader.at_once(look, used):
            pass

    def close(self) -> None:
        """Nothing is open."""


def _header_of(reader: StoreReader, number: int, file: FileFacts, manifest: Manifest) -> bytes:
    """Return the bytes of a header, of a file that has its size. CorruptError."""
    try:
        raw, size = reader.begin_of(number, file.header_bytes)
    except NotFoundError as error:
        raise CorruptError(f"{owner_of(file, manifest)} is missing") from error
    if size != file.bytes:
        raise CorruptError(f"{owner_of(file, manifest)} has the wrong size", found=size, expected=file.bytes)
    return raw


class ChainReader:
    """The open files of one checkpoint. Used by one thread at a time; close it, or use it as a context manager.

    verify: the digest of every block that is read in one piece is checked. wanted: the blocks that may be read; None:
    all. In a checkpoint of several ranks, files that hold none of these are not even opened: there may be thousands.
    Raises CorruptError for files that are not what the manifests say.
    """

    has_digests = True

    def __init__(
        self,
        data: ReadFolder,
        chain: Chain,
        *,
        threads: int,
        verify: bool,
        progress: Progress,
        wanted: Iterable[int] | None = None,
    ) -> None:
        self._chain, self._place = chain, data.path
        self._threads = threads
        self.verify = verify
        self.progress = progress
        self._queue: list[tuple[int, int, int, int]] = []  # (block, address, begin, bytes)
        self.bytes_read = 0
        self._checked: set[int] = set()
        self.hint: str | None = None  # What to do when a block is damaged.
        # The number behind each manifest's last block.
        self._ends = list(itertools.accumulate(len(manifest.blocks) for manifest in chain.manifests))
        self._files: list[FilesOfManifest] = []
        self._store = StoreReader(data, threads=threads) if isinstance(data, StoreFolder) else None
        self._read = core.read if self._store is None else self._store.read
        try:
            for manifest, files in zip(chain.manifests, self._wanted_files(wanted), strict=True):
                self._files.append(self._open(data, manifest, files))
        except BaseException:
            self.close()
            raise

    def _open(self, data: ReadFolder, manifest: Manifest, wanted: Collection[int] | None) -> FilesOfManifest:
        if self._store is not None:
            return StoreFiles(self._store, manifest, wanted=wanted)
        return OpenFiles(cast(Directory, data), manifest, wanted=wanted)

    def close(self) -> None:
        for files in self._files:
            files.close()

    def __enter__(self) -> ChainReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, number: int, address: int, *, begin: int, bytes: int) -> None:
        """Queue a read; the memory at `address` must live until `run` returns."""
        self._queue.append((number, address, begin, bytes))

    def run(self) -> None:
        """Do all queued reads; CorruptError naming the block when the digest of a whole one is wrong."""
        reads, self._queue = self._queue, []
        uninterrupted.look()
        if not reads:
            return
        items = np.empty((len(reads), 3), dtype=np.uint64)
        fds = np.empty(len(reads), dtype=np.int32)
        direct = np.empty(len(reads), dtype=np.int32)
        for index, (number, address, begin, size) in enumerate(reads):
            placed = self.block(number).placed
            files = self._files[self._place_of(number)]
            items[index] = (address, placed.offset + begin, size)
            fds[index] = files.fds[placed.file_index]
            direct[index] = files.direct[placed.file_index]
        step = self._chain.step
        try:
            parts = Reads(items, fds, direct)
            digests = self._read(parts, digests=self.verify, threads=self._threads, progress=self.progress)
        except ShortFile as error:
            raise CorruptError(f"a shard file of step {step} ended while it was read: {error}") from error
        except CancelledDrain as error:
            raise SaveCancelledError(f"load of step {step} was cancelled") from error
        except OSError as error:
            raise io_failed(f"shard files of step {step} in {str(self._place)!r} cannot be read", error) from error
        uninterrupted.look()
        self.bytes_read += int(items[:, 2].sum())
        if digests is not None:
            for (number, _, _, size), digest in zip(reads, digests, strict=True):
                if size == self.block(number).placed.spec.bytes:
                    self.check(number, digest.tobytes())

    def array(self, number: int) -> torch.Tensor:
        """Read all of a block, and return the array that it is."""
        from asyncckpt.format.encodings import decode  # `verify` needs no torch.

        spec = self.block(number).placed.spec
        raw = np.empty(spec.bytes, dtype=np.uint8)
        self.add(number, raw.ctypes.data, begin=0, bytes=spec.bytes)
        self.run()
        return decode(raw, spec)

    def block(self, number: int) -> BlockFacts:
        return self._chain.blocks[number]

    def pass_over(self, number: int) -> None:
        """Take note that nothing of a block counts, so that it need not be read."""
        self._checked.add(number)

    def has_checked(self, numbers: Iterable[int]) -> bool:
        """Return whether all that was wanted of these blocks was read and found sound; of some, that may be nothing."""
        return all(number in self._checked for number in numbers if self.block(number).placed.spec.bytes)

    def check(self, number: int, digest: bytes, *, begin: int = 0, end: int | None = None) -> None:
        """Raise CorruptError when a block's bytes are not those that were written. begin, end: those of a part that has
        a digest (BlockFacts.part_around)."""
        block, manifest = self.block(number), self._chain.manifests[self._place_of(number)]
        size = block.placed.spec.bytes
        end = size if end is None else end
        is_whole = (begin, end) == (0, size)
        expected = block.digest_of(begin, end)
        if digest == expected:
            self._checked.add(number)
            return
        file = manifest.head.files[block.placed.file_index]
        part = "" if is_whole else f"bytes {begin} to {end} of "
        raise CorruptError(
            f"step {manifest.step} is damaged: {part}{block.placed.spec.name!r} in {file.path!r} "
            "does not match its digest",
            found=Words(digest.hex()),
            expected=expected.hex(),
            hint=self.hint,
        )

    def _wanted_files(self, wanted: Iterable[int] | None) -> list[set[int] | None]:
        """Return of every manifest the numbers of the files that hold wanted blocks; None: all."""
        if wanted is None or self._chain.newest.head.ranks_count == 1:
            return [None for _ in self._ends]
        files: list[set[int] | None] = [set() for _ in self._ends]
        for number in wanted:
            own = files[self._place_of(number)]
            assert own is not None
            own.add(self.block(number).placed.file_index)
        return files

    def _place_of(self, number: int) -> int:
        """Return which manifest of the chain a block belongs to."""
        return bisect.bisect_right(self._ends, number)


# -- headers -----------------------------------------------------------------------------------------------------------


def owner_of(file: FileFacts, manifest: Manifest) -> str:
    """Return the name of a shard file in errors."""
    return f"shard file {file.path!r} of step {manifest.step}"


def blocks_by_file(manifest: Manifest) -> list[dict[str, BlockFacts]]:
    """Return the blocks of each file of a manifest, by their names in its header."""
    by_file: list[dict[str, BlockFacts]] = [{} for _ in manifest.head.files]
    for block in manifest.blocks:
        by_file[block.placed.file_index][block.placed.key] = block
    return by_file


def check_header(raw: bytes, file: FileFacts, blocks: dict[str, BlockFacts], manifest: Manifest) -> None:
    """Check that these bytes are the header that was written, with the same places as the manifest. CorruptError."""
    owner = owner_of(file, manifest)
    found = xxhash.xxh3_128_digest(raw)
    if found != file.header_digest:
        raise CorruptError(
            f"{owner} is damaged: its header does not match its digest",
            found=Words(found.hex()),
            expected=file.header_digest.hex(),
        )
    header = decode_header(raw, file_bytes=file.bytes, owner=owner)
    if header.attempt != manifest.head.attempt:
        raise CorruptError(f"{owner} belongs to another save", found=header.attempt, expected=manifest.head.attempt)
    places = {key: (entry.offset, entry.bytes, entry.dtype, entry.shape) for key, entry in header.entries.items()}
    listed = {key: _place(block, header.entries.get(key)) for key, block in blocks.items()}
    if places != listed:
        differing = sorted(key for key in places.keys() | listed.keys() if places.get(key) != listed.get(key))
        raise CorruptError(f"{owner} and the manifest disagree on blocks", found=differing[:5])


def _place(block: BlockFacts, entry: HeaderEntry | None) -> tuple[object, ...]:
    """Return where the manifest has a block, and as what: for a dtype unknown here, what the header says."""
    spec = block.placed.spec
    if entry is not None and not spec.is_known:
        return (block.placed.offset, spec.bytes, entry.dtype, entry.shape)
    return (block.placed.offset, spec.bytes, spec.stored_dtype, spec.stored_shape)
