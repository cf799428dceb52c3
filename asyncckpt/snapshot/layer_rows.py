"""Which rows of which stored layer go to which table, known before any table is touched.

1. The ids of all layers of all shards of all sources are read and verified, and the ids that newer layers have removed.
2. Of every layer, the rows that count are found: the newest of each id, unless a newer layer has removed it. The table
   takes those that it owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncckpt.errors import CorruptError
from asyncckpt.format.encodings import decode
from asyncckpt.model.owned_ids import owned_mask
from asyncckpt.model.table import ID_COLUMN, Table, owns_ids
from asyncckpt.native import core
from asyncckpt.native.contract import I64, U8
from asyncckpt.plan.stored_tables import StoredLayer, StoredShard
from asyncckpt.snapshot.windows import BlockReader

if TYPE_CHECKING:
    from asyncckpt.plan.load_plan import TableLoadPlan


@dataclass
class LayerIds:
    """The ids of a layer's rows, int64 [n], and the ids that it takes out of the layers below, int64 [m]."""

    ids: I64
    removed: I64


@dataclass
class LayerRows(LayerIds):
    """One layer of one shard of one source of one table.

    rank: that saved it. counted: positions of the rows that count. mine: positions of those that go to the table.
    Ascending int64, None: all rows. rows: the rows of the table that they became, on the CPU. first_row: known before
    the rows are, when all of the layer goes to consecutive ones.
    """

    source: str
    rank: int
    layer: StoredLayer
    columns: tuple[str, ...]
    counted: I64 | None = None
    mine: I64 | None = None
    rows: torch.Tensor | None = None
    first_row: int | None = None

    @property
    def my_ids(self) -> I64:
        return self.ids if self.mine is None else self.ids[self.mine]

    @property
    def counted_ids(self) -> I64:
        return self.ids if self.counted is None else self.ids[self.counted]


class IdsReader:
    """Reads all ids in one batch: `add` layer by layer, then `run`; the arrays are filled afterwards."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader
        self._encoded: list[tuple[int, U8, I64]] = []

    def add(self, numbers: Sequence[int], count: int) -> I64:
        """Return the ids of some blocks, int64 [count], in the order of their rows."""
        ids = np.empty(count, dtype=np.int64)
        for number in numbers:
            spec = self._reader.block(number).placed.spec
            part = ids[spec.row_begin : spec.row_begin + spec.shape[0]]
            raw = part.view(np.uint8)
            if spec.encoding:
                raw = np.empty(spec.bytes, dtype=np.uint8)
                self._encoded.append((number, raw, part))
            self._reader.add(number, raw.ctypes.data, begin=0, bytes=spec.bytes)
        return ids

    def run(self) -> None:
        self._reader.run()
        for number, raw, part in self._encoded:
            part[:] = decode(raw, self._reader.block(number).placed.spec).numpy()
        self._encoded.clear()


def read_ids(layers: Sequence[StoredLayer], reader: BlockReader) -> list[LayerIds]:
    """Return the ids of some layers, and the ids that each removes, verified."""
    ids = IdsReader(reader)
    found = [
        LayerIds(
            ids=ids.add(layer.columns.get(ID_COLUMN, ()), layer.rows_count),
            removed=ids.add(layer.removed, layer.removed_count),
        )
        for layer in layers
    ]
    ids.run()
    return found


def layers_that_count(stored: StoredShard, reader: BlockReader) -> list[I64 | None]:
    """Return the positions of the rows that count of every layer, newest first, ascending; None: all of them.

    Takes 8 bytes for each id of all layers, and an id map over those of all layers but the oldest.
    """
    if len(stored.layers) == 1:
        return [None]
    return newest_rows(read_ids(stored.layers, reader), owner=f"table {stored.name!r}")


def read_layers(plans: Sequence[TableLoadPlan], reader: BlockReader, threads: Executor) -> list[list[LayerRows]]:
    """Return the layers of all sources of every table, newest first, with their ids and the rows that go to the table.

    CorruptError when ids are damaged, or a layer holds one twice. `threads` share the work of finding the rows.
    """
    ids = IdsReader(reader)
    found = [[_begin(shard, columns, ids) for shard, columns in item.sources] for item in plans]
    ids.run()
    stacks = [(item, layers) for item, own in zip(plans, found, strict=True) for layers in own]
    for (item, layers), chosen in zip(stacks, threads.map(_newest, stacks), strict=True):
        for layer, counted in zip(layers, chosen, strict=True):
            layer.counted = counted
            layer.mine = _owned(item.table, layer.counted_ids, counted)
    return [[layer for layers in own for layer in layers] for own in found]


def _begin(shard: StoredShard, columns: tuple[str, ...], ids: IdsReader) -> list[LayerRows]:
    return [
        LayerRows(
            source=shard.name,
            rank=shard.rank,
            layer=layer,
            columns=columns,
            ids=ids.add(layer.columns[ID_COLUMN], layer.rows_count),
            removed=ids.add(layer.removed, layer.removed_count),
        )
        for layer in shard.layers
    ]


def _newest(stack: tuple[TableLoadPlan, list[LayerRows]]) -> list[I64 | None]:
    item, layers = stack
    return newest_rows(layers, owner=f"table {layers[0].source!r}, loaded into {item.name!r},")


def _owned(table: Table, ids: I64, counted: I64 | None) -> I64 | None:
    """Return the rows that count and whose ids the table owns: those of its shard, unless it says else."""
    if owns_ids(table):
        owned = table.owned(ids)
    elif table.shard == (0, 1):
        return counted
    else:
        owned = owned_mask(ids, shard=table.shard)
    if owned.all():
        return counted
    return np.flatnonzero(owned) if counted is None else counted[owned]


def newest_rows(layers: Sequence[LayerIds], *, owner: str) -> list[I64 | None]:
    """Return for every layer, newest first, the positions of its rows that count, ascending int64; None: all of them.

    A row of the layer itself counts although its id is among the layer's removed ones: it came back. CorruptError
    naming `owner` when a layer that is not the last holds an id twice; in the last one only rows that count may do so
    unseen, which whoever gives them to a table finds out.
    """
    if len(layers) == 1:
        return [None]
    settled = core.id_map(sum(len(layer.ids) + len(layer.removed) for layer in layers[:-1]))
    positions: list[I64 | None] = []
    for layer in layers:
        found = settled.find(layer.ids)
        count = np.flatnonzero(found < 0)
        _check_distinct(found[found >= 0], settled.rows_end, owner)
        positions.append(None if len(count) == len(layer.ids) else count)
        if layer is layers[-1]:
            break
        _, new = settled.insert(layer.ids)
        if len(new) != len(count):
            raise _twice(owner)
        settled.insert(layer.removed)
    return positions


def _check_distinct(rows: I64, rows_end: int, owner: str) -> None:
    seen = np.zeros(rows_end, dtype=np.bool_)
    seen[rows] = True
    if int(np.count_nonzero(seen)) != len(rows):
        raise _twice(owner)


def _twice(owner: str) -> CorruptError:
    return CorruptError(f"{owner} holds the same id twice")
