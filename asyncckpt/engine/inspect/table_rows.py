"""The rows of a stored table that count, by their ids and places, and their values column by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.engine.inspect.stored_values import StoredValues, bits_of
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Chain
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.native import I64
from asyncckpt.plan.stored_tables import StoredLayer, StoredTable
from asyncckpt.shard.reader import ChainReader
from asyncckpt.snapshot.layer_rows import IdsReader, LayerIds, newest_rows


@dataclass(frozen=True)
class Part:
    """What one layer of one shard gives to a table.

    origin    the manifest and the rank that it is of: the same in every chain that has the layer
    rows      positions of the rows that count, ascending; None: all
    begin     the number of the first of them among all rows of the table, and behind the last one
    """

    origin: tuple[str, int]
    layer: StoredLayer
    rows: I64 | None
    begin: int
    end: int

    def positions(self, rows: I64) -> I64:
        """Return where rows of the table, of this part, stand in the layer."""
        own = rows - self.begin
        return own if self.rows is None else self.rows[own]


class TableRows:
    """All rows of a table that count, numbered in the order of shards and layers. ids: int64 [n], read and verified."""

    def __init__(self, table: StoredTable, chain: Chain, reader: ChainReader, values: StoredValues) -> None:
        self._table = table
        self._values = values
        digests = {manifest.step: manifest.digest for manifest in chain.manifests}
        self.parts: list[Part] = []
        ids: list[I64] = [np.empty(0, dtype=np.int64)]
        end = 0
        for shard in table.shards:
            layers = read_ids(shard.layers, reader)
            chosen = newest_rows(layers, owner=f"table {table.name!r}")
            for layer, own, rows in zip(shard.layers, layers, chosen, strict=True):
                ids.append(own.ids if rows is None else own.ids[rows])
                begin, end = end, end + len(ids[-1])
                self.parts.append(Part((digests[layer.step], shard.rank), layer, rows, begin, end))
        self.ids: I64 = np.concatenate(ids)

    def form(self, column: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and row shape of a column."""
        spec = self._values.spec(self._table.columns[column][0])
        return spec.dtype, spec.shape[1:]

    @property
    def columns(self) -> list[str]:
        """All columns but that of ids."""
        return [name for name in self._table.columns if name != ID_COLUMN]

    def digests(self, column: str) -> list[object]:
        """Return what is equal only where two tables of whole layers hold the same bits in a column, row for row."""
        found: list[object] = []
        for part in self.parts:
            specs = [(n, self._values.spec(n)) for n in part.layer.columns[column]]
            blocks = [(spec.row_begin, spec.shape, str(spec.encoding), self._values.digest(n)) for n, spec in specs]
            found.append((blocks, None if part.rows is None else object()))
        return found

    def read(self, column: str, rows: I64) -> torch.Tensor:
        """Return a column of some rows of the table, distinct, in their order, [n, *row shape]."""
        dtype, shape = self.form(column)
        found = torch.empty(len(rows), *shape, dtype=dtype_by_name(dtype, owner=column).dtype, device="cpu")
        bits = bits_of(found)
        for part in self.parts:
            mine = np.flatnonzero((rows >= part.begin) & (rows < part.end))
            if len(mine):
                for at, values in self._of_part(part, column, part.positions(rows[mine])):
                    bits[torch.from_numpy(mine[at])] = bits_of(values)
        return found

    def _of_part(self, part: Part, column: str, positions: I64) -> list[tuple[I64, torch.Tensor]]:
        """Return values of a layer, block by block, each with which of the positions they are of."""
        found = []
        for number in part.layer.columns[column]:
            spec = self._values.spec(number)
            at = np.flatnonzero((positions >= spec.row_begin) & (positions < spec.row_begin + spec.shape[0]))
            if len(at):
                found.append((at, self._values.rows(number, positions[at] - spec.row_begin)))
        return found


def read_ids(layers: Sequence[StoredLayer], reader: ChainReader) -> list[LayerIds]:
    """Return the ids, and the removed ids, of some layers, verified."""
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
