"""Restore tables and tensors from shard files: as much as possible is read straight into place.

1. Ids of all tables are read and checked, in every layer of the checkpoint's chain, and the rows that count are chosen
   (layer_rows.py). Then every table gives them rows. Building id maps takes as long as reading rows, so it goes on in
   threads beside step 2.
2. One batch of reads fills every dense leaf, and every column of a table that knows its rows beforehand.
3. A second one fills the other columns whose rows lie in one piece.
4. What does not (deltas over older rows, resharding, merging, encodings, strides), and what goes to devices, is read by
   windows and scattered (windows.py).
5. Wait until everything is on its device. So the caller may end the loads, and any stream may use the targets.

Blocks of other ranks that hold nothing for a target are not read. Each other block is read once, and each row of a
table is written once. Digests are taken on the way. The id columns are verified before any table is touched; a damaged
block found later leaves all tables of the load empty and raises.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncckpt.devices.current_runtime import runtime
from asyncckpt.devices.fetch import to_host
from asyncckpt.errors import CorruptError
from asyncckpt.format.dtypes import dtype_by_name, is_stored_as
from asyncckpt.format.tree import Path
from asyncckpt.model.block import BlockSpec, overlap
from asyncckpt.model.enough_memory import enough_memory, raise_lack_of_memory
from asyncckpt.model.sharded import Piece
from asyncckpt.model.table import ID_COLUMN, ChecksLoad, OrderedLoad, TableLoad
from asyncckpt.native import core
from asyncckpt.plan.load_plan import DenseLoad, LoadPlan, TableLoadPlan
from asyncckpt.snapshot.boxes import BoxCopy, WholeScatter, queue_box_parts
from asyncckpt.snapshot.layer_rows import LayerRows, read_layers
from asyncckpt.snapshot.windows import BlockReader, RowScatter, Scatter, goes_up, is_on_host, scatter_all

if TYPE_CHECKING:
    from asyncckpt.devices.uploads import Uploads


@dataclass
class OpenLoads:
    """Tables being filled; every one of them is ended exactly once. `rows` counts the rows loaded into each."""

    loads: dict[str, TableLoad] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def end(self, *, ok: bool) -> None:
        """End all of them, whatever one of them raises; then raise that. Those after it end as failed.

        Companions before their tables, which look at them then.
        """
        loads, self.loads = self.loads, {}
        failed: Exception | None = None
        for name in sorted(loads, reverse=True):
            try:
                loads[name].end(ok and failed is None)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed


@dataclass(frozen=True)
class _Filling:
    """A table while it is filled: its plan, its layers, its load. is_ahead: its columns are read before its ids are
    inserted.
    """

    item: TableLoadPlan
    found: list[LayerRows]
    load: TableLoad
    is_ahead: bool


def restore(plan: LoadPlan, reader: BlockReader, *, clear: bool, opened: OpenLoads) -> dict[Path, Any]:
    """Fill everything; return, by path, the tensors for the state dicts of objects. The caller ends `opened`.

    Targets on devices are filled after what this thread has queued there. DeviceError. Whatever is raised, nothing is
    on its way to a device any more.
    """
    rebuilt: dict[Path, Any] = {}
    scatters: list[Scatter] = []
    pool = ThreadPoolExecutor(core.cores_count, thread_name_prefix="asyncckpt-insert")
    with uploads_of_load() as uploads, pool as threads:
        for number in (number for item in plan.tables for shard in item.passed_over for number in shard.blocks()):
            reader.pass_over(number)
        layers = read_layers(plan.tables, reader, threads) if plan.tables else []
        for item, found in zip(plan.tables, layers, strict=True):
            if isinstance(item.table, ChecksLoad):
                ids = [np.empty(0, dtype=np.int64), *(layer.counted_ids for layer in found)]
                item.table.check_load(np.concatenate(ids), clear=clear)
        pairs = list(zip(plan.tables, layers, strict=True))
        for item, found in sorted(pairs, key=lambda pair: id(pair[0].table)):  # See model/table.py.
            _begin_load(item, found, clear=clear, opened=opened)
        tables = []
        for item, found in pairs:
            load = opened.loads[item.name]
            tables.append(_Filling(item, found, load, not item.resized and _goes_ahead(found, load, uploads)))
        for table in tables:
            if table.is_ahead:
                scatters += _queue_columns(table, reader, uploads)
        # No earlier: the storage of columns that were asked for above must not move.
        inserts = threads.map(_insert, tables)
        made: dict[tuple[int, ...], torch.Tensor] = {}
        for dense in plan.dense:
            scatters += _queue_dense(dense, reader, uploads, rebuilt, made)
        reader.run()
        for _, table in zip(inserts, tables, strict=True):
            if not table.is_ahead:
                scatters += _queue_columns(table, reader, uploads)
        reader.run()
        if scatters:
            scatter_all(scatters, reader, uploads)
    return rebuilt


def uploads_of_load() -> AbstractContextManager[Uploads | None]:
    """Return the copies to devices of one load; None in a process that uses none."""
    found = runtime()
    if found is None:
        return nullcontext()
    from asyncckpt.devices.uploads import Uploads

    return Uploads(found)


def _begin_load(item: TableLoadPlan, found: list[LayerRows], *, clear: bool, opened: OpenLoads) -> None:
    total = sum(len(layer.ids) if layer.mine is None else len(layer.mine) for layer in found)
    filled = frozenset.intersection(*(frozenset(layer.columns) for layer in found)) if found else frozenset()
    filled -= item.resized  # What of a row is not loaded is as in a new one.
    try:
        opened.loads[item.name] = item.table.begin_load(clear=clear, rows_count=total, filled=filled)
    except (MemoryError, RuntimeError, ValueError) as error:
        raise_lack_of_memory(error, f"{total} rows of table {item.name!r}")
        raise
    opened.rows[item.name] = total


def _goes_ahead(found: list[LayerRows], load: TableLoad, uploads: Uploads | None) -> bool:
    """Return whether the columns can be read before the ids are inserted: one whole layer, for rows that are known."""
    if len(found) != 1 or found[0].mine is not None or not isinstance(load, OrderedLoad):
        return False
    [layer] = found
    layer.first_row = load.first_row()
    columns = [load.column(name) for name in layer.columns if name != ID_COLUMN]
    if not all(is_on_host(column, uploads) and column.is_contiguous() for column in columns):
        layer.first_row = None
    return layer.first_row is not None


def _insert(table: _Filling) -> None:
    """Give the ids of every layer their rows; layers of one shard share no id, and shards of one source must not."""
    item, found = table.item, table.found
    for layer in found:
        ids = layer.my_ids
        rows = table.load.insert(torch.from_numpy(ids))
        layer.rows = rows.cpu() if runtime() is None else to_host(rows)
        is_one_run = _is_one_run(layer.rows)
        if not is_one_run and len(torch.unique(layer.rows)) != len(layer.rows):
            raise _twice(item, layer.source)
        if not len(ids):
            continue
        if layer.first_row is not None:
            assert int(layer.rows[0]) == layer.first_row, "a table gave other rows than it had said"
        elif is_one_run:
            layer.first_row = int(layer.rows[0])
    for source in {layer.source for layer in found}:
        own = [layer for layer in found if layer.source == source and len(layer.my_ids)]
        if len({layer.rank for layer in own}) > 1 and not _are_apart(own):
            raise _twice(item, source)


def _are_apart(layers: list[LayerRows]) -> bool:
    """Return whether no row is in two layers."""
    rows = [layer.rows for layer in layers if layer.rows is not None]
    if all(layer.first_row is not None for layer in layers):
        runs = sorted((int(own[0]), int(own[-1])) for own in rows)
        return all(below[1] < above[0] for below, above in itertools.pairwise(runs))
    seen = torch.zeros(1 + max(int(own.max()) for own in rows), dtype=torch.bool, device="cpu")
    for own in rows:
        seen[own] = True
    return int(seen.sum()) == sum(len(own) for own in rows)


def _twice(item: TableLoadPlan, source: str) -> CorruptError:
    return CorruptError(f"table {source!r}, loaded into {item.name!r}, holds the same id twice")


def _is_one_run(rows: torch.Tensor) -> bool:
    count = len(rows)
    if count == 0:
        return True
    first, last = int(rows[0]), int(rows[-1])
    return last - first == count - 1 and bool((rows[1:] - rows[:-1] == 1).all())


def _queue_columns(table: _Filling, reader: BlockReader, uploads: Uploads | None) -> list[Scatter]:
    scatters = []
    for layer in table.found:
        for column in layer.columns:
            if column != ID_COLUMN:
                is_resized = column in table.item.resized
                scatters += _queue_column(layer, column, table.load.column(column), is_resized, reader, uploads)
    return scatters


def _queue_column(
    layer: LayerRows, column: str, target: torch.Tensor, is_resized: bool, reader: BlockReader, uploads: Uploads | None
) -> list[Scatter]:
    """Queue what can be read straight into place; return the blocks that cannot."""
    scatters: list[Scatter] = []
    for number in layer.layer.columns[column]:
        spec = reader.block(number).placed.spec
        begin, end = spec.row_begin, spec.row_begin + spec.shape[0]
        if layer.mine is None and layer.first_row is not None and not is_resized:
            rows = target[layer.first_row + begin : layer.first_row + end]
            scatters += queue_boxes(number, [BoxCopy(begin=(0,) * rows.dim(), target=rows)], reader, uploads)
            continue
        low, high = (begin, end) if layer.mine is None else map(int, np.searchsorted(layer.mine, [begin, end]))
        if low == high:
            reader.pass_over(number)
            continue
        assert layer.rows is not None
        mine = None if layer.mine is None else layer.mine[low:high] - begin
        scatters.append(RowScatter(number=number, target=target, rows=layer.rows[low:high], mine=mine))
    return scatters


def _queue_dense(
    dense: DenseLoad,
    reader: BlockReader,
    uploads: Uploads | None,
    rebuilt: dict[Path, Any],
    made: dict[tuple[int, ...], torch.Tensor],
) -> list[Scatter]:
    """Queue a leaf; `made` has the new tensors for objects by their blocks."""
    stored = dense.source
    if dense.target is None and stored.path in rebuilt:
        return []  # A filter gives it to two destinations.
    if dense.target is None and stored.blocks in made:
        rebuilt[stored.path] = made[stored.blocks]  # Tied.
        return []
    if dense.target is None:
        dtype = dtype_by_name(stored.dtype, owner=stored.name).dtype
        # An optimizer could not update one of inference mode later.
        with (
            torch.inference_mode(False),
            enough_memory(f"tensor {stored.name!r}, {math.prod(stored.shape) * dtype.itemsize} bytes"),
        ):
            whole = torch.empty(stored.shape, dtype=dtype, device="cpu")
        pieces: tuple[Piece, ...] = (Piece(whole, (0,) * whole.dim()),)
        rebuilt[stored.path] = made[stored.blocks] = whole
    else:
        pieces = dense.target.pieces
        if dense.is_for_object:
            rebuilt[stored.path] = dense.given
    scatters: list[Scatter] = []
    for number in stored.blocks:
        copies = list(_copies(reader.block(number).placed.spec, pieces))
        if copies:
            scatters += queue_boxes(number, copies, reader, uploads)
        else:
            reader.pass_over(number)
    return scatters


def queue_boxes(number: int, copies: Sequence[BoxCopy], reader: BlockReader, uploads: Uploads | None) -> list[Scatter]:
    """Queue what can be read straight into place; return what cannot, for scatter_all."""
    spec, target = reader.block(number).placed.spec, copies[0].target
    is_whole = len(copies) == 1 and tuple(target.shape) == spec.shape and target.is_contiguous()
    if is_whole and not spec.encoding and is_stored_as(target, spec.dtype, owner=spec.name):
        if target.is_cpu and (uploads is None or uploads.device_of(target) is None):
            reader.add(number, target.data_ptr(), begin=0, bytes=spec.bytes)
            return []
        if goes_up(target, uploads):
            return [WholeScatter(number=number, target=target)]
    return queue_box_parts(number, copies, reader, uploads)


def _copies(spec: BlockSpec, pieces: Sequence[Piece]) -> Iterator[BoxCopy]:
    """Return what the pieces of a leaf want of a block."""
    for piece in pieces:
        shape = tuple(piece.tensor.shape)
        shared = overlap(spec.begin, spec.shape, piece.begin, shape)
        if shared is not None and shared.shape == shape:
            yield BoxCopy(begin=shared.first_begin, target=piece.tensor)
        elif shared is not None:
            within = zip(shared.second_begin, shared.shape, strict=True)
            target = piece.tensor[tuple(slice(begin, begin + size) for begin, size in within)]
            yield BoxCopy(begin=shared.first_begin, target=target)
