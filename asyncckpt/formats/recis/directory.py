"""A directory that RecIS wrote: opened, and everything about it checked before a byte of data is used.

1. `index` and `tensorkey.json`: strict JSON, names of data files and nothing else, every block under one name.
2. Every data file is opened, by descriptor, and its header checked: no gaps, no overlaps, as long as the file.
3. Files and index say the same: each array is in the file that the index names, and no other one is there.
4. Tables: all slices of one save, none twice and no two with the same ids; the same slots, dtypes and row shapes in
   each; ids are int64, and every slot has as many rows as its ids.

What is beside these files (`model.pt`, `extra.pt`,
`io_state_*`) holds pickles and is never opened.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncckpt.errors import CorruptError, NotFoundError, UnsupportedError, Words
from asyncckpt.format import limits
from asyncckpt.format.strict_json import Fields, loads
from asyncckpt.formats.data_files import DataFiles, FileArray, array_of
from asyncckpt.formats.recis.names import (
    ARRAYS_FILE,
    INDEX_FILE,
    TENSOR_KEYS_FILE,
    BlockName,
    is_unfinished,
    parse_block_name,
    parse_data_file_name,
)
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.model.table_shard import Shard, described, may_share_ids
from asyncckpt.storage.directory import Directory

INDEX_BYTES_MAX = 1 << 30
# What RecIS can store, by its code.
_DTYPES = {
    "BOOL": "bool",
    "bool": "bool",  # As some versions write it; they cannot read it back.
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
DTYPES = frozenset(_DTYPES.values())


@dataclass(frozen=True)
class StoredArray(FileArray):
    """One array, and which block it is."""

    block: BlockName


@dataclass(frozen=True)
class StoredPart:
    """What one shard wrote of a table: its ids and slots, by name, all with the same rows."""

    shard: Shard
    arrays: Mapping[str, StoredArray]

    @property
    def rows_count(self) -> int:
        return self.arrays[ID_COLUMN].shape[0]


@dataclass(frozen=True)
class RecisDirectory:
    """What is in a directory of RecIS, with its files open. Close it, or use it as a context manager.

    tables: of every one its parts, by their slices. dense: the dense tensors by their names. `arrays` lists all blocks.
    """

    path: Path
    folder: Directory
    files: DataFiles
    tables: Mapping[str, tuple[StoredPart, ...]]
    dense: Mapping[str, StoredArray]

    @staticmethod
    def open(path: Path) -> RecisDirectory:
        """Open and check. NotFoundError where there is no such checkpoint, CorruptError, UnsupportedError,
        IOFailedError."""
        with contextlib.ExitStack() as opened:
            folder = opened.enter_context(Directory.open(path))
            _check_is_one(folder)
            names, places = _read_index(folder)
            blocks = _block_names(folder, places)
            files = DataFiles(names)
            opened.callback(files.close)
            arrays = list(_read_headers(folder, files, places, blocks))
            tables, dense = _sorted_out(arrays, str(path))
            opened.pop_all()
        return RecisDirectory(path, folder, files, tables, dense)

    def close(self) -> None:
        self.files.close()
        self.folder.close()

    def __enter__(self) -> RecisDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def arrays(self) -> Iterator[StoredArray]:
        for parts in self.tables.values():
            for part in parts:
                yield from part.arrays.values()
        yield from self.dense.values()

    @property
    def slots(self) -> set[str]:
        """The slots that some table has."""
        return {slot for parts in self.tables.values() for slot in parts[0].arrays}

    @property
    def rows_count(self) -> int:
        return sum(part.rows_count for parts in self.tables.values() for part in parts)

    @property
    def other_files(self) -> list[str]:
        """What is in the folder beside the checkpoint, as RecIS' trainer leaves `model.pt` there: not opened here."""
        own = {INDEX_FILE, TENSOR_KEYS_FILE, ARRAYS_FILE, *self.files.names}
        return sorted(name for name in self.folder.names() if name not in own and not name.startswith("."))

    @property
    def bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.bytes for array in self.arrays)


def _check_is_one(folder: Directory) -> None:
    if folder.exists(INDEX_FILE):
        return
    names = sorted(folder.names())
    left = [name for name in names if is_unfinished(name) or parse_data_file_name(name) is not None]
    shown = repr(str(folder.path))
    if left:
        what = f"checkpoint of RecIS in {shown} is not complete: file {INDEX_FILE!r} is missing"
        raise CorruptError(what, found=left[:8], hint="the save did not end; load an older checkpoint")
    below = [name for name in names if name.startswith("ckpt_")]
    is_ours = "manifests" in names and "data" in names
    raise NotFoundError(
        f"there is no checkpoint of RecIS in {shown}",
        found=names[:8],
        expected=f"files {INDEX_FILE!r}, {TENSOR_KEYS_FILE!r} and 'model-....safetensors'",
        hint=f"give one of the folders {below[:8]}"
        if below
        else "this is a directory of asyncckpt"
        if is_ours
        else None,
    )


def _read_index(folder: Directory) -> tuple[list[str], dict[str, int]]:
    """Return the data files by their numbers, and the file of every stored name. CorruptError."""
    owner = f"file {str(folder.path / INDEX_FILE)!r}"
    index = Fields(loads(folder.read_file(INDEX_FILE, bytes_max=INDEX_BYTES_MAX), owner=owner), owner=owner, where="it")
    files, blocks = (Fields(index.value(key), owner=owner, where=key) for key in ("file_index", "block_index"))
    by_number: dict[int, str] = {}
    counts = set()
    for name in files.members:
        number = files.integer(name, at_most=max(0, len(files.members) - 1))
        parsed = parse_data_file_name(name)
        if parsed is None or parsed[0] >= parsed[1]:
            raise CorruptError(
                f"{owner} names a foreign file", found=name, expected="'model-000000-of-000001.safetensors'"
            )
        if number in by_number:
            raise CorruptError(f"{owner}: two files have the number {number}", found=[by_number[number], name])
        by_number[number] = name
        counts.add(parsed[1])
    if len(counts) > 1:
        raise CorruptError(f"{owner} mixes files of different saves", found=sorted(counts), expected="one number")
    places = {key: blocks.integer(key, at_most=max(0, len(by_number) - 1)) for key in blocks.members}
    if places and not by_number:
        raise CorruptError(f"{owner} names no files", found=Words(f"{len(places)} blocks"))
    return [by_number[number] for number in range(len(by_number))], places


def _block_names(folder: Directory, places: Mapping[str, int]) -> dict[str, BlockName]:
    """Return what is stored under every name, as `tensorkey.json` says."""
    owner = f"file {str(folder.path / TENSOR_KEYS_FILE)!r}"
    try:
        raw = folder.read_file(TENSOR_KEYS_FILE, bytes_max=INDEX_BYTES_MAX)
    except NotFoundError as error:
        raise CorruptError(f"{owner} is missing", hint="the save did not end; load an older checkpoint") from error
    keys = Fields(loads(raw, owner=owner), owner=owner, where="it")
    strangers = sorted(keys.members.keys() - places.keys())
    if strangers:
        raise CorruptError(
            f"{owner} and {INDEX_FILE!r} are not of one save: blocks without a file", found=strangers[:5]
        )
    named: dict[str, BlockName] = {}
    stored: dict[str, str] = {}
    for key in places:
        block = keys.text(key) if key in keys.members else key
        if stored.setdefault(block, key) != key:
            raise CorruptError(f"{owner}: two arrays are the block {block!r}", found=[stored[block], key])
        named[key] = parse_block_name(key, block, owner=owner if key in keys.members else f"file {INDEX_FILE!r}")
    return named


def _read_headers(
    folder: Directory, files: DataFiles, places: Mapping[str, int], blocks: Mapping[str, BlockName]
) -> Iterator[StoredArray]:
    """Open every data file; yield its arrays, those that the index puts there and no others."""
    expected: dict[int, set[str]] = defaultdict(set)
    for key, number in places.items():
        expected[number].add(key)
    for number, name in enumerate(files.names):
        owner = f"file {str(folder.path / name)!r}"
        entries = files.open_next(folder, name, owner=owner)
        if entries.keys() != expected[number]:
            differing = sorted(entries.keys() ^ expected[number])
            what = f"{owner} and {INDEX_FILE!r} are not of one save: they disagree on arrays"
            raise CorruptError(what, found=differing[:5])
        for key, entry in entries.items():
            array = array_of(key, number, entry, _DTYPES, owner=owner, library="RecIS")
            yield StoredArray(**vars(array), block=blocks[key])


def _sorted_out(
    arrays: Sequence[StoredArray], path: str
) -> tuple[dict[str, tuple[StoredPart, ...]], dict[str, StoredArray]]:
    """Return tables and dense tensors, by name."""
    dense: dict[str, StoredArray] = {}
    found: dict[str, dict[Shard, dict[str, StoredArray]]] = defaultdict(lambda: defaultdict(dict))
    for array in arrays:
        block = array.block
        if block.slot is None or block.shard is None:
            dense[block.name] = array
        else:
            found[block.name][block.shard][block.slot] = array
    tables = {}
    for name, by_shard in found.items():
        owner = f"table {name!r} in {path!r}"
        parts = [_part(owner, shard, slots) for shard, slots in by_shard.items()]
        parts.sort(key=lambda part: part.shard)
        _check_slices(owner, parts)
        _check_alike(owner, parts)
        tables[name] = tuple(parts)
    counts = {array.block.part[1] for array in arrays if array.block.part is not None}
    if len(counts) > 1:
        raise CorruptError(f"checkpoint in {path!r} mixes saves of different numbers of shards", found=sorted(counts))
    slots = {array.block.tensor_name for array in arrays if array.block.slot is not None}
    for name in sorted(slots & dense.keys()):
        raise UnsupportedError(f"{name!r} in {path!r} is a slot of a table and a dense tensor")
    return tables, dense


def _part(owner: str, shard: Shard, slots: Mapping[str, StoredArray]) -> StoredPart:
    where = f"{owner}, {described(shard)},"
    ids = slots.get(ID_COLUMN)
    if ids is None or len(slots) < 2:
        raise CorruptError(f"{where} has no ids, or nothing else", found=sorted(slots))
    if ids.dtype.name != "int64" or len(ids.shape) != 1:
        raise CorruptError(f"{where} has malformed ids", found=(ids.dtype.name, ids.shape), expected="int64 [rows]")
    for slot, array in slots.items():
        if not array.shape or array.shape[0] != ids.shape[0]:
            what = f"{where} has a slot {slot!r} that does not go with its ids"
            raise CorruptError(what, found=array.shape, expected=f"{ids.shape[0]} rows")
    ordered = {ID_COLUMN: ids, **{slot: array for slot, array in slots.items() if slot != ID_COLUMN}}
    return StoredPart(shard=shard, arrays=ordered)


def _check_slices(owner: str, parts: Sequence[StoredPart]) -> None:
    """Check that all shards are there, each once, with ids of their own."""
    sizes = {part.shard[-1] for part in parts}
    if len(sizes) > 1:
        raise CorruptError(f"{owner} has slices of different sizes", found=sorted(sizes), expected="one size")
    for one, other in itertools.pairwise(parts):
        if may_share_ids(one.shard, other.shard):
            what = f"{owner} has two slices for the same ids: it mixes different saves"
            raise CorruptError(what, found=[described(one.shard), described(other.shard)])
    shards: dict[int, Shard] = {}
    for part in parts:
        own = {array.block.part for array in part.arrays.values()}
        if len(own) > 1:
            raise CorruptError(
                f"{owner}, {described(part.shard)}, is put together from different shards", found=sorted(map(str, own))
            )
        for number, _ in filter(None, own):
            if shards.setdefault(number, part.shard) != part.shard:
                raise CorruptError(f"{owner} has two slices of shard {number}: it mixes different saves")
    counts = {array.block.part[1] for part in parts for array in part.arrays.values() if array.block.part is not None}
    for count in counts:
        missing = [number for number in range(min(count, limits.RANKS_MAX)) if number not in shards]
        if missing:
            raise CorruptError(
                f"{owner} is not complete: shards are missing", found=missing[:8], expected=f"{count} shards"
            )


def _check_alike(owner: str, parts: Sequence[StoredPart]) -> None:
    forms = [{slot: (a.dtype.name, a.shape[1:]) for slot, a in part.arrays.items()} for part in parts]
    for part, form in zip(parts, forms, strict=True):
        differing = sorted(slot for slot in form.keys() | forms[0].keys() if form.get(slot) != forms[0].get(slot))
        if differing:
            raise CorruptError(
                f"{owner} has other slots in {described(part.shard)} than in {described(parts[0].shard)}",
                found={slot: form.get(slot) for slot in differing[:5]},
                expected={slot: forms[0].get(slot) for slot in differing[:5]},
            )
