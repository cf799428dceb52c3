"""Parquet files as tables: found, their schemas checked, and columns read in batches.

1. A file is a table of its own name. In a folder, every `NAME.parquet` is the table NAME: a file, or a folder of files
   as Spark and others write it, whose rows stand one after the other in the order of their names. A folder that holds
   nothing but parts is one table too, of the folder's name. What begins with `_` or `.` is passed over.
2. All files of a table have the same columns; `id` is one of them, int64. Of lists without a fixed size, the file's own
   counts say how long they are.
3. Columns are read one at a time, in batches, with the checksums of pages where there are such. A row that is null, and
   a list of another size, are found then. Ids are read once before, and must differ.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt.arguments import is_text
from asyncckpt.errors import CorruptError, NotFoundError, UnsupportedError, UsageError, must_be
from asyncckpt.format import limits
from asyncckpt.formats.parquet.columns import ParquetColumn, arrow_errors, columns_of, pyarrow
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.native import I64, U8, core
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.real_folder import real_folder

SUFFIX = ".parquet"
BATCH_BYTES = 8 << 20
STREAM_BYTES = 1 << 20  # Of a column, what is read at a time.


@dataclass(frozen=True)
class ParquetPart:
    """A file of a table."""

    path: Path
    rows_count: int


@dataclass(frozen=True)
class ParquetTable:
    """A table, by the files that hold its rows."""

    name: str
    columns: tuple[ParquetColumn, ...]
    parts: tuple[ParquetPart, ...]

    @property
    def rows_count(self) -> int:
        return sum(part.rows_count for part in self.parts)

    def read(self, column: ParquetColumn, begin: int, end: int) -> Iterator[U8]:
        """Yield the rows [begin, end) of a column, as their bytes. CorruptError, UnsupportedError, IOFailedError."""
        first = 0
        for part in self.parts:
            last = first + part.rows_count
            if begin < last and first < end:
                yield from _read_part(part, column, max(begin, first) - first, min(end, last) - first)
            first = last

    def check_ids(self) -> None:
        """Read the ids; CorruptError for one that comes twice. Takes 16 bytes for each row."""
        [column] = [column for column in self.columns if column.name == ID_COLUMN]
        found: list[I64] = []
        for raw in self.read(column, 0, self.rows_count):
            found.append(raw.view(np.int64).copy())
            self._check_distinct(found[-1])  # A file may say of one id that it comes ten to the power of twelve times.
        ids = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
        found.clear()
        self._check_distinct(ids)

    def digest(self, column: ParquetColumn) -> bytes:
        """Read a column and return the digest of its bytes."""
        digester = core.digester()
        for raw in self.read(column, 0, self.rows_count):
            digester.update(raw.ctypes.data, len(raw))
        return digester.end()

    @property
    def bytes(self) -> int:
        return self.rows_count * sum(column.row_bytes for column in self.columns)

    def _check_distinct(self, ids: I64) -> None:
        ids = np.sort(ids)
        twice = ids[1:][ids[1:] == ids[:-1]]
        if len(twice):
            raise CorruptError(f"table {self.name!r} holds the same id twice", found=int(twice[0]))


def parquet_tables(path: Path, columns: Mapping[str, str] | None = None) -> list[ParquetTable]:
    """Find the tables at a path and check their schemas. columns: column of a file -> column here. NotFoundError,
    CorruptError, UnsupportedError, UsageError, IOFailedError."""
    pyarrow()
    names = columns or {}
    if not isinstance(names, Mapping) or not all(isinstance(text, str) for item in names.items() for text in item):
        raise must_be("columns", "a mapping of column to column", columns)
    tables = [_table(name, files, names) for name, files in _files(path)]
    keys = {column.key for table in tables for column in table.columns}
    if names.keys() - keys:
        unknown = sorted(names.keys() - keys)
        raise UsageError("columns names columns that no table has", found=unknown, expected=sorted(keys))
    return tables


def _files(path: Path) -> list[tuple[str, list[Path]]]:
    """Return the files of every table at a path."""
    if not os.path.lexists(path):
        raise NotFoundError(f"{str(path)!r} does not exist")
    if not path.is_dir():
        return [(path.name.removesuffix(SUFFIX), [path])]
    found = _tables_in(path)
    taken = {file for _, files in found for file in files}
    left_out = [file for file in _parquet_below(path) if file not in taken]
    if left_out:
        raise UnsupportedError(
            f"{str(path)!r} holds Parquet files that would be left out",
            found=[str(file.relative_to(path)) for file in left_out[:8]],
            expected="files in one folder for each table, named *.parquet",
        )
    if not found:
        raise NotFoundError(f"there are no Parquet files in {str(path)!r}", found=_names(path)[:8])
    return found


def _parquet_below(path: Path) -> Iterator[Path]:
    """Yield what looks like a Parquet file at any depth, in the order of names; what is hidden is meant to be."""
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        yield from (Path(folder, name) for name in sorted(names) if _is_shown(name))


def _is_shown(name: str) -> bool:
    return name[0] not in "._" and name.lower().endswith(SUFFIX)


def _tables_in(path: Path) -> list[tuple[str, list[Path]]]:
    """Return the files of every table in a folder."""
    places = {name: path / name for name in _names(path)}
    files = [place for name, place in places.items() if name.endswith(SUFFIX) and not place.is_dir()]
    folders = {name.removesuffix(SUFFIX): _parts(place) for name, place in places.items() if place.is_dir()}
    if path.name.endswith(SUFFIX):
        return [(path.name.removesuffix(SUFFIX), files)]
    found = {name: parts for name, parts in folders.items() if parts}
    for file in files:
        name = file.name.removesuffix(SUFFIX)
        if name in found:
            raise UnsupportedError(f"{str(path)!r} holds two tables {name!r}", hint="give the path of one of them")
        found[name] = [file]
    return sorted(found.items())


def _names(path: Path) -> list[str]:
    with Directory.open(path) as folder:
        return sorted(name for name in folder.names() if name[0] not in "._")


def _parts(path: Path) -> list[Path]:
    return [path / name for name in _names(path) if name.endswith(SUFFIX)]


def _table(name: str, files: Sequence[Path], renamed: Mapping[str, str]) -> ParquetTable:
    """Open every file and look at its schema."""
    if not name or "@" in name or not is_text(name):
        raise UnsupportedError(f"table {name!r} cannot be imported", hint="no name may hold '@'; rename the file")
    if len(files) > limits.FILES_MAX:
        raise UnsupportedError(f"table {name!r} has too many files", found=len(files), expected=limits.FILES_MAX)
    parts: list[ParquetPart] = []
    columns: list[ParquetColumn] | None = None
    for path in files:
        with _opened(path) as (file, owner):
            rows_count = file.metadata.num_rows
            parts.append(ParquetPart(path, rows_count))
            if not rows_count and (columns is not None or path != files[-1]):
                continue  # Nobody knows how long its lists are.
            own = columns_of(file.schema_arrow, _widths(file.metadata), renamed, owner)
            if columns is not None and {c.name: c for c in own} != {c.name: c for c in columns}:
                expected, found = ([f"{c.name} {c.dtype} {list(c.row_shape)}" for c in each] for each in (columns, own))
                raise CorruptError(f"{owner} has other columns than {str(files[0])!r}", found=found, expected=expected)
            columns = own if columns is None else columns
    names = [column.name for column in columns or ()]
    if ID_COLUMN not in names or len(names) < 2:
        where = f"table {name!r} in {str(files[0]) if files else ''!r}"
        hint = "give the column of the keys this name: --column KEY=id"
        raise UnsupportedError(f"{where} has no column {ID_COLUMN!r}, or nothing else", found=names[:16], hint=hint)
    return ParquetTable(name, tuple(columns or ()), tuple(parts))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, str]]:
    """Open a file; yield what pyarrow has of it, and what it is called in messages."""
    owner = f"file {str(path)!r}"
    with real_folder(path) as (folder, name):
        fd = folder.open_file(name)
    with os.fdopen(fd, "rb") as stream, arrow_errors(owner):
        found = pyarrow().parquet.ParquetFile(
            stream, pre_buffer=False, buffer_size=STREAM_BYTES, page_checksum_verification=True
        )
        metadata = found.metadata
        counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows or metadata.num_rows > limits.I64_MAX // 8:
            raise CorruptError(f"{owner} has a wrong number of rows", found=metadata.num_rows, expected=sum(counts))
        yield found, owner


def _widths(metadata: Any) -> Mapping[str, int]:
    """Return how many numbers lists have, by the counts of the first row group that has rows."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(index) for index in range(group.num_columns)] if group.num_rows else []
        if chunks:
            names = [chunk.path_in_schema.removesuffix(".list.element").removesuffix(".list.item") for chunk in chunks]
            pairs = zip(names, chunks, strict=True)
            return {name: chunk.num_values // group.num_rows for name, chunk in pairs}
    return {}


def _read_part(part: ParquetPart, column: ParquetColumn, begin: int, end: int) -> Iterator[U8]:
    """Yield rows of a file. CorruptError when it is another one by now."""
    batch_rows = max(1, BATCH_BYTES // column.row_bytes)
    with _opened(part.path) as (file, owner):
        if file.metadata.num_rows != part.rows_count:
            raise CorruptError(f"{owner} has changed", found=file.metadata.num_rows, expected=part.rows_count)
        first = 0
        for number in range(file.num_row_groups):
            last = first + file.metadata.row_group(number).num_rows
            if begin < last and first < end:
                at = first
                batches = file.iter_batches(batch_rows, row_groups=[number], columns=[column.key], use_threads=False)
                for batch in batches:
                    low, high = max(begin, at) - at, min(end, at + len(batch)) - at
                    if low < high:
                        rows = batch.column(batch.schema.get_field_index(column.key)).slice(low, high - low)
                        yield column.to_bytes(rows, owner)
                    at += len(batch)
                    if at >= end:
                        return
                if at != last:
                    raise CorruptError(f"{owner} has fewer rows than it says", found=at - first, expected=last - first)
            first = last
