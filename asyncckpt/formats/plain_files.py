"""Write files for other libraries, safetensors or bare: from sources, through two buffers, with nothing of ours in
them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt import system
from asyncckpt.engine.compact.copy_blocks import write_apart
from asyncckpt.errors import CorruptError, UnsupportedError
from asyncckpt.format import limits
from asyncckpt.format.head import FileFacts
from asyncckpt.format.names import Attempt
from asyncckpt.format.write_manifest import HeaderTemplate
from asyncckpt.formats.data_files import FileArray, OpenArrays, digest_of
from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.model.source import ByteSource
from asyncckpt.native import Progress, row_begins
from asyncckpt.options import SaveOptions
from asyncckpt.plan.image import FilePlan, ImagePlan
from asyncckpt.shard.files import ShardTarget
from asyncckpt.storage.directory import Directory, io_failed
from asyncckpt.storage.written_chunks import WrittenChunks


@dataclass(frozen=True)
class OutArray:
    """An array to write. code: its dtype, as the library calls it."""

    key: str
    code: str
    spec: BlockSpec
    source: ByteSource


@dataclass(frozen=True)
class WrittenArrays:
    """The bytes of the written files, and the digests of their content, by key."""

    bytes_count: int
    digests: Mapping[str, bytes]

    def check(self, opened: OpenArrays, arrays: Iterable[FileArray], path: Path, progress: Progress) -> None:
        """Read all of it and compare. path: what it is going to be. CorruptError."""
        for array in arrays:
            check_digest(array.key, digest_of(opened, array, progress), self.digests, path)


def check_digest(key: str, digest: bytes, written: Mapping[str, bytes], path: Path) -> None:
    """Compare the digest of what was read with that of what was written under a key. CorruptError."""
    if digest != written[key]:
        what = f"array {key!r} of {str(path)!r} was not read back as it was written"
        raise CorruptError(what, hint="nothing was published; look at the disk")


def write_plain_files(
    files: Sequence[tuple[str, Sequence[OutArray]]],
    folder: Directory,
    options: SaveOptions,
    progress: Progress,
    *,
    written: WrittenChunks | None = None,
    metadata: Mapping[str, str] | None = None,
    has_header: bool = True,
) -> WrittenArrays:
    """Write new files (name, arrays), and sync them. metadata: of every header. UnsupportedError, IOFailedError.

    written: notes what is written; what was written before is not once more.

    has_header: False writes the bytes of the arrays and nothing else; they must have some.
    """
    if not files:
        return WrittenArrays(0, {})
    placed: list[PlacedBlock] = []
    plans: list[FilePlan] = []
    for index, (name, arrays) in enumerate(files):
        text = _header(arrays, metadata) if has_header else b""
        end, first = len(text), len(placed)
        for array in arrays:
            placed.append(PlacedBlock(spec=array.spec, key=array.key, file_index=index, offset=end))
            end += array.spec.bytes
        header = _PlainHeader(text=text, attempt_at=0, step_at=0)
        plans.append(FilePlan(name=name, header=header, bytes=end, blocks=tuple(range(first, len(placed)))))
    image = ImagePlan(
        blocks=tuple(placed),
        files=tuple(plans),
        bytes=0,
        offsets=np.zeros(len(placed), dtype=np.int64),
        lengths=np.array([block.spec.bytes for block in placed], dtype=np.int64),
    )
    target = _Target(folder, Attempt.new(0), options, progress, written=written)
    _, digests = write_apart(image, [array.source for _, arrays in files for array in arrays], target)
    begins = row_begins(image.lengths)[:-1]
    keyed = {block.key: digest.tobytes() for block, digest in zip(placed, digests[begins], strict=True)}
    return WrittenArrays(sum(plan.bytes for plan in plans), keyed)


def write_json(folder: Directory, name: str, content: object, options: SaveOptions, *, indent: int | None) -> None:
    """Write a new JSON file, and sync it. IOFailedError."""
    separators = None if indent else (",", ":")
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, indent=indent, separators=separators)
    write_small_file(folder, name, text.encode("utf-8"), options)


def write_small_file(folder: Directory, name: str, content: bytes, options: SaveOptions) -> None:
    """Write a new file, and sync it. IOFailedError."""
    fd, _ = folder.create_file(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            if options.durability == "fsync":
                system.fsync(file.fileno())
    except OSError as error:
        raise io_failed(f"file {str(folder.path / name)!r} cannot be written", error) from error


def header_entries(arrays: Sequence[OutArray]) -> dict[str, dict[str, Any]]:
    """Return what a header says of arrays that are one after the other."""
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for array in arrays:
        limits.check_block(array.spec)
        begin, end = end, end + array.spec.bytes
        entries[array.key] = {"dtype": array.code, "shape": list(array.spec.shape), "data_offsets": [begin, end]}
    return entries


def _header(arrays: Sequence[OutArray], metadata: Mapping[str, str] | None) -> bytes:
    header = {} if metadata is None else {"__metadata__": dict(metadata)}
    text = json.dumps({**header, **header_entries(arrays)}, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (8 - len(text) % 8)
    if len(text) > limits.HEADER_BYTES_MAX:
        raise UnsupportedError("the names and shapes of tensors are too long for one file", found=len(text))
    return struct.pack("<Q", len(text)) + text


class _PlainHeader(HeaderTemplate):
    """A header that says nothing of attempts."""

    def stamp(self, attempt: Attempt) -> bytes:
        return self.text


class _Target(ShardTarget):
    def facts(self, file: FilePlan, header: bytes) -> FileFacts:
        return FileFacts(path=file.name, rank=0, bytes=file.bytes, header_bytes=len(header), header_digest=b"")
