"""Write live tables and tensors of one process as a directory of RecIS: what RecIS' Saver with one shard does."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncckpt.arguments import check_choice, check_int
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.format.tree import VALUE, leaves, path_name, tensor_names
from asyncckpt.formats.conversion import ExportReport
from asyncckpt.formats.recis.names import SLICE_SIZE
from asyncckpt.formats.recis.out_names import check_names, out_spec, slots_of
from asyncckpt.formats.recis.stored import Columns
from asyncckpt.formats.recis.write_directory import OutBlock, RecisWriter
from asyncckpt.model.table import Role, Table
from asyncckpt.model.table_shard import Shard
from asyncckpt.modules.walk import tables_of
from asyncckpt.native import Progress
from asyncckpt.options import DURABILITIES, PARALLEL_MAX, BusyPolicy, Durability, SaveOptions
from asyncckpt.plan.image import array_spec
from asyncckpt.plan.leaf_memory import check_leaf
from asyncckpt.plan.named_tables import named_tables
from asyncckpt.plan.save_plan import CutTable
from asyncckpt.plan.state import TensorsArgument, named_state
from asyncckpt.signals import uninterrupted
from asyncckpt.snapshot.block_data import ColumnData, TensorData
from asyncckpt.snapshot.overlay import Overlay
from asyncckpt.storage.directory import check_path


@uninterrupted
def save(
    path: str | os.PathLike[str],
    hashtables: Mapping[str, Table] | torch.nn.Module | None = None,
    tensors: TensorsArgument | None = None,
    *,
    columns: Columns | None = None,
    optimizer: str | None = None,
    durability: Durability = "fsync",
    parallel: int = 8,
    verify: bool = True,
) -> ExportReport:
    """Write tables and tensors as a directory that RecIS loads, in any number of ranks; it is there all at once.

    hashtables, tensors  see Saver, of one process: tables of all ids, or of one of RecIS' slices
    path, columns, optimizer, durability, parallel, verify  see export_checkpoint; path is the new directory

    Blocking: nothing may change meanwhile. Jobs of several ranks save with a Saver and export that. `step` of the
    report is 0. Raises what export_checkpoint does.
    """
    check_choice("durability", durability, DURABILITIES)
    check_int("parallel", parallel, at_least=1, at_most=PARALLEL_MAX)
    options = SaveOptions(durability=durability, parallel=parallel)
    target = check_path(path)
    tables = dict(named_tables(tables_of(hashtables) if isinstance(hashtables, torch.nn.Module) else hashtables))
    state = named_state(tensors)
    names = check_names(columns, optimizer)
    begun = time.perf_counter()
    with save_lock.held("save", target, None, busy=BusyPolicy("wait")):
        cut = Cut.begin(state, tables)
        is_written = False
        try:
            blocks = [block for item in cut.tables for block in _table_blocks(item, names, optimizer)]
            dense = list(_dense_blocks(cut))
            with RecisWriter(target, shards_count=1, options=options, progress=Progress(), verify=verify) as out:
                out.write_shard(0, [*blocks, *dense])
                out.publish()
            is_written = True
            values = tuple(path_name(at) for at, node in leaves(cut.flat.tree) if node is VALUE)
            rows = {item.name: item.cut.rows_count for item in cut.tables}
        except (OSError, MemoryError) as error:
            raise as_checkpoint_error(error, 0) from error
        finally:
            cut.end(ok=is_written)
    seconds = time.perf_counter() - begun
    found = tuple(block.table for block in dense)
    more: dict[str, Any] = {"shards_count": 1, "bytes_written": out.bytes_written, "seconds": seconds}
    return ExportReport(0, Path(target), found, rows, values, **more)


def _table_blocks(item: CutTable, names: Mapping[str, str], optimizer: str | None) -> Iterable[OutBlock]:
    shard = _slice(item)
    rows_count, overlay = item.cut.rows_count, Overlay.of(item.cut)
    slots = slots_of(item.name, [(column.name, column.role) for column in item.schema.columns], names, optimizer)
    for column in item.schema.columns:
        spec = array_spec(f"{item.name}@{column.name}", column.dtype, (rows_count, *column.row_shape), column.role)
        source = ColumnData(item.cut, overlay, column.name, 0, rows_count).source()
        slot = slots[column.name]
        yield OutBlock(item.name, slot, shard, out_spec(spec, item.name, slot), source)


def _slice(item: CutTable) -> Shard:
    """Return the slice that a table holds; UsageError where its ids are not a slice of RecIS."""
    if item.shard == (0, 1):
        return (0, SLICE_SIZE, SLICE_SIZE)
    if len(item.shard) == 3 and item.shard[2] == SLICE_SIZE:
        return item.shard
    raise UsageError(
        f"table {item.name!r} holds a shard that is not a slice of RecIS",
        found=item.shard,
        expected=f"all ids, or (begin, end, {SLICE_SIZE})",
        hint="save with a Saver, and export that: export_checkpoint makes slices of any shards",
    )


def _dense_blocks(cut: Cut) -> Iterable[OutBlock]:
    names = tensor_names(cut.flat.tree)
    for leaf, (tensor, name) in enumerate(zip(cut.flat.tensors, names, strict=True)):
        if leaf in cut.flat.sharded:
            what = f"tensor {name!r} is spread over ranks"
            raise UnsupportedError(what, hint="save with a Saver, and export that")
        check_leaf(tensor, name)
        spec = out_spec(array_spec(name, tensor.dtype, tuple(tensor.shape), Role.DENSE), name, None)
        yield OutBlock(name, None, None, spec, TensorData(tensor, name).source())
