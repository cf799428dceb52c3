"""Import tables out of Parquet files as a checkpoint of ours, column by column, in batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from asyncckpt.format.manifest import BlockFacts, RankPart
from asyncckpt.formats.commit_import import Importable, run_import
from asyncckpt.formats.conversion import Conversion
from asyncckpt.formats.foreign_chain import WHOLE, table_spec, unplaced
from asyncckpt.formats.parquet.files import ParquetTable, parquet_tables
from asyncckpt.model.block import TableFacts
from asyncckpt.model.result import SaveResult
from asyncckpt.model.source import MadeBytes
from asyncckpt.options import Durability
from asyncckpt.plan.image import split_rows


def import_checkpoint(
    parquet_path: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    columns: Mapping[str, str] | None = None,
    durability: Durability = "fsync",
    parallel: int = 8,
    verify: bool = True,
) -> SaveResult:
    """Import tables as a step of an asyncckpt directory, and return when it is durable.

    parquet_path  a file `NAME.parquet`, a folder `NAME.parquet` of parts, or a folder of both, each of them a table
    path          made with its parents when missing
    step          None: one more than the newest
    columns       column of the file -> column here, as {"user_id": "id", "vector": "embedding"}
    parallel      shard files, at most
    verify        read the checkpoint once more in the end, and compare it with the digests of what was copied

    A table needs a column `id`, int64, each id once; other columns are numbers, or lists of numbers of one size. Which
    of them are slots of an optimizer and which metadata, the file says if it is an export of ours; else real numbers
    are slots. Nothing is committed when an error is raised: NotFoundError, CorruptError (also for nulls, and an id that
    comes twice), UnsupportedError for other columns and where pyarrow is missing, UsageError, ConflictError for a step
    that exists or a directory that another process writes to, IndeterminateError, IOFailedError. Waits while a save or
    load of this process is in flight. Takes 300 MiB, a page of a column, and 16 bytes for each row of the largest
    table.
    """
    asked = Conversion.of(parquet_path, path, step, durability=durability, parallel=parallel, verify=verify)
    return run_import(asked, open_import(asked, columns=columns))[0]


@contextmanager
def open_import(asked: Conversion, *, columns: Mapping[str, str] | None = None) -> Iterator[Importable]:
    """Look at what is to be imported; its files are opened when they are read. NotFoundError, CorruptError,
    UnsupportedError, UsageError, IOFailedError."""
    tables = parquet_tables(asked.foreign, columns)
    found = [block for table in tables for block in _blocks(table)]
    blocks = tuple(block for block, _ in found)
    listed = tuple(TableFacts(name=table.name, rows_count=table.rows_count, shard=WHOLE) for table in tables)
    part = RankPart(rank=0, tables=listed, tree=("dict", (), ()), values=(), blocks=blocks)
    facts = {
        "tables": {table.name: table.rows_count for table in tables},
        "tensors": 0,
        "shards": sum(len(table.parts) for table in tables),
        "bytes": sum(table.bytes for table in tables),
    }

    def check() -> None:
        for table in tables:
            table.check_ids()

    yield Importable([part], lambda number: found[number][1], facts, asked.step, check=check)


def _blocks(table: ParquetTable) -> Iterator[tuple[BlockFacts, MadeBytes]]:
    """Return the blocks of a table, with their bytes."""
    for column in table.columns:
        shape = (table.rows_count, *column.row_shape)
        whole = table_spec(table.name, column.name, column.dtype, shape, column.role)
        for spec in split_rows(whole):
            made = table.read(column, spec.row_begin, spec.row_begin + spec.shape[0])
            yield unplaced(spec), MadeBytes(made, spec.bytes)
