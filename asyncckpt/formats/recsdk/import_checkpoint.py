"""Make a checkpoint of ours of one of RecSDK's: the parts of all ranks become one table, block by block.

Which ids a rank of RecSDK holds is its own business, so the tables are whole ones, of one rank; they load into any
number of ranks. Admission counts and eviction timestamps, which stand otherwise there, are put in order in memory and
in a file without a name: 16 bytes for each row.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asyncckpt.arguments import check_choice, check_int, check_type
from asyncckpt.embcache.recsdk_files import ADMIT_COUNT, EMBEDDING, KEY, MOMENTUM
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.errors import CorruptError, UnsupportedError, UsageError
from asyncckpt.format.dtypes import known_dtype
from asyncckpt.format.limits import check_step
from asyncckpt.format.manifest import BlockFacts, Chain, RankPart
from asyncckpt.formats.commit_import import check_is_apart, commit_import, verify_import
from asyncckpt.formats.data_files import DataFiles, FileArray
from asyncckpt.formats.foreign_chain import ForeignReader, chain_of, placed_blocks
from asyncckpt.formats.recsdk.open_files import OpenPart, OpenRecsdk
from asyncckpt.model.block import BlockSpec, TableFacts
from asyncckpt.model.result import SaveResult
from asyncckpt.model.table import ID_COLUMN, Role
from asyncckpt.model.table_shard import slice_info
from asyncckpt.native import I64, Progress
from asyncckpt.options import DURABILITIES, PARALLEL_MAX, Durability, SaveOptions
from asyncckpt.shard.reader import READ_THREADS
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import check_path
from asyncckpt.tables.embedding import COUNT_COLUMN, LAST_SEEN_COLUMN
from asyncckpt.tables.slots import EMBEDDING_COLUMN

WHOLE = (0, 1)
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
    IndeterminateError, IOFailedError. Waits while a save or load of this process is in flight. Takes 300 MiB, 50 bytes
    for each row of all tables, and 4 open files for each rank of a table, more where there are more columns.
    """
    check_choice("durability", durability, DURABILITIES)
    check_int("parallel", parallel, at_least=1, at_most=PARALLEL_MAX)
    check_type("verify", verify, bool)
    options = SaveOptions(durability=durability, parallel=parallel)
    source, target = check_path(recsdk_dir), check_path(path)
    return run_import(source, target, check_step(step), columns, options, Progress(), verify=verify)


@uninterrupted
def run_import(
    source: Path,
    path: Path,
    step: int | None,
    columns: Mapping[str, str] | None,
    options: SaveOptions,
    progress: Progress,
    *,
    verify: bool,
) -> SaveResult:
    """Do the same, with arguments that are checked, and say how far it is."""
    begun = time.perf_counter()
    check_is_apart(source, path)
    with OpenRecsdk.open(source) as opened:
        try:
            chain = import_chain(opened, columns, _scratch_file(path))
        except (OSError, MemoryError) as error:
            raise as_checkpoint_error(error, step) from error
        with ForeignReader(opened.files, opened.folder, chain, threads=READ_THREADS, progress=Progress()) as reader:
            result = commit_import(path, step, chain, reader, options, progress)
    if verify:
        verify_import(path, result.step, progress)
    return replace(result, seconds=time.perf_counter() - begun)


def import_chain(opened: OpenRecsdk, columns: Mapping[str, str] | None, made_in: int) -> Chain:
    """Return the checkpoint as it is going to be imported. UnsupportedError, UsageError, CorruptError; OSError of what
    is written.

    made_in: the descriptor of an empty file, or of os.devnull where nothing is going to be read; it is closed with the
    others.
    """
    made = _Made(opened.files, made_in)
    if opened.found.is_incremental:
        what = f"checkpoint in {str(opened.path)!r} holds only rows that were used since an earlier save"
        raise UnsupportedError(what, hint="load the full one and then this one with asyncckpt.embcache, and save that")
    momenta = {name: len(parts[0].stored.momenta) for name, parts in opened.tables.items()}
    slots = _slots(columns, max(momenta.values(), default=0))
    blocks: list[BlockFacts] = []
    facts: list[TableFacts] = []
    for name, parts in opened.tables.items():
        _check_name(name, opened.path)
        if {len(part.stored.momenta) for part in parts} != {momenta[name]}:
            what = f"table {name!r} in {str(opened.path)!r} has not as many momenta in each rank"
            raise CorruptError(what, found=[len(part.stored.momenta) for part in parts])
        found = list(_columns(name, parts, slots, made))
        blocks += [block for column in found for block in _blocks(name, column)]
        rows_count = sum(len(part.stored.ids) for part in parts)
        facts.append(TableFacts(name=name, rows_count=rows_count, shard=WHOLE))
    part = RankPart(rank=0, tables=tuple(facts), tree=("dict", (), ()), values=(), blocks=tuple(blocks))
    return chain_of([part], opened.files, step=0, writer="RecSDK")


def _scratch_file(path: Path) -> int:
    """Make a file without a name on the disk where a directory is, or is going to be; return its descriptor."""
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


@dataclass(frozen=True)
class _Column:
    name: str
    role: Role
    arrays: Sequence[FileArray]


class _Made:
    """Arrays that are made, in a file without a name behind those of RecSDK."""

    def __init__(self, files: DataFiles, fd: int) -> None:
        self._files, self._fd, self._number = files, fd, len(files.fds)
        files.names.append("made")
        files.fds.append(fd)
        files.sizes.append(0)
        files.direct.append(False)

    def add(self, values: I64) -> FileArray:
        begin = self._files.sizes[self._number]
        with os.fdopen(os.dup(self._fd), "wb") as file:
            file.seek(begin)
            file.write(values.tobytes())
        self._files.sizes[self._number] += values.nbytes
        dtype = known_dtype("int64")
        assert dtype is not None
        return FileArray(f"made/{begin}", self._number, dtype, values.shape, begin, values.nbytes)


def _slots(columns: Mapping[str, str] | None, momenta_count: int) -> dict[str, str]:
    """Return the column of every momentum. UsageError."""
    slots = {f"{MOMENTUM}{number}": f"{MOMENTUM}{number}" for number in range(1, momenta_count + 1)}
    if columns is None:
        return slots
    if not isinstance(columns, Mapping) or not all(isinstance(text, str) for item in columns.items() for text in item):
        raise UsageError("columns is no mapping of momentum to column", found=columns)
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
        raise CorruptError(f"folder {name!r} in {str(path)!r} has a name that is no UTF-8") from error
    if "@" in name:
        raise UnsupportedError(f"table {name!r} in {str(path)!r} cannot be imported", hint="no name may hold '@'")


def _columns(name: str, parts: Sequence[OpenPart], slots: Mapping[str, str], made: _Made) -> Iterator[_Column]:
    yield _Column(ID_COLUMN, Role.ID, [part.arrays[KEY] for part in parts])
    widths = {part.stored.embedding.shape[1] for part in parts}
    momenta = [f"{MOMENTUM}{number}" for number in range(1, len(parts[0].stored.momenta) + 1)]
    for stored, column, role in (
        (EMBEDDING, EMBEDDING_COLUMN, Role.WEIGHT),
        *((momentum, slots[momentum], Role.OPTIMIZER) for momentum in momenta),
    ):
        arrays = [part.arrays[stored] for part in parts]
        widths = {array.shape[1] for array in arrays}
        if len(widths) > 1:
            what = f"{stored} of table {name!r} has not rows of one size in each rank"
            raise CorruptError(what, found=sorted(widths))
        yield _Column(column, role, arrays)
    if any(ADMIT_COUNT in part.arrays for part in parts):
        yield _Column(COUNT_COLUMN, Role.METADATA, [made.add(_counts(part)) for part in parts])
    if any(part.stored.seen is not None for part in parts):
        yield _Column(LAST_SEEN_COLUMN, Role.METADATA, [made.add(_times(part)) for part in parts])


def _counts(part: OpenPart) -> I64:
    """Return the counts of a part; -1 means that there is none."""
    stored = part.stored
    if stored.counts is None:
        return np.zeros(len(stored.ids), dtype=np.int64)
    return np.maximum(stored.counts.read(0, len(stored.ids)).astype(np.int64), 0)


def _times(part: OpenPart) -> I64:
    """Return the timestamps in the order of the ids; 0 for those that have none."""
    ids, found = part.stored.ids, np.zeros(len(part.stored.ids), dtype=np.int64)
    keys, times = part.stored.seen or (ids[:0], ids[:0])
    if len(keys):
        order = np.argsort(keys)
        place = order[np.minimum(np.searchsorted(keys, ids, sorter=order), len(keys) - 1)]
        known = keys[place] == ids
        found[known] = times[place[known]]
    return found


def _blocks(table: str, column: _Column) -> Iterator[BlockFacts]:
    """Return the blocks of a column: the rows of all parts, one behind the other."""
    first = column.arrays[0]
    rows_count = sum(array.shape[0] for array in column.arrays)
    shape = (rows_count, *first.shape[1:])
    whole = BlockSpec(
        name=f"{table}@{column.name}",
        role=column.role,
        dtype=first.dtype.name,
        stored_dtype=first.dtype.stored,
        stored_itemsize=first.dtype.itemsize,
        shape=shape,
        stored_shape=shape,
        table=table,
        column=column.name,
        slice_info=slice_info(WHOLE),
    )
    begin = 0
    for array in [array for array in column.arrays if array.shape[0]] or [first]:
        yield from placed_blocks(whole.part(begin, begin + array.shape[0]), array)
        begin += array.shape[0]
