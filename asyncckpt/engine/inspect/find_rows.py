"""Find rows of a stored table by their ids, without loading it.

The ids of the table are read in windows, of every shard the newest layer first, until all that are looked for are
decided; then only the rows that were found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.engine.inspect.stored_values import StoredValues, bits_of
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.model.owned_ids import owned_mask
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.native import I64
from asyncckpt.plan.stored_tables import StoredLayer, StoredShard, StoredTable


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
    places: dict[int, tuple[StoredLayer, int]] = {}
    for shard in table.shards:
        owned = wanted if shard.shard == (0, 1) else wanted[owned_mask(wanted, shard=shard.shard)]
        places |= _places(shard, owned, values)
    order = [id for id in dict.fromkeys(ids.tolist()) if id in places]
    missing = [id for id in wanted.tolist() if id not in places]
    columns = {
        name: _read(name, [places[id] for id in order], table, values) for name in table.columns if name != ID_COLUMN
    }
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


def _read(
    column: str, places: Sequence[tuple[StoredLayer, int]], table: StoredTable, values: StoredValues
) -> torch.Tensor:
    """Return one column of rows at these places, in their order."""
    spec = values.spec(table.columns[column][0])
    found = torch.empty(
        len(places), *spec.shape[1:], dtype=dtype_by_name(spec.dtype, owner=spec.name).dtype, device="cpu"
    )
    bits = bits_of(found)
    for index, (layer, row) in enumerate(places):
        for number in layer.columns[column]:
            begin, count = values.spec(number).row_begin, values.spec(number).shape[0]
            if begin <= row < begin + count:
                bits[index] = bits_of(values.range(number, row - begin, row - begin + 1))[0]
    return found
