"""The rows of a stored table that count, by their ids and places, and their values column by column.

To find some rows by their ids, the ids of the table are read in windows, of every shard the newest layer first, until
all that are looked for are decided; then only the rows that were found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.engine.inspect.stored_values import StoredValues, bits_of
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Chain
from asyncckpt.model.owned_ids import owned_mask
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.native import I64
from asyncckpt.plan.stored_tables import StoredLayer, StoredShard, StoredTable
from asyncckpt.shard.reader import ChainReader
from asyncckpt.snapshot.layer_rows import newest_rows, read_ids


@dataclass(frozen=True)
class Part:
    """What one layer of one shard gives to a table.

    origin    the manifest and the rank that it is of: the same in every chain that has the layer
    rows      positions of the rows that count, ascending; None: all
    begin     the number of the first of them among all rows of the table, and past the last one
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
        own = [(part, np.flatnonzero((rows >= part.begin) & (rows < part.end))) for part in self.parts]
        places = [(part.layer, mine, part.positions(rows[mine])) for part, mine in own if len(mine)]
        return _read(column, places, self._values, form=self.form(column), count=len(rows))


def _read(
    column: str,
    places: Iterable[tuple[StoredLayer, I64, I64]],
    values: StoredValues,
    *,
    form: tuple[str, tuple[int, ...]],
    count: int,
) -> torch.Tensor:
    """Return a column of `count` rows: of every layer which of them stand in it, and where."""
    found = torch.empty(count, *form[1], dtype=dtype_by_name(form[0], owner=column).dtype, device="cpu")
    bits = bits_of(found)
    for layer, which, positions in places:
        for number in layer.columns[column]:
            spec = values.spec(number)
            at = np.flatnonzero((positions >= spec.row_begin) & (positions < spec.row_begin + spec.shape[0]))
            if len(at):
                bits[torch.from_numpy(which[at])] = bits_of(values.rows(number, positions[at] - spec.row_begin))
    return found


@dataclass(frozen=True)
class FoundRows:
    """Rows of a table. ids: int64 [n], in the order in which they were asked for; columns: each [n, *row shape].

    missing: ids that the table does not hold.
    """

    ids: I64
    columns: dict[str, torch.Tensor]
    missing: I64


def find_rows(table: StoredTable, values: StoredValues, ids: I64) -> FoundRows:
    """Return the rows of some ids, int64 [n]; each once."""
    wanted = np.unique(ids)
    found: dict[int, tuple[StoredLayer, int]] = {}
    for shard in table.shards:
        owned = wanted if shard.shard == (0, 1) else wanted[owned_mask(wanted, shard=shard.shard)]
        found |= _places(shard, owned, values)
    order = [id for id in dict.fromkeys(ids.tolist()) if id in found]
    rows = np.array([found[id][1] for id in order], dtype=np.int64)
    places = []
    for layer in table.layers:
        which = np.flatnonzero([found[id][0] is layer for id in order])
        places.append((layer, which, rows[which]))
    columns = {}
    for name, numbers in table.columns.items():
        if name != ID_COLUMN:
            spec = values.spec(numbers[0])
            columns[name] = _read(name, places, values, form=(spec.dtype, spec.shape[1:]), count=len(order))
    missing = [id for id in wanted.tolist() if id not in found]
    return FoundRows(np.array(order, dtype=np.int64), columns, np.array(missing, dtype=np.int64))


def _places(shard: StoredShard, wanted: I64, values: StoredValues) -> dict[int, tuple[StoredLayer, int]]:
    """Return the layer and the row in it of every id that the shard holds."""
    found: dict[int, tuple[StoredLayer, int]] = {}
    left = wanted
    for layer in shard.layers:
        for id, row in _hits(layer.columns.get(ID_COLUMN, ()), left, values):
            found.setdefault(id, (layer, row))
        gone = [id for id, _ in _hits(layer.removed, left, values)]
        left = np.setdiff1d(left, np.array([*found, *gone], dtype=np.int64))
        if not len(left):
            break
    return found


def _hits(numbers: Sequence[int], wanted: I64, values: StoredValues) -> Iterator[tuple[int, int]]:
    """Return the ids of some blocks that are among those wanted, with their rows."""
    for number in numbers:
        spec, step = values.spec(number), values.window_rows(number)
        for begin in range(0, spec.shape[0], step) if len(wanted) else ():
            ids = values.range(number, begin, min(begin + step, spec.shape[0])).numpy()
            at = np.flatnonzero(np.isin(ids, wanted))
            yield from zip(ids[at].tolist(), (at + begin + spec.row_begin).tolist(), strict=True)
