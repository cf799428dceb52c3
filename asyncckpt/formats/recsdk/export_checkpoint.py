"""Export the tables of a checkpoint of ours as RecSDK's files: with ranks merged, or with a folder for each rank.

1. Make a folder with a name of its own beside the target (commit/new_entry.py).
2. Write the arrays of every table and rank, and sync them; `meta.ini` last, where ranks are merged.
3. Open it as a checkpoint of RecSDK, which checks sizes and keys; with `verify`, compare every byte of the arrays.
4. Give the folder its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt.arguments import check_int
from asyncckpt.commit.new_entry import NewEntry
from asyncckpt.embcache.recsdk_files import (
    ADMIT_COUNT,
    ATTRIBUTE_FILE,
    DATA_FILE,
    EMBEDDING,
    EVICT_KEY_FILE,
    EVICT_TIME_FILE,
    EVICT_TIMESTAMP,
    KEY,
    META_FILE,
    MOMENTUM,
    RecsdkCheckpoint,
    read_recsdk_checkpoint,
)
from asyncckpt.errors import NotFoundError, UnsupportedError, UsageError, must_be
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import path_name
from asyncckpt.formats.conversion import Conversion, ExportReport
from asyncckpt.formats.data_files import WINDOW_BYTES
from asyncckpt.formats.exported_table import ExportedTable
from asyncckpt.formats.plain_files import OutArray, check_digest, write_plain_files, write_small_file
from asyncckpt.formats.run_export import run_export
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.source import ByteSource, SpanSource, one_behind_the_other
from asyncckpt.model.table import ID_COLUMN, Role
from asyncckpt.model.table_shard import Shard
from asyncckpt.native import I64, Progress, core
from asyncckpt.options import Durability, SaveOptions
from asyncckpt.plan.contents import Contents, contents_of
from asyncckpt.shard.reader import ChainReader
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.written_chunks import WrittenChunks
from asyncckpt.tables.embedding import COUNT_COLUMN, LAST_SEEN_COLUMN
from asyncckpt.tables.slots import EMBEDDING_COLUMN

SHARDS_MAX = 65_536
NAME_BYTES_MAX = 100
NAMES_EXPECTED = "a name of at most 100 bytes, no number of 14 digits, without '/'"


@dataclass(frozen=True)
class ExportPlan:
    """What to export, checked. folders: of every table, the folder of RecSDK of each column that it takes.

    tables, columns: those that it has no place for.
    """

    chain: Chain
    contents: Contents
    shards_count: int | None
    folders: Mapping[str, Mapping[str, str]]
    tables: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """The stored bytes, about as many as are going to be written."""
        return sum(self.chain.blocks[number].placed.spec.bytes for number in self.contents.blocks())

    @staticmethod
    def of(chain: Chain, *, shards: int | None = None, columns: Mapping[str, str] | None = None) -> ExportPlan:
        """Check everything. UsageError, UnsupportedError, CorruptError."""
        check_int("shards", shards, at_least=1, at_most=SHARDS_MAX, optional=True)
        contents = contents_of(chain)
        folders: dict[str, dict[str, str]] = {}
        tables: list[str] = []
        columns_left: list[str] = []
        for name, table in contents.tables.items():
            specs = {column: chain.blocks[blocks[0]].placed.spec for column, blocks in table.columns.items()}
            if EMBEDDING_COLUMN not in specs:
                tables.append(name)
                continue
            folders[name] = _folders_of(name, specs, columns)
            columns_left += [f"{name}@{column}" for column in specs if column not in folders[name]]
        if not folders:
            what = f"step {chain.step} has no table with embeddings, and RecSDK has nothing else"
            raise UnsupportedError(what, found=[*contents.dense, *tables][:16])
        return ExportPlan(chain, contents, shards, folders, tuple(tables), tuple(columns_left))

    def report(self, path: Path) -> ExportReport:
        """Return what is known before anything is read: rows of deltas are counted when they are folded."""
        rows = {name: sum(layer.rows_count for layer in self.contents.tables[name].layers) for name in self.folders}
        return ExportReport(
            self.chain.step,
            path,
            rows=rows,
            left_out=tuple(map(path_name, self.contents.values)),
            tables=self.tables,
            left_out_tensors=tuple(self.contents.dense),
            left_out_columns=self.columns,
            shards_count=self.shards_count,
            bytes_written=self.bytes,
        )


def export_checkpoint(
    path: str | os.PathLike[str],
    recsdk_dir: str | os.PathLike[str],
    *,
    step: int | None = None,
    shards: int | None = None,
    columns: Mapping[str, str] | None = None,
    durability: Durability = "fsync",
    verify: bool = True,
) -> ExportReport:
    """Write the tables of a checkpoint (default: the newest) as RecSDK reads them; they are there all at once, or not.

    recsdk_dir  is made, with its parents; ConflictError when there is something under this name
    shards      None: ranks merged, and `meta.ini`, as RecSDK has it since 2026. A number: that of rank folders, as it
                had them before; a rank has the ids whose unsigned value modulo their number is the rank
    columns     momentum -> optimizer slot, as {"momentum1": "sum"}; None: all slots in their order
    verify      read all of it once more before it gets its name, and compare

    Ids are `key`, the embedding is `embedding`, slots are `momentum1`, `momentum2`, ..., `count` is `admit_count`, and
    `last_seen` is `evict_timestamp`, without the ids of which it is 0. What has no place there is left out, and
    reported. Nothing is under the name when an error is raised: NotFoundError, CorruptError, UsageError,
    UnsupportedError for rows that are not float32, for names and where no table has embeddings, IOFailedError; but
    IndeterminateError says that it is there, and perhaps not durable. Takes 300 MiB, 16 to 40 bytes for each row of the
    largest table, and in the end, when it is opened, as much for each row of all tables as an import of it.
    """
    asked = Conversion.of(path, recsdk_dir, step, durability=durability, verify=verify)
    return export(asked, shards=shards, columns=columns)


def export(asked: Conversion, **names: Any) -> ExportReport:
    """Do the same, as it is asked for."""
    plan, (rows, size, reused), seconds = run_export(asked, partial(ExportPlan.of, **names), partial(_write, asked))
    report: ExportReport = plan.report(asked.exported)
    return replace(report, rows=rows, bytes_written=size, reused_bytes=reused, seconds=seconds)


def _write(asked: Conversion, plan: ExportPlan, reader: ChainReader, identity: str) -> tuple[dict[str, int], int, int]:
    """Write the folder and give it its name; return the rows of every table, the bytes of all data, and how many of
    them were there already."""
    asked.expect(plan.bytes)
    with NewEntry(asked.exported, kind="recsdk", durability=asked.options.durability) as entry:
        writer = _Writer(entry.make_folder(identity), asked.options, asked.progress, entry.written)
        rows = writer.write(plan, reader)
        entry.sync()
        found = read_recsdk_checkpoint(entry.temporary)
        if asked.verify:
            writer.check(found, asked.exported)
        entry.give_name(lambda: _is_there(asked.exported))
    return rows, writer.bytes_written, 0 if entry.written is None else entry.written.reused_bytes


class _Writer:
    """Writes tables below a folder. digests: of every array, by its path below."""

    def __init__(
        self, folder: Directory, options: SaveOptions, progress: Progress, written: WrittenChunks | None
    ) -> None:
        self._written = written
        self._folder, self._options, self._progress = folder, options, progress
        self.digests: dict[str, bytes] = {}
        self.bytes_written = 0

    def write(self, plan: ExportPlan, reader: ChainReader) -> dict[str, int]:
        """Write all tables; return the rows of each."""
        rows: dict[str, int] = {}
        for name, folders in plan.folders.items():
            exported = ExportedTable(plan.contents.tables[name], reader)
            rows[name] = 0
            with _made(self._folder, name) as table:
                if plan.shards_count is None:
                    rows[name] = self._write_part(table, (name,), exported, folders, (0, 1))
                for rank in range(plan.shards_count or 0):
                    with _made(table, f"rank{rank}") as part:
                        place, shard = (name, f"rank{rank}"), (rank, plan.shards_count or 1)
                        rows[name] += self._write_part(part, place, exported, folders, shard)
                self._sync(table)
        if plan.shards_count is None:
            write_small_file(self._folder, META_FILE, b"incremental=False\n", self._options)
        return rows

    def check(self, found: RecsdkCheckpoint, path: Path) -> None:
        """Read all of it once more and compare. path: what it is going to be. CorruptError."""
        arrays = [array for parts in found.tables.values() for part in parts for array in part.arrays if array.bytes]
        for array in arrays:
            digester, step = core.digester(), max(1, WINDOW_BYTES // array.row_bytes)
            for begin in range(0, array.shape[0], step):
                window = array.read(begin, min(begin + step, array.shape[0]))
                digester.update(window.ctypes.data, window.nbytes)
                self._progress.advance(window.nbytes)
            check_digest("/".join(array.place), digester.end(), self.digests, path)

    def _write_part(
        self,
        folder: Directory,
        place: tuple[str, ...],
        exported: ExportedTable,
        folders: Mapping[str, str],
        shard: Shard,
    ) -> int:
        """Write the rows of one shard; return how many."""
        count = 0
        for column, spec, source in exported.columns(shard):
            if column not in folders:
                continue
            count = spec.shape[0]
            name = folders[column]
            with _made(folder, name) as below:
                if name == EVICT_TIMESTAMP:
                    [keys] = [_read(own, ids) for each, own, ids in exported.columns(shard) if each == ID_COLUMN]
                    times = _read(spec, source)
                    seen = np.flatnonzero(times)  # An id of 0 has none: RecSDK would take it for the oldest of all.
                    own = replace(spec, shape=seen.shape, stored_shape=seen.shape)
                    for file, values in ((EVICT_KEY_FILE, keys[seen]), (EVICT_TIME_FILE, times[seen])):
                        held = SpanSource(values.ctypes.data, values)
                        self._write_array(below, (*place, name, file), own, held)
                else:
                    numbers = np.array([spec.stored_itemsize, *spec.shape], dtype="<i8")
                    write_small_file(below, ATTRIBUTE_FILE, numbers.tobytes(), self._options)
                    self._write_array(below, (*place, name, DATA_FILE), spec, source)
                self._sync(below)
        self._sync(folder)
        return count

    def _write_array(self, folder: Directory, place: tuple[str, ...], spec: BlockSpec, source: ByteSource) -> None:
        key, name = "/".join(place), place[-1]
        if not spec.bytes:
            write_small_file(folder, name, b"", self._options)
            return
        array = OutArray(key, spec.stored_dtype, spec, source)
        written = write_plain_files(
            [(name, [array])], folder, self._options, self._progress, written=self._written, has_header=False
        )
        self.digests |= written.digests
        self.bytes_written += written.bytes_count

    def _sync(self, folder: Directory) -> None:
        if self._options.durability == "fsync":
            folder.sync()


def _made(folder: Directory, name: str) -> Directory:
    """Make a folder, which may be left of an export that was killed."""
    return folder.child(name) if folder.has_folder(name) else folder.make_folder(name)


def _read(spec: BlockSpec, source: ByteSource) -> I64:
    """Read int64 numbers, all of them."""
    values = np.empty(spec.shape[0], dtype=np.int64)
    for begin in range(0, spec.bytes, WINDOW_BYTES):
        pieces = source.pieces(begin, min(begin + WINDOW_BYTES, spec.bytes))
        core.copy(one_behind_the_other(pieces, values.ctypes.data + begin))
        source.release()
    return values


def _folders_of(table: str, specs: Mapping[str, BlockSpec], columns: Mapping[str, str] | None) -> dict[str, str]:
    """Return the folder of every column that RecSDK has a place for. UsageError, UnsupportedError."""
    is_bad = "/" in table or "\\" in table or "\0" in table or table in ("", ".", "..", META_FILE)
    if is_bad or len(table.encode()) > NAME_BYTES_MAX or (len(table) == 14 and table.isdecimal()):
        raise UnsupportedError(f"table {table!r} cannot be written for RecSDK", expected=NAMES_EXPECTED)
    slots = [column for column, spec in specs.items() if spec.role is Role.OPTIMIZER]
    chosen = slots if columns is None else _chosen(columns, slots, table)
    for column in (EMBEDDING_COLUMN, *chosen):
        spec = specs[column]
        if spec.dtype != "float32" or len(spec.shape) != 2:
            what = f"column {column!r} of table {table!r} has rows that RecSDK does not have"
            hint = None if column == EMBEDDING_COLUMN else "columns={'momentum1': ...} chooses slots"
            raise UnsupportedError(what, found=(spec.dtype, spec.shape[1:]), expected="float32 [dim]", hint=hint)
    folders = {ID_COLUMN: KEY, EMBEDDING_COLUMN: EMBEDDING}
    folders |= {column: f"{MOMENTUM}{number}" for number, column in enumerate(chosen, 1)}
    for column, folder in ((COUNT_COLUMN, ADMIT_COUNT), (LAST_SEEN_COLUMN, EVICT_TIMESTAMP)):
        if column in specs and specs[column].dtype == "int64" and len(specs[column].shape) == 1:
            folders[column] = folder
    return folders


def _chosen(columns: Mapping[str, str], slots: Sequence[str], table: str) -> list[str]:
    is_text = isinstance(columns, Mapping) and all(isinstance(text, str) for item in columns.items() for text in item)
    names = [f"{MOMENTUM}{number}" for number in range(1, len(columns) + 1)] if is_text else []
    if not is_text or set(columns) != set(names):
        raise must_be("columns", "a mapping of momentum1, momentum2, ... to slots", columns)
    chosen = [columns[name] for name in names]
    if not set(chosen) <= set(slots) or len(set(chosen)) != len(chosen):
        raise UsageError(f"columns does not name optimizer slots of table {table!r}", found=chosen, expected=slots)
    return chosen


def _is_there(path: Path) -> bool:
    """Return whether a checkpoint is there, and complete."""
    try:
        read_recsdk_checkpoint(path)
    except NotFoundError:
        return False
    return True
