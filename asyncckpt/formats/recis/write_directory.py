"""Write a directory that RecIS reads, so that it is there all at once.

1. Make a folder with a name of its own beside the target (commit/new_entry.py).
2. Write the data files of every shard there, and sync them; blocks go to the files of their shard in turn.
3. Write the two JSON files, then `index`: as RecIS does, last, by a rename. Sync the folder.
4. Open it as a directory of RecIS, which checks all of it; with `verify`, compare every byte with what was written.
5. Give the folder its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncckpt.commit.new_entry import NewEntry
from asyncckpt.errors import NotFoundError, UnsupportedError
from asyncckpt.formats.plain_files import OutArray, WrittenArrays, header_entries, write_json, write_plain_files
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
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.source import ByteSource
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.model.table_shard import Shard
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions


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
        self,
        path: Path,
        *,
        shards_count: int,
        options: SaveOptions,
        progress: Progress,
        verify: bool = True,
        identity: str | None = None,
    ) -> None:
        """identity: go on with what was left with the same."""
        self._shards_count, self._options, self._progress = shards_count, options, progress
        self._verify = verify
        self._file_numbers: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._tensor_keys: dict[str, str] = {}
        self._arrays: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, bytes] = {}
        self.bytes_written = 0
        self._entry = NewEntry(path, kind="recis", durability=options.durability)
        try:
            self._folder = self._entry.make_folder(identity)
        except BaseException:
            self._entry.close()
            raise

    def write_shard(self, number: int, blocks: Sequence[OutBlock]) -> None:
        """Write the data files of a shard, durable."""
        parallel = self._options.parallel
        part = (number, self._shards_count)
        members = [blocks[first::parallel] for first in range(parallel)]
        files: list[tuple[str, list[OutArray]]] = []
        for index, own in enumerate(filter(None, members)):
            name = data_file_name(number * parallel + index, self._shards_count * parallel)
            self._file_numbers[name] = len(self._file_numbers)
            arrays = [self._take(block, name, part=part) for block in own]
            for block, (key, entry) in zip(own, header_entries(arrays).items(), strict=True):
                self._arrays[key] = _listed(key, block, entry)
            files.append((name, arrays))
        written = write_plain_files(files, self._folder, self._options, self._progress, written=self._entry.written)
        self._digests |= written.digests
        self.bytes_written += written.bytes_count

    def publish(self) -> None:
        """Make it a directory of RecIS under its name. ConflictError when that is taken by now, CorruptError."""
        index = {"block_index": self._places, "file_index": self._file_numbers}
        write_json(self._folder, ARRAYS_FILE, self._arrays, self._options, indent=4)
        write_json(self._folder, TENSOR_KEYS_FILE, self._tensor_keys, self._options, indent=4)
        write_json(self._folder, INDEX_FILE + ".tmp", index, self._options, indent=None)
        self._folder.move(INDEX_FILE + ".tmp", INDEX_FILE)
        self._entry.sync()
        with RecisDirectory.open(self._entry.temporary) as found:
            if self._verify:
                written = WrittenArrays(self.bytes_written, self._digests)
                written.check(found, found.arrays, self._entry.path, self._progress)
        self._entry.give_name(lambda: _is_there(self._entry.path))

    @property
    def reused_bytes(self) -> int:
        """How many bytes were there already."""
        return 0 if self._entry.written is None else self._entry.written.reused_bytes

    def close(self) -> None:
        """Remove what is not published."""
        self._entry.close()

    def __enter__(self) -> RecisWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, block: OutBlock, file: str, *, part: tuple[int, int]) -> OutArray:
        """Take note of a block; return it under its stored name."""
        key = block.stored_name(part=part)
        if key in self._places:
            raise UnsupportedError(f"two blocks would be stored as {key!r}", hint="RecIS parts names by '.' alone")
        self._places[key] = self._file_numbers[file]
        if block.slot is not None and block.shard is not None:
            self._tensor_keys[key] = block_name(block.table, block.slot, block.shard)
        return OutArray(key, block.spec.stored_dtype, block.spec, block.source)


def _is_there(path: Path) -> bool:
    """Return whether a directory is there, and complete."""
    try:
        RecisDirectory.open(path).close()
    except NotFoundError:
        return False
    return True


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
