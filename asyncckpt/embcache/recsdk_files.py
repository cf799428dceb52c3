"""What RecSDK (torchrec_embcache) wrote: found, and checked against its own attributes. Nothing here knows a table.

One folder per rank:

    path/[YYYYmmddHHMMSS/]<table>/rank<r>/
       key/slice.attribute, slice.data              int64 [8, count]; int64 keys
       embedding/slice.attribute, slice.data        int64 [4, count, dim]; float32 rows in the order of the keys
       momentum1/, momentum2/, ...                  as embedding; where the optimizer has them
       admit_count/slice.attribute, slice.data      int64 [8, count]; int64 counts in the order of the keys, -1: none
       evict_timestamp/slice_evict_key.data, slice_evict_ts.data    int64 keys of their own order, int64 timestamps

The first number of an attribute is the bytes of one element. The newest of several timestamps is meant. Ranks merged:
the same folders straight below path/<table>/, and path/meta.ini, which holds `incremental=True` or `False`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncckpt.errors import CorruptError, NotFoundError, UnsupportedError
from asyncckpt.storage.directory import Directory, io_failed

META_FILE = "meta.ini"
META_BYTES_MAX = 4096
ATTRIBUTE_FILE, DATA_FILE = "slice.attribute", "slice.data"
EVICT_KEY_FILE, EVICT_TIME_FILE = "slice_evict_key.data", "slice_evict_ts.data"
KEY, EMBEDDING, MOMENTUM = "key", "embedding", "momentum"
ADMIT_COUNT, EVICT_TIMESTAMP = "admit_count", "evict_timestamp"
KEYS_MAX = 1_000_000_000
INT64, FLOAT32 = np.dtype("<i8"), np.dtype("<f4")
_TIMESTAMP = re.compile(r"[0-9]{14}")
_RANK = re.compile(r"rank([0-9]{1,5})")
_MOMENTUM = re.compile(MOMENTUM + r"([1-9][0-9]?)")
_PART = re.compile(rf"{KEY}|{EMBEDDING}|{ADMIT_COUNT}|{EVICT_TIMESTAMP}|{_MOMENTUM.pattern}")
_NOTHING = re.compile(r"(?!)")
_INCREMENTAL = re.compile(r"\s*incremental\s*[=:]\s*(true|false)\s*", re.IGNORECASE)

Place = tuple[str, ...]


@dataclass(frozen=True)
class StoredArray:
    """One file of raw numbers below a folder, `shape` of dtype; its size has been checked."""

    base: Path
    place: Place
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @property
    def shown(self) -> str:
        return str(self.base.joinpath(*self.place))

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.row_bytes

    def read(self, begin: int, end: int) -> NDArray[np.generic]:
        """Read rows [begin, end). Raises CorruptError when the file has shrunk, IOFailedError."""
        shape = (end - begin, *self.shape[1:])
        try:
            with (
                folder_below(self.base, self.place[:-1]) as folder,
                os.fdopen(folder.open_file(self.place[-1]), "rb") as file,
            ):
                values = np.fromfile(file, self.dtype, math.prod(shape), offset=begin * self.row_bytes)
        except OSError as error:
            raise io_failed(f"file {self.shown!r} cannot be read", error) from error
        if len(values) < math.prod(shape):
            raise CorruptError(f"file {self.shown!r} ended while it was read")
        return values.reshape(shape)


@dataclass(frozen=True)
class StoredPart:
    """What one rank wrote of one table (or all ranks, merged). seen: keys and timestamps, int64 [k] both."""

    shown: str
    ids: NDArray[np.int64]
    embedding: StoredArray
    momenta: tuple[StoredArray, ...]
    counts: StoredArray | None
    seen: tuple[NDArray[np.int64], NDArray[np.int64]] | None

    @property
    def arrays(self) -> Iterator[StoredArray]:
        """All that it has, as they are stored."""
        base, above = self.embedding.base, self.embedding.place[:-2]
        yield StoredArray(base, (*above, KEY, DATA_FILE), INT64, self.ids.shape)
        yield from (self.embedding, *self.momenta, *((self.counts,) if self.counts is not None else ()))
        for file, values in zip((EVICT_KEY_FILE, EVICT_TIME_FILE), self.seen or (), strict=False):
            yield StoredArray(base, (*above, EVICT_TIMESTAMP, file), INT64, values.shape)


@dataclass(frozen=True)
class RecsdkCheckpoint:
    """A checkpoint of RecSDK: table -> its parts, one per rank in the order of the ranks, or one merged part."""

    base: Path
    is_merged: bool
    is_incremental: bool
    tables: Mapping[str, tuple[StoredPart, ...]]


def read_recsdk_checkpoint(path: Path) -> RecsdkCheckpoint:
    """Find a checkpoint, check all its sizes, and read its keys.

    Raises NotFoundError when there is none; CorruptError naming the file for wrong sizes and counts, missing files and
    keys that come twice; UnsupportedError for a part that is not known; IOFailedError.
    """
    with Directory.open(path) as folder:
        is_merged = folder.exists(META_FILE)
        is_incremental = is_merged and _read_meta(folder)
    names = _folders_in(path, _NOTHING if is_merged else _TIMESTAMP)
    times = [] if is_merged else [name for name in names if _TIMESTAMP.fullmatch(name)]
    base = path / max(times) if times else path
    tables = _folders_in(base)
    places = {name: (((name,),) if is_merged else _rank_places(base, name)) for name in tables}
    if not places or not any(places.values()):
        raise NotFoundError(
            f"there is no checkpoint in {str(path)!r}",
            found=names[:16],
            expected="folders 'rank00000-of-...' of this Saver, or tables that RecSDK wrote",
        )
    _folders_in(base, no_links=True)
    _check_ranks(base, places)
    parts = {name: tuple(_read_part(base, place) for place in found) for name, found in places.items()}
    for found in parts.values():
        _check_distinct_over(found)
    return RecsdkCheckpoint(base=base, is_merged=is_merged, is_incremental=is_incremental, tables=parts)


@contextmanager
def folder_below(base: Path, place: Place) -> Iterator[Directory]:
    """Open a folder by its parts; a symbolic link on the way, or a missing part, is a CorruptError."""
    folder = Directory.open(base)
    for name in place:
        with folder:
            try:
                below = folder.child(name)
            except NotFoundError as error:
                raise CorruptError(f"folder {str(folder.path / name)!r} is missing") from error
        folder = below
    with folder:
        yield folder


def _read_meta(folder: Directory) -> bool:
    raw = folder.read_file(META_FILE, bytes_max=META_BYTES_MAX)
    found = [m for line in raw.decode("utf-8", errors="replace").splitlines() if (m := _INCREMENTAL.fullmatch(line))]
    if len(found) != 1:
        what = f"file {str(folder.path / META_FILE)!r} is damaged"
        raise CorruptError(what, found=raw[:80], expected="one line incremental=True or incremental=False")
    return found[0].group(1).lower() == "true"


def _folders_in(path: Path, known: re.Pattern[str] = _NOTHING, *, no_links: bool = False) -> list[str]:
    """Return the names of folders. CorruptError for anything else under a known name: it would be left out unseen.

    no_links: also for a symbolic link of any name, unless it leads to a file.
    """
    try:
        with os.scandir(path) as entries:
            found = {entry.name: entry for entry in entries}
        folders = sorted(name for name, entry in found.items() if entry.is_dir(follow_symlinks=False))
        for name in sorted(found.keys() - set(folders)):
            is_hidden_part = no_links and found[name].is_symlink() and not found[name].is_file()
            if is_hidden_part or known.fullmatch(name):
                hint = "links are not followed: put the folder itself there, or remove what does not belong there"
                raise CorruptError(f"{str(path / name)!r} is not a folder of its own", hint=hint)
    except OSError as error:
        raise io_failed(f"folder {str(path)!r} cannot be listed", error) from error
    return folders


def _rank_places(base: Path, table: str) -> tuple[Place, ...]:
    """Return the folders of the ranks of a table, in their order; none if it is not a table."""
    names = _folders_in(base / table, _RANK)
    if KEY in names:
        raise CorruptError(f"file {str(base / META_FILE)!r} of the merged table {table!r} is missing")
    ranks = {int(match.group(1)): name for name in names if (match := _RANK.fullmatch(name))}
    return tuple((table, ranks[rank]) for rank in sorted(ranks))


def _check_ranks(base: Path, places: Mapping[str, tuple[Place, ...]]) -> None:
    """Raise CorruptError unless every table has the folders of all ranks, 0 to the largest that any table has."""
    count = max(len(found) for found in places.values())
    for table, found in places.items():
        ranks = {place[1] for place in found if len(place) > 1}
        wanted = {f"rank{rank}" for rank in range(count)} if ranks or not found else set()
        if ranks != wanted:
            what = f"ranks of table {table!r} in {str(base)!r} are not complete"
            raise CorruptError(what, found=sorted(ranks), expected=f"rank0 to rank{count - 1}")


def _read_part(base: Path, place: Place) -> StoredPart:
    names = _folders_in(base.joinpath(*place), _PART, no_links=True)
    momenta = sorted(int(match.group(1)) for name in names if (match := _MOMENTUM.fullmatch(name)))
    known = {KEY, EMBEDDING, ADMIT_COUNT, EVICT_TIMESTAMP, *(f"{MOMENTUM}{number}" for number in momenta)}
    shown = str(base.joinpath(*place))
    if momenta != list(range(1, len(momenta) + 1)):
        raise CorruptError(f"momenta in {shown!r} are not complete", found=momenta)
    if any(_RANK.fullmatch(name) for name in names):
        hint = "remove the folders of the ranks if you know that RecSDK had merged them"
        raise CorruptError(f"{shown!r} holds folders of ranks: their merge did not end", hint=hint)
    if set(names) - known:
        what = f"{shown!r} holds parts that this version does not know"
        raise UnsupportedError(what, found=sorted(set(names) - known))
    keys = _array(base, (*place, KEY), INT64, is_rows=False)
    count = keys.shape[0]
    return StoredPart(
        shown=shown,
        ids=_distinct(keys.read(0, count), keys.shown),
        embedding=_array(base, (*place, EMBEDDING), FLOAT32, is_rows=True, count=count),
        momenta=tuple(
            _array(base, (*place, f"{MOMENTUM}{number}"), FLOAT32, is_rows=True, count=count) for number in momenta
        ),
        counts=_array(base, (*place, ADMIT_COUNT), INT64, is_rows=False, count=count) if ADMIT_COUNT in names else None,
        seen=_read_seen(base, (*place, EVICT_TIMESTAMP)) if EVICT_TIMESTAMP in names else None,
    )


def _array(
    base: Path, place: Place, dtype: np.dtype[np.generic], *, is_rows: bool, count: int | None = None
) -> StoredArray:
    """Check one slice.attribute and slice.data. count: number of keys that it goes with."""
    with folder_below(base, place) as folder:
        attributes = StoredArray(base, (*place, ATTRIBUTE_FILE), INT64, shape=(3 if is_rows else 2,))
        _check_size(folder, ATTRIBUTE_FILE, expected=attributes.bytes)
        item_bytes, *shape = (int(number) for number in attributes.read(0, *attributes.shape))
        shown = str(folder.path / ATTRIBUTE_FILE)
        if item_bytes != dtype.itemsize:
            raise CorruptError(f"file {shown!r} has another element size", found=item_bytes, expected=dtype.itemsize)
        if not 0 <= shape[0] <= KEYS_MAX or (is_rows and not 1 <= shape[1] <= KEYS_MAX):
            raise CorruptError(f"file {shown!r} has an impossible shape", found=shape)
        stored = StoredArray(base=base, place=(*place, DATA_FILE), dtype=dtype, shape=tuple(shape))
        _check_size(folder, DATA_FILE, expected=stored.bytes)
    if count is not None and shape[0] != count:
        raise CorruptError(f"file {stored.shown!r} does not go with its keys", found=shape[0], expected=count)
    return stored


def _check_size(folder: Directory, name: str, *, expected: int | None) -> int:
    """Return the bytes of a file. Raises CorruptError when it is missing, or has not the bytes expected."""
    shown = str(folder.path / name)
    try:
        size = folder.size(name)
    except NotFoundError as error:
        raise CorruptError(f"file {shown!r} is missing") from error
    if expected is not None and size != expected:
        raise CorruptError(f"file {shown!r} has the wrong size", found=size, expected=expected)
    return size


def _read_seen(base: Path, place: Place) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    with folder_below(base, place) as folder:
        size = _check_size(folder, EVICT_KEY_FILE, expected=None)
        _check_size(folder, EVICT_TIME_FILE, expected=size)
        if size % INT64.itemsize:
            shown = str(folder.path / EVICT_KEY_FILE)
            raise CorruptError(f"file {shown!r} has the wrong size", found=size, expected="a multiple of 8")
    count = size // INT64.itemsize
    keys, times = (
        StoredArray(base=base, place=(*place, name), dtype=INT64, shape=(count,))
        for name in (EVICT_KEY_FILE, EVICT_TIME_FILE)
    )
    return _distinct(keys.read(0, count), keys.shown), times.read(0, count).astype(np.int64, copy=False)


def _distinct(values: NDArray[np.generic], shown: str) -> NDArray[np.int64]:
    ids = values.astype(np.int64, copy=False)
    sorted_ids = np.sort(ids)
    twice = sorted_ids[1:][sorted_ids[1:] == sorted_ids[:-1]]
    if len(twice):
        raise CorruptError(f"file {shown!r} holds the same key twice", found=int(twice[0]))
    return ids


def _check_distinct_over(parts: tuple[StoredPart, ...]) -> None:
    if len(parts) > 1:
        _distinct(np.concatenate([part.ids for part in parts]), f"{parts[0].shown} to {parts[-1].shown}")
