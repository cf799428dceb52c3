"""Which rows of a stack of layers count, against a dict that applies the layers from the oldest to the newest."""

from __future__ import annotations

import random

import numpy as np
import pytest

from asyncckpt.errors import CorruptError
from asyncckpt.snapshot.layer_rows import LayerIds, newest_rows


def layer(ids: list[int], removed: list[int] | None = None) -> LayerIds:
    return LayerIds(ids=np.array(ids, dtype=np.int64), removed=np.array(removed or [], dtype=np.int64))


def chosen(layers: list[LayerIds]) -> list[list[int]]:
    found = newest_rows(layers, owner="table 'user'")
    return [
        list(range(len(own.ids))) if rows is None else rows.tolist() for own, rows in zip(layers, found, strict=True)
    ]


def test_one_layer_is_taken_as_it_is() -> None:
    assert newest_rows([layer([1, 2, 1], [5])], owner="table") == [None]


def test_newest_row_wins_and_removed_ones_are_gone() -> None:
    assert chosen([layer([2], [3]), layer([2, 4], [1]), layer([1, 2, 3, 4, 5])]) == [[0], [1], [4]]


def test_row_wins_over_the_removal_of_its_own_layer() -> None:
    assert chosen([layer([1], [1]), layer([1, 2], [2]), layer([1, 2])]) == [[0], [1], []]


def test_all_rows_are_none() -> None:
    assert newest_rows([layer([7], [8]), layer([1, 2])], owner="table") == [None, None]
    assert newest_rows([layer([]), layer([])], owner="table") == [None, None]


@pytest.mark.parametrize("layers", [[[1, 1], [2]], [[1], [2, 2], [3]], [[1], [1, 1]], [[1], [2], [1, 3, 1]]])
def test_same_id_twice(layers: list[list[int]]) -> None:
    with pytest.raises(CorruptError, match="table 'user' holds the same id twice"):
        chosen([layer(ids) for ids in layers])


def test_twice_in_the_last_layer_is_for_the_table_to_find() -> None:
    assert chosen([layer([1]), layer([2, 2])]) == [[0], [0, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_random_layers(seed: int) -> None:
    choose = random.Random(seed)
    ids = range(-20, 20)
    oldest_first = [
        layer(choose.sample(ids, choose.randrange(0, 20)), choose.sample(ids, choose.randrange(0, 10)))
        for _ in range(choose.randrange(1, 6))
    ]
    state: dict[int, tuple[int, int]] = {}
    for depth, own in enumerate(oldest_first):
        for id in own.removed.tolist():
            state.pop(id, None)
        state |= {id: (depth, position) for position, id in enumerate(own.ids.tolist())}
    found = chosen(oldest_first[::-1])[::-1]
    assert {(depth, row) for depth, rows in enumerate(found) for row in rows} == set(state.values())
    assert all(rows == sorted(rows) for rows in found)
