"""Make a checkpoint of ours of one of RecSDK's: the parts of all ranks become one table, block by block.

Which ids a rank of RecSDK holds is its own business, so the tables are whole ones, of one rank; they load into any
number of ranks. Admission counts and eviction timestamps, which stand otherwise there, are put in order when they are
read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncckpt.embcache.recsdk_files import EMBEDDING, MOMENTUM, StoredPart, read_recsdk_checkpoint
from asyncckpt.errors import CorruptError, UnsupportedError, UsageError, must_be
from asyncckpt.format.manifest import BlockFacts, RankPart
from asyncckpt.formats.commit_import import Importable, run_import
from asyncckpt.formats.conversion import Conversion
from asyncckpt.formats.foreign_chain import WHOLE, table_spec, unplaced
from asyncckpt.model.block import TableFacts
from asyncckpt.model.result import SaveResult
from asyncckpt.model.source import RowsSource
from asyncckpt.model.table import ID_COLUMN, Role
from asyncckpt.native import U8
from asyncckpt.options import Durability
from asyncckpt.plan.image import split_rows
from asyncckpt.tables.embedding import COUNT_COLUMN, LAST_SEEN_COLUMN
from asyncckpt.tables.slots import EMBEDDING_COLUMN

RESERVED = (ID_COLUMN, EMBEDDING_COLUMN, COUNT_COLUMN, LAST_SEEN_COLUMN)


def import_checkpoint(
    recsdk_dir: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    columns: Mapping[str, str] | None = None,
    durability: Durability = "fsync",
    parallel: int = 8,
    verify: bool = True,
) -> SaveResult:
    """Save what RecSDK wrote (a folder for each rank, or ranks merged) as a step of a directory of asyncckpt.

    step      None: one more than the newest
    columns   momentum of RecSDK -> optimizer slot, as {"momentum1": "sum"}; without it they keep RecSDK's names
    parallel  shard files at most
    verify    read the new step once more, and compare it with what was copied

    `key` is the id, `embedding` the embedding, `admit_count` the metadata `count` (none is 0), `evict_timestamp` the
    metadata `last_seen` (of ids without one 0). Nothing is committed when an error is raised: NotFoundError,
    CorruptError, UnsupportedError (also for files that hold only a part of the rows), UsageError, ConflictError,
    IndeterminateError, IOFailedError. Waits while a save or load of this process is in flight. Takes 300 MiB, 8 bytes
    for each row of all tables and 24 for each timestamp, and in the beginning 8 more for each row of the largest table.
    """
    asked = Conversion.of(recsdk_dir, path, step, durability=durability, parallel=parallel, verify=verify)
    return run_import(asked, open_import(asked, columns=columns))[0]


@contextmanager
def open_import(asked: Conversion, *, columns: Mapping[str, str] | None = None) -> Iterator[Importable]:
    """Look at what is to be imported; its files are opened when they are read. NotFoundError, CorruptError,
    UnsupportedError, UsageError, IOFailedError."""
    found = read_recsdk_checkpoint(asked.foreign)
    if found.is_incremental:
        what = f"checkpoint in {str(asked.foreign)!r} holds only rows that were used since an earlier save"
        raise UnsupportedError(what, hint="load the full one and then this one with asyncckpt.embcache, and save that")
    momenta = {name: len(parts[0].momenta) for name, parts in found.tables.items()}
    slots = _slots(columns, max(momenta.values(), default=0))
    blocks: list[tuple[BlockFacts, RowsSource]] = []
    rows: dict[str, int] = {}
    for name, parts in found.tables.items():
        _check_name(name, asked.foreign)
        if {len(part.momenta) for part in parts} != {momenta[name]}:
            what = f"table {name!r} in {str(asked.foreign)!r} has not as many momenta in each rank"
            raise CorruptError(what, found=[len(part.momenta) for part in parts])
        rows[name] = sum(len(part.ids) for part in parts)
        blocks += [block for column in _columns(name, parts, slots) for block in _blocks(name, column)]
    tables = tuple(TableFacts(name=name, rows_count=count, shard=WHOLE) for name, count in rows.items())
    own = tuple(block for block, _ in blocks)
    part = RankPart(rank=0, tables=tables, tree=("dict", (), ()), values=(), blocks=own)
    facts = {
        "tables": rows,
        "tensors": 0,
        "shards": max(map(len, found.tables.values())),
        "bytes": sum(block.placed.spec.bytes for block in own),
    }
    yield Importable([part], lambda number: blocks[number][1], facts, asked.step)


@dataclass(frozen=True)
class _Rows:
    """Rows of a column that one rank has written: `read(begin, end)` returns some of them."""

    count: int
    read: Callable[[int, int], NDArray[np.generic]]

    def bytes_from(self, first: int, begin: int, end: int) -> U8:
        """Return rows [first + begin, first + end)."""
        return np.ascontiguousarray(self.read(first + begin, first + end)).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class _Column:
    name: str
    role: Role
    dtype: str
    row_shape: tuple[int, ...]
    parts: Sequence[_Rows]


def _slots(columns: Mapping[str, str] | None, momenta_count: int) -> dict[str, str]:
    """Return the column of every momentum. UsageError."""
    slots = {f"{MOMENTUM}{number}": f"{MOMENTUM}{number}" for number in range(1, momenta_count + 1)}
    if columns is None:
        return slots
    if not isinstance(columns, Mapping) or not all(isinstance(text, str) for item in columns.items() for text in item):
        raise must_be("columns", "a mapping of momentum to column", columns)
    unknown = sorted(columns.keys() - slots.keys())
    if unknown:
        raise UsageError("columns names momenta that no table has", found=unknown, expected=sorted(slots))
    slots |= columns
    taken = list(slots.values())
    wrong = [name for name in taken if not name or "@" in name or name[0] == "#" or name in RESERVED]
    if wrong or len(set(taken)) != len(taken):
        raise UsageError("columns has no fitting names", found=dict(columns), expected="names of optimizer slots")
    return slots


def _check_name(name: str, path: Path) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorruptError(f"folder {name!r} in {str(path)!r} has a name that is not UTF-8") from error
    if "@" in name:
        raise UnsupportedError(f"table {name!r} in {str(path)!r} cannot be imported", hint="no name may hold '@'")


def _columns(name: str, parts: Sequence[StoredPart], slots: Mapping[str, str]) -> Iterator[_Column]:
    yield _Column(ID_COLUMN, Role.ID, "int64", (), [_ids(part) for part in parts])
    wanted = [(EMBEDDING, EMBEDDING_COLUMN, Role.WEIGHT, [part.embedding for part in parts])]
    for number in range(len(parts[0].momenta)):
        momentum = f"{MOMENTUM}{number + 1}"
        wanted.append((momentum, slots[momentum], Role.OPTIMIZER, [part.momenta[number] for part in parts]))
    for stored, column, role, arrays in wanted:
        widths = {array.shape[1] for array in arrays}
        if len(widths) > 1:
            what = f"{stored} of table {name!r} has not rows of one size in each rank"
            raise CorruptError(what, found=sorted(widths))
        yield _Column(column, role, "float32", arrays[0].shape[1:], [_Rows(a.shape[0], a.read) for a in arrays])
    if any(part.counts is not None for part in parts):
        yield _Column(COUNT_COLUMN, Role.METADATA, "int64", (), [_counts(part) for part in parts])
    if any(part.seen is not None for part in parts):
        yield _Column(LAST_SEEN_COLUMN, Role.METADATA, "int64", (), [_times(part) for part in parts])


def _ids(part: StoredPart) -> _Rows:
    return _Rows(len(part.ids), lambda begin, end: part.ids[begin:end])


def _counts(part: StoredPart) -> _Rows:
    """Return the counts of a part; -1 means that there is none."""
    counts = part.counts
    if counts is None:
        return _Rows(len(part.ids), lambda begin, end: np.zeros(end - begin, dtype=np.int64))
    return _Rows(len(part.ids), lambda begin, end: np.maximum(counts.read(begin, end).astype(np.int64), 0))


def _times(part: StoredPart) -> _Rows:
    """Return the timestamps in the order of the ids; 0 for those that have none."""
    keys, times = part.seen or (part.ids[:0], part.ids[:0])
    order = cache(lambda: np.argsort(keys))

    def read(begin: int, end: int) -> NDArray[np.generic]:
        ids, found = part.ids[begin:end], np.zeros(end - begin, dtype=np.int64)
        if len(keys):
            place = order()[np.minimum(np.searchsorted(keys, ids, sorter=order()), len(keys) - 1)]
            known = keys[place] == ids
            found[known] = times[place[known]]
        return found

    return _Rows(len(part.ids), read)


def _blocks(table: str, column: _Column) -> Iterator[tuple[BlockFacts, RowsSource]]:
    """Return the blocks of a column with their bytes: the rows of all parts, one after the other."""
    rows_count = sum(part.count for part in column.parts)
    whole = table_spec(table, column.name, column.dtype, (rows_count, *column.row_shape), column.role)
    begin = 0
    for part in [part for part in column.parts if part.count] or column.parts[:1]:
        for spec in split_rows(whole.part(begin, begin + part.count)):
            fetch = partial(part.bytes_from, spec.row_begin - begin)
            yield unplaced(spec), RowsSource(fetch, row_bytes=whole.bytes // max(1, rows_count))
        begin += part.count
