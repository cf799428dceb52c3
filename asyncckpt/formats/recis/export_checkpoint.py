"""Export a checkpoint of ours as a directory of RecIS: block by block, deltas folded, encodings undone.

The shards of RecIS are slices of ids (exported_table.py takes them out). A checkpoint with as many slices is read once,
and one that is spread otherwise once for every slice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncckpt.arguments import check_int
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import path_name, unique_names
from asyncckpt.formats.conversion import Conversion, ExportReport
from asyncckpt.formats.exported_table import ExportedTable
from asyncckpt.formats.recis.names import slice_of
from asyncckpt.formats.recis.out_names import check_names, out_spec, slots_of
from asyncckpt.formats.recis.stored import Columns
from asyncckpt.formats.recis.write_directory import OutBlock, RecisWriter
from asyncckpt.formats.run_export import run_export
from asyncckpt.formats.stored_tensors import tensor_source, tensor_spec
from asyncckpt.options import Durability
from asyncckpt.plan.contents import Contents, StoredDense, contents_of
from asyncckpt.plan.layouts import check_without
from asyncckpt.shard.reader import ChainReader

SHARDS_MAX = 65_536


@dataclass(frozen=True)
class ExportPlan:
    """What to export, checked: its shards, and what RecIS calls the dense tensors and the columns of every table."""

    chain: Chain
    contents: Contents
    dense: Mapping[str, StoredDense]
    shards_count: int
    slots: Mapping[str, Mapping[str, str]]

    @property
    def bytes(self) -> int:
        """The stored bytes, about as many as are going to be written."""
        return sum(self.chain.blocks[number].placed.spec.bytes for number in self.contents.blocks())

    @staticmethod
    def of(
        chain: Chain, *, shards: int | None = None, columns: Columns | None = None, optimizer: str | None = None
    ) -> ExportPlan:
        """Check everything. UsageError, UnsupportedError, CorruptError."""
        check_int("shards", shards, at_least=1, at_most=SHARDS_MAX, optional=True)
        contents = contents_of(chain)
        check_without(contents.tree, "a checkpoint of RecIS")
        names = check_names(columns, optimizer)
        for name, dtype in contents.unreadable.items():
            dtype_by_name(dtype, owner=name)
        named = _named(contents)
        for name, dense in named.items():
            out_spec(tensor_spec(dense), name, None)
        slots: dict[str, dict[str, str]] = {}
        for name, table in contents.tables.items():
            specs = {column: chain.blocks[blocks[0]].placed.spec for column, blocks in table.columns.items()}
            slots[name] = slots_of(name, [(column, spec.role) for column, spec in specs.items()], names, optimizer)
            for column, spec in specs.items():
                out_spec(spec, name, slots[name][column])
        count = chain.newest.head.ranks_count if shards is None else shards
        return ExportPlan(chain, contents, named, count, slots)

    def report(self, path: Path) -> ExportReport:
        """Return what is known before anything is read: rows of deltas are counted when they are folded."""
        rows = {name: sum(layer.rows_count for layer in table.layers) for name, table in self.contents.tables.items()}
        values = tuple(path_name(at) for at in self.contents.values)
        return ExportReport(
            self.chain.step,
            path,
            tuple(self.dense),
            rows,
            values,
            shards_count=self.shards_count,
            bytes_written=self.bytes,
        )


def export_checkpoint(
    path: str | os.PathLike[str],
    recis_dir: str | os.PathLike[str],
    *,
    step: int | None = None,
    shards: int | None = None,
    columns: Columns | None = None,
    optimizer: str | None = None,
    durability: Durability = "fsync",
    parallel: int = 8,
    verify: bool = True,
) -> ExportReport:
    """Write a checkpoint (default: the newest) as a directory that RecIS loads; it is there all at once, or not.

    recis_dir   is made, with its parents; ConflictError when there is something under this name
    shards      how many RecIS shall have (any number of its ranks loads any number); None: as many as ranks have saved
    columns     slot of RecIS -> column, where the default does not fit: `last_seen` becomes `step_filter`, `embedding`
                and what has a name of RecIS keep it
    optimizer   "sparse_adam", "sparse_adamw" or "sparse_adamw_tf": `exp_avg` becomes `sparse_adam_exp_avg`
    parallel    files of every shard, at most
    verify      read all of it once more before it gets its name, and compare

    Dense tensors keep their dotted names. Plain values are left out, and reported. Nothing is under the name when an
    error is raised: NotFoundError, CorruptError, UnsupportedError for dtypes and names that RecIS does not have,
    UsageError, IOFailedError; but IndeterminateError says that it is there, and perhaps not durable. Takes 300 MiB;
    where slices are not those of the checkpoint, 8 to 24 bytes for each row of the largest table, and 8 for each row of
    a slice.
    """
    asked = Conversion.of(path, recis_dir, step, durability=durability, parallel=parallel, verify=verify)
    return export(asked, shards=shards, columns=columns, optimizer=optimizer)


def export(asked: Conversion, **names: Any) -> ExportReport:
    """Do the same, as it is asked for."""
    plan, out, seconds = run_export(asked, partial(ExportPlan.of, **names), partial(_write, asked))
    rows = {table.name: table.rows_count for table in out.tables}
    report: ExportReport = plan.report(asked.exported)
    return replace(report, rows=rows, bytes_written=out.bytes_written, reused_bytes=out.reused_bytes, seconds=seconds)


@dataclass(frozen=True)
class _Written:
    tables: Sequence[ExportedTable]
    bytes_written: int
    reused_bytes: int


def _write(asked: Conversion, plan: ExportPlan, reader: ChainReader, identity: str) -> _Written:
    asked.expect(plan.bytes)
    with RecisWriter(
        asked.exported,
        shards_count=plan.shards_count,
        options=asked.options,
        progress=asked.progress,
        verify=asked.verify,
        identity=identity,
    ) as out:
        tables = [ExportedTable(table, reader) for table in plan.contents.tables.values()]
        for number in range(plan.shards_count):
            out.write_shard(number, list(_blocks(plan, tables, reader, number)))
        out.publish()
        return _Written(tables, out.bytes_written, out.reused_bytes)


def _named(contents: Contents) -> dict[str, StoredDense]:
    """Return the dense tensors by what RecIS calls them: unique in the state's order, whatever tables are called."""
    order = {path: number for number, path in enumerate(contents.leaf_paths)}
    items = sorted(contents.dense.values(), key=lambda item: order.get(item.path, len(order)))
    return dict(zip(unique_names(path_name(item.path) for item in items), items, strict=True))


def _blocks(plan: ExportPlan, tables: Sequence[ExportedTable], reader: ChainReader, number: int) -> Iterator[OutBlock]:
    """Return the blocks of a shard: those of all tables, and in the first one the dense tensors."""
    shard = slice_of(number, plan.shards_count)
    for table in tables:
        for column, spec, source in table.columns(shard):
            slot = plan.slots[table.name][column]
            yield OutBlock(table.name, slot, shard, out_spec(spec, table.name, slot), source)
    if number == 0:
        for name, dense in plan.dense.items():
            spec = out_spec(tensor_spec(dense), name, None)
            yield OutBlock(name, None, None, spec, tensor_source(dense, reader))
