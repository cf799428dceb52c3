"""Which rows of which stored layer go to which table, known before any table is touched.

1. The ids of all layers of all shards of all sources are read and verified, and the ids that newer layers have removed.
2. Of every layer, the rows that count are found (plan/newest_rows.py), and of these the ones that the table owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.format.encodings import decode
from asyncckpt.model.table import ID_COLUMN, OwnsIds, Table
from asyncckpt.native.contract import I64, U8
from asyncckpt.plan.load_plan import TableLoadPlan
from asyncckpt.plan.newest_rows import LayerIds, newest_rows
from asyncckpt.plan.stored_tables import StoredLayer, StoredShard
from asyncckpt.snapshot.block_reader import BlockReader


@dataclass
class LayerRows:
    """One layer of one shard of one source of one table.

    rank: that saved it. counted: positions of the rows that count; mine: of those that go to the table. Ascending
    int64, None: all rows. rows: the rows of the table that they became, on the CPU. first_row: known before the rows
    are, when all of the layer goes to consecutive ones.
    """

    source: str
    rank: int
    layer: StoredLayer
    columns: tuple[str, ...]
    ids: I64
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
        """The ids of some blocks, int64 [count], in the order of their rows."""
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


@dataclass(frozen=True)
class _SourceIds:
    """One shard of a source of a table with the ids of its layers; `owner` names it in errors."""

    owner: str
    layers: list[LayerRows]
    removed: list[I64]


def read_layers(plans: Sequence[TableLoadPlan], reader: BlockReader, threads: Executor) -> list[list[LayerRows]]:
    """The layers of all sources of every table, newest first, with their ids and the rows that go to the table.

    CorruptError when ids are damaged, or a layer holds one twice. `threads` share the work of finding the rows.
    """
    ids = IdsReader(reader)
    found = [[_begin(item.name, shard, columns, ids) for shard, columns in item.sources] for item in plans]
    ids.run()
    chosen = threads.map(_newest, [source for sources in found for source in sources])
    for item, sources in zip(plans, found, strict=True):
        for source in sources:
            for layer, counted in zip(source.layers, next(chosen), strict=True):
                layer.counted = counted
                layer.mine = _owned(item.table, layer.counted_ids, counted)
    return [[layer for source in sources for layer in source.layers] for sources in found]


def _begin(table: str, shard: StoredShard, columns: tuple[str, ...], ids: IdsReader) -> _SourceIds:
    layers, removed = [], []
    for layer in shard.layers:
        own = ids.add(layer.columns[ID_COLUMN], layer.rows_count)
        layers.append(LayerRows(source=shard.name, rank=shard.rank, layer=layer, columns=columns, ids=own))
        removed.append(ids.add(layer.removed, layer.removed_count))
    return _SourceIds(owner=f"table {shard.name!r}, loaded into {table!r},", layers=layers, removed=removed)


def _newest(source: _SourceIds) -> list[I64 | None]:
    stack = [LayerIds(ids=own.ids, removed=removed) for own, removed in zip(source.layers, source.removed, strict=True)]
    return newest_rows(stack, owner=source.owner)


def _owned(table: Table, ids: I64, counted: I64 | None) -> I64 | None:
    """Of the rows that count, those of ids that the table owns: unsigned id modulo shard count, unless it says else."""
    index, count = table.shard
    if isinstance(table, OwnsIds):
        owned = table.owned(ids)
    elif count > 1:
        owned = ids.view(np.uint64) % np.uint64(count) == np.uint64(index)
    else:
        return counted
    if owned.all():
        return counted
    return np.flatnonzero(owned) if counted is None else counted[owned]
