"""Which rows of a stack of layers count: the newest of each id, unless a newer layer has removed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.errors import CorruptError
from asyncckpt.native import core
from asyncckpt.native.contract import I64


@dataclass(frozen=True)
class LayerIds:
    """The ids of a layer's rows, int64 [n], and the ids that it takes out of the layers below, int64 [m]."""

    ids: I64
    removed: I64


def newest_rows(layers: Sequence[LayerIds], *, owner: str) -> list[I64 | None]:
    """For every layer, newest first, the positions of its rows that count, ascending int64; None: all of them.

    A row of the layer itself counts although its id is among the layer's removed ones: it came back. CorruptError
    naming `owner` when a layer that is not the last holds an id twice; of the last one only rows that count may do so
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
