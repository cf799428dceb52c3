"""Restore tables and tensors from shard files: as much as possible is read straight into place.

1. Ids of all tables are read and checked, then every table gives them rows. Building id maps takes as long as reading
   rows, so it goes on in threads beside step 2.
2. One batch of reads fills every dense leaf, and every column of a table that knows its rows beforehand.
3. A second one fills the other columns whose rows lie in one piece.
4. What does not (resharding, merging, other devices, strides) is read by windows and scattered.

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
from asyncckpt.model.table import ID_COLUMN, ChecksLoad, OrderedLoad, OwnsIds, TableLoad
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
    """One source of one table: which of its rows are ours, and which rows of the table they became.

    `first_row`: known before the rows are, when all of the source goes to consecutive ones.
    """

    stored: StoredTable
    columns: tuple[str, ...]
    ids: NDArray[np.int64]
    mine: NDArray[np.int64] | None  # Positions in the source; None: all of them.
    rows: torch.Tensor | None = None
    first_row: int | None = None


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
        """End all of them, whatever one of them raises; then raise that. Those behind it end as failed."""
        loads, self.loads = self.loads, []
        failed: Exception | None = None
        for load in loads:
            try:
                load.end(ok and failed is None)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed


def restore(plan: LoadPlan, reader: BlockReader, *, clear: bool, opened: OpenLoads) -> list[torch.Tensor]:
    """Fill everything; returns one new tensor per dense load without target, in order. The caller ends `opened`."""
    sources = [_read_ids(item, reader) for item in plan.tables]
    reader.run()
    rebuilt: list[torch.Tensor] = []
    scatters: list[Scatter] = []
    _choose_mine(plan, sources)
    for item, found in zip(plan.tables, sources, strict=True):
        if isinstance(item.table, ChecksLoad):
            item.table.check_load(np.concatenate([source.ids for source in found]), clear=clear)
    loads = [
        _begin_load(item, found, clear=clear, opened=opened) for item, found in zip(plan.tables, sources, strict=True)
    ]
    with ThreadPoolExecutor(core.cores_count, thread_name_prefix="asyncckpt-insert") as threads:
        for found, load in zip(sources, loads, strict=True):
            if _goes_ahead(found, load):
                scatters += _queue_columns(found, load, reader)
        # No earlier: the storage of columns that were asked for above must not move.
        inserts = threads.map(_insert, plan.tables, sources, loads)
        for dense in plan.dense:
            scatters += _queue_dense(dense, reader, rebuilt)
        reader.run()
    for _, found, load in zip(inserts, sources, loads, strict=True):
        if found and found[0].first_row is None:
            scatters += _queue_columns(found, load, reader)
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
    """Keep the ids that each table owns: unsigned id modulo shard count, unless the table says otherwise."""
    for item, found in zip(plan.tables, sources, strict=True):
        index, count = item.table.shard
        for source in found:
            if isinstance(item.table, OwnsIds):
                owned = item.table.owned(source.ids)
            elif count > 1:
                owned = source.ids.view(np.uint64) % np.uint64(count) == np.uint64(index)
            else:
                continue
            if not owned.all():
                source.mine = np.flatnonzero(owned)


def _begin_load(item: TableLoadPlan, found: list[SourceRows], *, clear: bool, opened: OpenLoads) -> TableLoad:
    total = sum(len(source.ids) if source.mine is None else len(source.mine) for source in found)
    filled = frozenset.intersection(*(frozenset(source.columns) for source in found)) if found else frozenset()
    load = item.table.begin_load(clear=clear, rows_count=total, filled=filled)
    opened.loads.append(load)
    opened.rows[item.name] = total
    return load


def _goes_ahead(found: list[SourceRows], load: TableLoad) -> bool:
    """Whether the columns can be read before the ids are inserted: one whole source, for rows that are known."""
    if len(found) != 1 or found[0].mine is not None or not isinstance(load, OrderedLoad):
        return False
    [source] = found
    source.first_row = load.first_row()
    columns = [load.column(name) for name in source.columns if name != ID_COLUMN]
    if not all(column.is_cpu and column.is_contiguous() for column in columns):
        source.first_row = None
    return source.first_row is not None


def _insert(item: TableLoadPlan, found: list[SourceRows], load: TableLoad) -> None:
    for source in found:
        ids = source.ids if source.mine is None else source.ids[source.mine]
        source.rows = load.insert(torch.from_numpy(ids))
        _check_distinct(source, item.name)
        if source.first_row is not None and len(ids):
            assert int(source.rows[0]) == source.first_row, "a table gave other rows than it had said"


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
    rows, first_row = source.rows, source.first_row
    if first_row is None:
        assert rows is not None
        direct = source.mine is None and target.is_cpu and target.is_contiguous() and _is_one_run(rows)
        first_row = int(rows[0]) if direct and len(rows) else None
    scatters = []
    for number in source.stored.columns[column]:
        spec = reader.block(number).placed.spec
        begin, end = spec.row_begin, spec.row_begin + spec.shape[0]
        if spec.bytes == 0:
            continue
        if first_row is not None:
            piece = target[first_row + begin : first_row + end]
            reader.add(number, piece.data_ptr(), begin=0, bytes=spec.bytes)
            continue
        assert rows is not None
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
