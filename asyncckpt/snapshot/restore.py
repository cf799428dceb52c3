"""Restore tables and tensors from shard files: as much as possible is read straight into place.

1. Ids of all tables are read and checked, then every table gives them rows.
2. One batch of reads fills every dense leaf and every column whose rows lie in one piece.
3. What does not (resharding, merging, other devices, strides) is read by windows and scattered.

Digests are taken on the way. The id columns are verified before any table is touched; a damaged block found later
leaves all tables of the load empty and raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import CorruptError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import BlockFacts
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.table import ID_COLUMN, TableLoad
from asyncckpt.native import core
from asyncckpt.plan.load_plan import DenseLoad, LoadPlan, StoredTable, TableLoadPlan

WINDOW_BYTES = 64 << 20


class BlockReader(Protocol):
    """What restore asks of the shard room."""

    def add(self, number: int, address: int, *, begin: int, bytes: int) -> None:
        """Queue a read of bytes [begin, begin + bytes) of a block to an address."""
        ...

    def run(self) -> None:
        """Do all queued reads; whole blocks are verified."""
        ...

    def block(self, number: int) -> BlockFacts: ...
    def check(self, number: int, digest: bytes) -> None:
        """CorruptError unless the block has this digest."""
        ...

    @property
    def verify(self) -> bool: ...


@dataclass
class SourceRows:
    """One source of one table: which of its rows are ours, and which rows of the table they became."""

    stored: StoredTable
    columns: tuple[str, ...]
    ids: NDArray[np.int64]
    mine: NDArray[np.int64] | None  # Positions in the source; None: all of them.
    rows: torch.Tensor | None = None


@dataclass
class Scatter:
    """A block that is brought over by windows: into a tensor, at `rows` (None: at row `at` onwards)."""

    number: int
    target: torch.Tensor
    rows: torch.Tensor | None
    mine: NDArray[np.int64] | None


@dataclass
class OpenLoads:
    """Tables being filled; every one of them is ended exactly once. `rows` counts the rows loaded into each."""

    loads: list[TableLoad] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)

    def end(self, *, ok: bool) -> None:
        loads, self.loads = self.loads, []
        for load in loads:
            load.end(ok)


def restore(plan: LoadPlan, reader: BlockReader, *, clear: bool, opened: OpenLoads) -> list[torch.Tensor]:
    """Fill everything; returns one new tensor per dense load without target, in order. The caller ends `opened`."""
    sources = [_read_ids(item, reader) for item in plan.tables]
    reader.run()
    rebuilt: list[torch.Tensor] = []
    scatters: list[Scatter] = []
    _choose_mine(plan, sources)
    loads = [
        _begin_load(item, found, clear=clear, opened=opened) for item, found in zip(plan.tables, sources, strict=True)
    ]
    # Building id maps takes as long as reading the rows: all tables at once, on all cores.
    with ThreadPoolExecutor(core.cores_count, thread_name_prefix="asyncckpt-insert") as threads:
        inserts = threads.map(_insert, plan.tables, sources, loads)
    for _, found, load in zip(inserts, sources, loads, strict=True):
        scatters += _queue_columns(found, load, reader)
    for dense in plan.dense:
        scatters += _queue_dense(dense, reader, rebuilt)
    reader.run()
    for scatter in scatters:
        _scatter(scatter, reader)
    return rebuilt


def _read_ids(item: TableLoadPlan, reader: BlockReader) -> list[SourceRows]:
    found = []
    for stored, columns in item.sources:
        ids = np.empty(stored.rows_count, dtype=np.int64)
        _queue_whole(stored.columns[ID_COLUMN], ids.ctypes.data, reader)
        found.append(SourceRows(stored=stored, columns=columns, ids=ids, mine=None))
    return found


def _choose_mine(plan: LoadPlan, sources: Sequence[list[SourceRows]]) -> None:
    """Keep the ids that each table owns: unsigned id modulo shard count."""
    for item, found in zip(plan.tables, sources, strict=True):
        index, count = item.table.shard
        for source in found:
            if count > 1:
                owned = source.ids.view(np.uint64) % np.uint64(count) == np.uint64(index)
                if not owned.all():
                    source.mine = np.flatnonzero(owned)


def _begin_load(item: TableLoadPlan, found: list[SourceRows], *, clear: bool, opened: OpenLoads) -> TableLoad:
    total = sum(len(source.ids) if source.mine is None else len(source.mine) for source in found)
    filled = frozenset.intersection(*(frozenset(source.columns) for source in found)) if found else frozenset()
    load = item.table.begin_load(clear=clear, rows_count=total, filled=filled)
    opened.loads.append(load)
    opened.rows[item.name] = total
    return load


def _insert(item: TableLoadPlan, found: list[SourceRows], load: TableLoad) -> None:
    for source in found:
        ids = source.ids if source.mine is None else source.ids[source.mine]
        source.rows = load.insert(torch.from_numpy(ids))
        _check_distinct(source, item.name)


def _queue_columns(found: list[SourceRows], load: TableLoad, reader: BlockReader) -> list[Scatter]:
    scatters = []
    for source in found:
        for column in source.columns:
            if column != ID_COLUMN:
                scatters += _queue_column(source, column, load.column(column), reader)
    return scatters


def _check_distinct(source: SourceRows, name: str) -> None:
    assert source.rows is not None
    if not _is_one_run(source.rows) and len(torch.unique(source.rows)) != len(source.rows):
        raise CorruptError(f"table {source.stored.name!r}, loaded into {name!r}, holds the same id twice")


def _is_one_run(rows: torch.Tensor) -> bool:
    count = len(rows)
    if count == 0:
        return True
    first, last = int(rows[0]), int(rows[-1])
    return last - first == count - 1 and bool((rows[1:] - rows[:-1] == 1).all())


def _queue_column(source: SourceRows, column: str, target: torch.Tensor, reader: BlockReader) -> list[Scatter]:
    rows = source.rows
    assert rows is not None
    direct = source.mine is None and target.is_cpu and target.is_contiguous() and _is_one_run(rows)
    scatters = []
    for number in source.stored.columns[column]:
        spec = reader.block(number).placed.spec
        begin, end = spec.row_begin, spec.row_begin + spec.shape[0]
        if direct:
            if spec.bytes:
                piece = target[int(rows[0]) + begin : int(rows[0]) + end]
                reader.add(number, piece.data_ptr(), begin=0, bytes=spec.bytes)
            continue
        if source.mine is None:
            scatters.append(Scatter(number=number, target=target, rows=rows[begin:end], mine=None))
        else:
            low, high = np.searchsorted(source.mine, [begin, end])
            mine = source.mine[low:high] - begin
            scatters.append(Scatter(number=number, target=target, rows=rows[int(low) : int(high)], mine=mine))
    return scatters


def _queue_dense(dense: DenseLoad, reader: BlockReader, rebuilt: list[torch.Tensor]) -> list[Scatter]:
    stored = dense.source
    if dense.target is None:
        dtype = dtype_by_name(stored.dtype, owner=stored.name).dtype
        target = torch.empty(stored.shape, dtype=dtype)
        rebuilt.append(target)
    else:
        target = dense.target.tensor
    if target.is_cpu and target.is_contiguous() and not target.is_conj() and not target.is_neg():
        _queue_whole(stored.blocks, target.data_ptr(), reader)
        return []
    if target.dim() == 0:
        return [Scatter(number=number, target=target, rows=None, mine=None) for number in stored.blocks]
    scatters = []
    for number in stored.blocks:
        spec = reader.block(number).placed.spec
        rows = torch.arange(spec.row_begin, spec.row_begin + spec.shape[0])
        scatters.append(Scatter(number=number, target=target, rows=rows, mine=None))
    return scatters


def _queue_whole(numbers: Sequence[int], address: int, reader: BlockReader) -> None:
    """Read all parts of a tensor to where each belongs behind `address`."""
    for number in numbers:
        spec = reader.block(number).placed.spec
        row_bytes = spec.bytes // spec.shape[0] if spec.is_part and spec.shape[0] else 0
        reader.add(number, address + spec.row_begin * row_bytes, begin=0, bytes=spec.bytes)


def _scatter(item: Scatter, reader: BlockReader) -> None:
    """Bring a block over, window by window; its digest is taken over the windows."""
    spec = reader.block(item.number).placed.spec
    rows_count = spec.shape[0] if spec.shape else 1
    row_bytes = max(1, spec.bytes // max(1, rows_count))
    step = max(1, WINDOW_BYTES // row_bytes)
    digester = core.digester()
    for begin in range(0, rows_count, step):
        end = min(begin + step, rows_count)
        window = np.empty((end - begin) * row_bytes, dtype=np.uint8)
        reader.add(item.number, window.ctypes.data, begin=begin * row_bytes, bytes=window.size)
        reader.run()
        if reader.verify:
            digester.update(window.ctypes.data, window.size)
        _put(item, spec, window, begin, end)
    if reader.verify:
        reader.check(item.number, digester.end())


def _put(item: Scatter, spec: BlockSpec, window: NDArray[np.uint8], begin: int, end: int) -> None:
    dtype = dtype_by_name(spec.dtype, owner=spec.name).dtype
    if item.rows is None:
        item.target.copy_(torch.from_numpy(window).view(dtype).reshape(spec.shape))
        return
    values = torch.from_numpy(window).view(dtype).reshape((end - begin, *spec.shape[1:]))
    rows = item.rows[begin:end]
    if item.mine is not None:
        low, high = np.searchsorted(item.mine, [begin, end])
        values = values[torch.from_numpy(item.mine[low:high] - begin)]
        rows = item.rows[int(low) : int(high)]
    if len(rows):
        item.target[rows.to(item.target.device)] = values.to(item.target.device)
