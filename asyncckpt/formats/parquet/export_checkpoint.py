"""Export the tables of a checkpoint of ours as Parquet files: one of every table, deltas folded, encodings undone.

1. Make a folder with a name of its own beside the target (commit/new_entry.py).
2. Write `TABLE.parquet` for each table, group of rows by group of rows, with checksums of the pages, and sync it.
3. Open them as an import would, which checks the schemas; with `verify`, compare every byte of the columns.
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

from asyncckpt import system
from asyncckpt.commit.new_entry import NewEntry
from asyncckpt.errors import NotFoundError, UnsupportedError, UsageError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import path_name
from asyncckpt.formats.conversion import Conversion, ExportReport, warn_of_left_out
from asyncckpt.formats.exported_table import ExportedTable
from asyncckpt.formats.foreign_chain import WHOLE
from asyncckpt.formats.parquet.columns import ParquetColumn, pyarrow, schema_of
from asyncckpt.formats.parquet.files import SUFFIX, parquet_tables
from asyncckpt.formats.plain_files import check_digest
from asyncckpt.formats.run_export import run_export
from asyncckpt.model.source import ByteSource, one_behind_the_other
from asyncckpt.native import U8, core
from asyncckpt.options import Durability
from asyncckpt.plan.contents import Contents, contents_of
from asyncckpt.shard.reader import ChainReader
from asyncckpt.storage.directory import Directory, io_failed

GROUP_BYTES = 32 << 20
NAME_BYTES_MAX = 240


@dataclass(frozen=True)
class ExportPlan:
    """What to export, checked. tables: the columns of each."""

    chain: Chain
    contents: Contents
    tables: Mapping[str, Sequence[ParquetColumn]]

    @staticmethod
    def of(chain: Chain) -> ExportPlan:
        """Check everything. UnsupportedError, CorruptError."""
        pyarrow()
        contents = contents_of(chain)
        for name, dtype in contents.unreadable.items():
            dtype_by_name(dtype, owner=name)
        if not contents.tables:
            what = f"step {chain.step} has no tables, and dense tensors have no place in Parquet files"
            raise UnsupportedError(what, hint="export hf, torch or dcp has them")
        tables: dict[str, list[ParquetColumn]] = {}
        for name, table in contents.tables.items():
            is_long = len(name.encode()) > NAME_BYTES_MAX
            if name[:1] in ("", ".", "_") or "/" in name or "\\" in name or "\0" in name or is_long:
                expected = f"a name of at most {NAME_BYTES_MAX} bytes, without '/', that begins with a letter"
                raise UnsupportedError(
                    f"table {name!r} cannot be the name of a file", expected=expected, hint="--rename OLD=NEW"
                )
            specs = [(column, chain.blocks[blocks[0]].placed.spec) for column, blocks in table.columns.items()]
            tables[name] = [ParquetColumn(column, spec.role, spec.dtype, spec.shape[1:]) for column, spec in specs]
            schema_of(tables[name])
        return ExportPlan(chain, contents, tables)

    def report(self, path: Path) -> ExportReport:
        """Return what is known before anything is read: rows of deltas are counted when they are folded. UsageError."""
        if path.name.endswith(SUFFIX):
            what = "readers take a folder of this name for one table in several files"
            raise UsageError(what, found=path.name, expected=f"a name that does not end in {SUFFIX!r}")
        rows = {name: sum(layer.rows_count for layer in own.layers) for name, own in self.contents.tables.items()}
        size = sum(rows[name] * sum(column.row_bytes for column in own) for name, own in self.tables.items())
        return ExportReport(
            self.chain.step,
            path,
            rows=rows,
            left_out=tuple(path_name(at) for at in self.contents.values),
            left_out_tensors=tuple(self.contents.dense),
            files_count=len(rows),
            bytes_written=size,
        )


def export_checkpoint(
    path: str | os.PathLike[str],
    parquet_dir: str | os.PathLike[str],
    *,
    step: int | None = None,
    durability: Durability = "fsync",
    verify: bool = True,
) -> ExportReport:
    """Write the tables of a checkpoint (default: the newest) as Parquet files that are there all at once, or not.

    parquet_dir  is made, with its parents; ConflictError when there is something under this name
    verify       read all of it once more before it gets its name, and compare

    Each table is a file `TABLE.parquet`: the columns `id`, `embedding`, slots of the optimizer and metadata, as numbers
    and lists of a fixed size. Dense tensors and plain values have no place there: they are left out, and reported, and
    tensors with a RuntimeWarning. Nothing is under the name when an error is raised: NotFoundError, CorruptError,
    UnsupportedError for dtypes and names that cannot be written and where pyarrow is missing, UsageError,
    IOFailedError; but IndeterminateError says that it is there, and perhaps not durable. Takes 300 MiB, and of chains
    and tables of several ranks 8 to 24 bytes for each row of the largest table.
    """
    asked = Conversion.of(path, parquet_dir, step, durability=durability, verify=verify)
    report = export(asked)
    warn_of_left_out("tensors", report.left_out_tensors, "Parquet")
    return report


def export(asked: Conversion) -> ExportReport:
    """Do the same, as it is asked for. Warns of nothing."""
    plan, (rows, size), seconds = run_export(asked, ExportPlan.of, partial(_write, asked))
    report: ExportReport = plan.report(asked.exported)
    return replace(report, rows=rows, bytes_written=size, seconds=seconds)


def _write(asked: Conversion, plan: ExportPlan, reader: ChainReader, _: str) -> tuple[dict[str, int], int]:
    """Write the folder and give it its name; return the rows of every table, and the bytes of the files."""
    asked.expect(plan.report(asked.exported).bytes_written)
    with NewEntry(asked.exported, kind="parquet", durability=asked.options.durability) as entry:
        folder = entry.make_folder()
        rows: dict[str, int] = {}
        digests: dict[str, bytes] = {}
        size = 0
        for name, columns in plan.tables.items():
            table = ExportedTable(plan.contents.tables[name], reader)
            own, written = _write_table(folder, f"{name}{SUFFIX}", table, columns, asked)
            digests |= {f"{name}@{column}": digest for column, digest in own.items()}
            rows[name], size = table.rows_count, size + written
        entry.sync()
        for found in parquet_tables(entry.temporary):
            for column in found.columns if asked.verify else ():
                check_digest(f"{found.name}@{column.name}", found.digest(column), digests, asked.exported)
                asked.progress.advance(found.rows_count * column.row_bytes)
        entry.give_name(lambda: _is_there(asked.exported))
    return rows, size


def _write_table(
    folder: Directory, name: str, table: ExportedTable, columns: Sequence[ParquetColumn], asked: Conversion
) -> tuple[dict[str, bytes], int]:
    """Write one file; return the digests of its columns, and its bytes."""
    arrow, schema = pyarrow(), schema_of(columns)
    forms = {column.name: column for column in columns}
    sources = [(forms[column], source) for column, _, source in table.columns(WHOLE)]
    digesters = {column.name: core.digester() for column in columns}
    group_rows = max(1, GROUP_BYTES // sum(column.row_bytes for column in columns))
    shown = repr(str(folder.path / name))
    try:
        with os.fdopen(folder.create_file(name)[0], "wb") as file:
            options: dict[str, Any] = {"use_dictionary": False, "write_page_checksum": True, "write_statistics": False}
            with arrow.parquet.ParquetWriter(file, schema, **options) as writer:
                for begin in range(0, table.rows_count, group_rows):
                    end = min(begin + group_rows, table.rows_count)
                    arrays = []
                    for column, source in sources:
                        raw = _taken(source, begin * column.row_bytes, end * column.row_bytes)
                        digesters[column.name].update(raw.ctypes.data, len(raw))
                        arrays.append(column.to_arrow(raw))
                        asked.progress.advance(len(raw))
                    writer.write_table(arrow.Table.from_arrays(arrays, schema=schema), row_group_size=end - begin)
            file.flush()
            if asked.options.durability == "fsync":
                system.fsync(file.fileno())
            system.forget_pages(file.fileno())
            size = file.tell()
    except OSError as error:
        raise io_failed(f"file {shown} cannot be written", error) from error
    return {column: digester.end() for column, digester in digesters.items()}, size


def _taken(source: ByteSource, begin: int, end: int) -> U8:
    """Return bytes of a source."""
    raw = np.empty(end - begin, dtype=np.uint8)
    if len(raw):
        core.copy(one_behind_the_other(source.pieces(begin, end), raw.ctypes.data))
        source.release()
    return raw


def _is_there(path: Path) -> bool:
    """Return whether a folder is there, and complete."""
    try:
        parquet_tables(path)
    except NotFoundError:
        return False
    return True
