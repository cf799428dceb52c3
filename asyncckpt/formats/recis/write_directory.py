"""Write a directory that RecIS reads, so that it is there all at once.

1. Make a folder with a name of its own beside the target: `.recis-<id>.tmp`.
2. Write the data files of every shard there, and sync them; blocks go to the files of their shard in turn.
3. Write the two JSON files, then `index`: as RecIS does, last, by a rename. Sync the folder.
4. Open it as a directory of RecIS, which checks all of it; with `verify`, compare every byte with what was written.
5. Rename the folder to its name, which must be free, and sync the one above.

An error before 5 removes the folder; a crash leaves it, and nothing of it counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt import system
from asyncckpt.engine.compact.copy_blocks import write_apart
from asyncckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    IndeterminateError,
    NotFoundError,
    UnsupportedError,
)
from asyncckpt.format import limits
from asyncckpt.format.header import HeaderTemplate
from asyncckpt.format.manifest import FileFacts
from asyncckpt.format.names import Attempt
from asyncckpt.formats.recis.directory import DTYPES, RecisDirectory
from asyncckpt.formats.recis.names import (
    ARRAYS_FILE,
    EMBEDDING_SLOT,
    INDEX_FILE,
    TENSOR_KEYS_FILE,
    block_name,
    check_name,
    data_file_name,
    dense_name,
    stored_name,
)
from asyncckpt.formats.recis.read_arrays import digest_of
from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.model.source import ByteSource
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.model.table_shard import Shard
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions
from asyncckpt.plan.image import FilePlan, ImagePlan
from asyncckpt.shard.target import ShardTarget
from asyncckpt.storage.directory import Directory, io_failed


@dataclass(frozen=True)
class OutBlock:
    """What is written: a slot of a table for the ids of a slice, or a dense tensor, `slot` and `shard` None.

    spec says dtype and shape. table: its name, or that of the dense tensor.
    """

    table: str
    slot: str | None
    shard: Shard | None
    spec: BlockSpec
    source: ByteSource

    def stored_name(self, *, part: tuple[int, int]) -> str:
        return dense_name(self.table) if self.slot is None else stored_name(self.table, self.slot, part=part)


def check_block(name: str, slot: str | None, dtype: str) -> None:
    """Refuse what RecIS could not read: UnsupportedError."""
    if slot is None:
        check_name(name, what="dense tensor", reserved=("^", "/part_"))
    else:
        check_name(name, what="table", reserved=("^", "@", "/part_"))
        check_name(slot, what=f"slot of table {name!r},", reserved=("^", "@", "/part_"))
    if dtype not in DTYPES:
        what = f"{name if slot is None else f'{name}@{slot}'!r} has a dtype that RecIS does not have"
        raise UnsupportedError(what, found=dtype, expected=sorted(DTYPES))


class RecisWriter:
    """A directory under way; see above. Close it in any case. `bytes_written` counts the data files."""

    def __init__(
        self, path: Path, *, shards_count: int, options: SaveOptions, progress: Progress, verify: bool = True
    ) -> None:
        check_is_free(path)
        try:
            if not path.parent.is_dir():
                os.makedirs(path.parent, exist_ok=True)
        except OSError as error:
            raise io_failed(f"folder {str(path.parent)!r} cannot be made", error) from error
        self._path, self._shards_count, self._options, self._progress = path, shards_count, options, progress
        self._verify = verify
        self._name = f".recis-{uuid.uuid4().hex}.tmp"
        self._attempt = Attempt.new(0)
        self._file_numbers: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._tensor_keys: dict[str, str] = {}
        self._arrays: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, bytes] = {}
        self.bytes_written = 0
        with contextlib.ExitStack() as opened:
            self._parent = opened.enter_context(Directory.open(path.parent))
            try:
                self._folder = opened.enter_context(self._parent.make_folder(self._name))
            except CheckpointError:
                with contextlib.suppress(CheckpointError):  # It was made, and cannot be opened.
                    self._parent.remove_folder(self._name)
                raise
            self._opened = opened.pop_all()
        self._is_published = False

    def write_shard(self, number: int, blocks: Sequence[OutBlock]) -> None:
        """Write the data files of a shard, durable."""
        parallel = self._options.parallel
        part = (number, self._shards_count)
        members: list[list[int]] = [list(range(first, len(blocks), parallel)) for first in range(parallel)]
        placed: dict[int, PlacedBlock] = {}
        files: list[FilePlan] = []
        for index, own in enumerate(filter(None, members)):
            name = data_file_name(number * parallel + index, self._shards_count * parallel)
            self._file_numbers[name] = len(self._file_numbers)
            keyed = [(self._take(blocks[block], name, part=part), blocks[block]) for block in own]
            text = _header(keyed, self._arrays)
            end = len(text)
            for (key, block), place in zip(keyed, own, strict=True):
                placed[place] = PlacedBlock(spec=block.spec, key=key, file_index=index, offset=end)
                end += block.spec.bytes
            header = _PlainHeader(text=text, attempt_at=0, step_at=0)
            files.append(FilePlan(name=name, header=header, bytes=end, blocks=tuple(own)))
        if not files:
            return
        image = ImagePlan(
            blocks=tuple(placed[place] for place in range(len(blocks))),
            files=tuple(files),
            bytes=0,
            offsets=np.zeros(len(blocks), dtype=np.int64),
            lengths=np.array([block.spec.bytes for block in blocks], dtype=np.int64),
        )
        target = _Target(self._folder, self._attempt, self._options, self._progress)
        _, digests = write_apart(image, [block.source for block in blocks], target)
        for placed_block, digest in zip(image.blocks, digests, strict=True):
            self._digests[placed_block.key] = digest.tobytes()
        self.bytes_written += sum(file.bytes for file in files)

    def publish(self) -> None:
        """Make it a directory of RecIS under its name. ConflictError when that is taken by now, CorruptError."""
        index = {"block_index": self._places, "file_index": self._file_numbers}
        self._write_json(ARRAYS_FILE, self._arrays, indent=4)
        self._write_json(TENSOR_KEYS_FILE, self._tensor_keys, indent=4)
        self._write_json(INDEX_FILE + ".tmp", index, indent=None)
        self._folder.move(INDEX_FILE + ".tmp", INDEX_FILE)
        self._sync(self._folder)
        with RecisDirectory.open(self._path.parent / self._name) as found:
            if self._verify:
                for array in found.arrays:
                    if digest_of(found, array, self._progress) != self._digests[array.key]:
                        what = f"array {array.key!r} of {str(self._path)!r} was not read back as it was written"
                        raise CorruptError(what, hint="nothing was published; look at the disk")
        self._rename()
        self._is_published = True
        try:
            self._sync(self._parent)
        except CheckpointError as error:
            what = f"{str(self._path)!r} is there, but perhaps not durable: {error}"
            raise IndeterminateError(what, resolve=lambda: _is_there(self._path)) from error

    def close(self) -> None:
        """Remove what is not published."""
        if not self._is_published:
            with contextlib.suppress(CheckpointError):
                self._parent.remove_folder(self._name)
        self._opened.close()

    def __enter__(self) -> RecisWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, block: OutBlock, file: str, *, part: tuple[int, int]) -> str:
        """Take note of a block; return its stored name."""
        key = block.stored_name(part=part)
        if key in self._places:
            raise UnsupportedError(f"two blocks would be stored as {key!r}", hint="RecIS parts names by '.' alone")
        self._places[key] = self._file_numbers[file]
        if block.slot is not None and block.shard is not None:
            self._tensor_keys[key] = block_name(block.table, block.slot, block.shard)
        return key

    def _write_json(self, name: str, content: object, *, indent: int | None) -> None:
        separators = None if indent else (",", ":")
        text = json.dumps(content, ensure_ascii=False, sort_keys=True, indent=indent, separators=separators)
        fd, _ = self._folder.create_file(name)
        shown = str(self._folder.path / name)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(text.encode("utf-8"))
                file.flush()
                if self._options.durability == "fsync":
                    system.fsync(file.fileno())
        except OSError as error:
            raise io_failed(f"file {shown!r} cannot be written", error) from error

    def _rename(self) -> None:
        try:
            self._parent.publish(self._name, self._path.name)
        except ConflictError:
            raise
        except CheckpointError:  # No rename that refuses to replace: then one that replaces only an empty folder.
            check_is_free(self._path)
            self._parent.move(self._name, self._path.name)

    def _sync(self, folder: Directory) -> None:
        if self._options.durability == "fsync":
            folder.sync()


def _is_there(path: Path) -> bool:
    """Return whether a directory is there, complete, and durable by now."""
    try:
        with RecisDirectory.open(path), Directory.open(path.parent) as parent:
            parent.sync()
    except NotFoundError:
        return False
    return True


def check_is_free(path: Path) -> None:
    """Raise ConflictError when there is something under this name."""
    if os.path.lexists(path):
        raise ConflictError(f"{str(path)!r} exists already", hint="give the name of a folder that is to be made")


class _PlainHeader(HeaderTemplate):
    """A header that says nothing of attempts."""

    def stamp(self, attempt: Attempt) -> bytes:
        return self.text


class _Target(ShardTarget):
    def facts(self, file: FilePlan, header: bytes) -> FileFacts:
        return FileFacts(path=file.name, rank=0, bytes=file.bytes, header_bytes=len(header), header_digest=b"")


def _header(blocks: Sequence[tuple[str, OutBlock]], listed: dict[str, dict[str, Any]]) -> bytes:
    """Return the header of a data file, and list its arrays for other tools."""
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for key, block in blocks:
        spec = block.spec
        limits.check_block(spec)
        begin, end = end, end + spec.bytes
        header[key] = {"dtype": spec.stored_dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        listed[key] = _listed(key, block, header[key])
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (8 - len(text) % 8)
    if len(text) > limits.HEADER_BYTES_MAX:
        raise UnsupportedError("the names and shapes of tensors are too long for one file", found=len(text))
    return struct.pack("<Q", len(text)) + text


def _listed(key: str, block: OutBlock, entry: dict[str, Any]) -> dict[str, Any]:
    """Return what RecIS writes of an array for other tools: of ids and slots just the header's entry."""
    common = {"name": key, "dtype": block.spec.dtype, "shape": entry["shape"]}
    if block.slot is None:
        return {**common, "dense": True, "dimension": 0, "is_hashmap": False}
    if f".{EMBEDDING_SLOT}" not in key:
        return {**entry, "dense": False}
    return {
        **common,
        "dense": False,
        "dimension": entry["shape"][-1],
        "is_hashmap": True,
        "hashmap_key": key.replace(f".{EMBEDDING_SLOT}", f".{ID_COLUMN}"),
        "hashmap_key_dtype": "int64",
        "hashmap_value": key,
    }
