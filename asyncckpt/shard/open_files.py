"""The open shard files of one manifest: everything about them is checked before a byte of data is used.

They are opened by descriptor, never mapped: a file truncated under an mmap would kill the process. And all at once, so
that a checkpoint that retention removes meanwhile stays readable to its end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

import xxhash

from asyncckpt.errors import CorruptError, NotFoundError
from asyncckpt.format.header import HeaderEntry, decode_header, header_length
from asyncckpt.format.manifest import BlockFacts, FileFacts, Manifest
from asyncckpt.format.names import split_shard_path
from asyncckpt.format.strict_json import looks_like
from asyncckpt.storage.directory import Directory, io_failed, set_direct

_SNIFFED_BYTES = 512  # The length of a header, and enough to tell what else a file may be.


NOT_OPEN = -1


class OpenFiles:
    """`fds` in the order of the manifest's files, and whether each is open for direct reads.

    wanted: numbers of the files to open; None: all. The other ones have no descriptor.
    """

    def __init__(self, data: Directory, manifest: Manifest, *, wanted: Collection[int] | None = None) -> None:
        self._manifest = manifest
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
            if fd == NOT_OPEN:
                continue
            with contextlib.suppress(OSError):
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
        by_file: list[dict[str, BlockFacts]] = [{} for _ in self.fds]
        for block in self._manifest.blocks:
            by_file[block.placed.file_index][block.placed.key] = block
        for fd, file, blocks in zip(self.fds, self._manifest.head.files, by_file, strict=True):
            if fd != NOT_OPEN:
                self._check_header(fd, file, blocks)
            self.direct.append(fd != NOT_OPEN and set_direct(fd))

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
