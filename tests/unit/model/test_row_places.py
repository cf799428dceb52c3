"""An image whose rows keep their places is right after any sequence of inserts and removals."""

from __future__ import annotations

import random

import numpy as np
import pytest

from asyncckpt.model.row_places import RowPlaces
from asyncckpt.model.row_runs import gaps, rows_of
from asyncckpt.native import I64

ROWS_MAX = 24


def runs_of(used: set[int]) -> I64:
    runs: list[list[int]] = []
    for row in sorted(used):
        if runs and runs[-1][1] == row:
            runs[-1][1] = row + 1
        else:
            runs.append([row, row + 1])
    return np.array(runs, dtype=np.int64).reshape(-1, 2)


def test_rows_and_gaps_of_runs() -> None:
    runs = runs_of({1, 2, 5, 9})
    assert rows_of(runs).tolist() == [1, 2, 5, 9]
    assert gaps(runs, 12).tolist() == [[0, 1], [3, 5], [6, 9], [10, 12]]
    assert gaps(runs[:2], 6).tolist() == [[0, 1], [3, 5]]
    assert gaps(runs_of(set()), 3).tolist() == [[0, 3]]
    assert gaps(runs_of({0, 1}), 2).tolist() == []


def test_without_holes_every_row_is_at_its_own_place() -> None:
    places = RowPlaces.of(runs_of({0, 1, 2}), 3)
    rows = np.array([2, 0], dtype=np.int64)
    assert places.of_rows(rows) is rows
    assert len(places.holes) == 0


def test_a_removal_moves_one_row_only() -> None:
    before = RowPlaces.of(runs_of(set(range(10))), 10)
    after = RowPlaces.of(runs_of(set(range(10)) - {3}), 9, before)
    assert (after.holes.tolist(), after.tails.tolist()) == ([3], [9])
    assert after.moved_since(before).tolist() == [9]


def test_a_tail_stays_where_it_stands() -> None:
    before = RowPlaces.of(runs_of({0, 2, 4, 5}), 4)  # Holes 1 and 3, tails 4 and 5.
    after = RowPlaces.of(runs_of({2, 4, 5, 7}), 4, before)  # Row 0 went, row 7 came.
    stands = dict(zip(after.holes.tolist(), after.tails.tolist(), strict=True))
    assert (stands[1], stands[3]) == (4, 5)
    assert after.moved_since(before).tolist() == [7]


@pytest.mark.parametrize("seed", range(150))
def test_an_image_brought_up_to_date_is_the_image(seed: int) -> None:
    chance = random.Random(seed)
    used: set[int] = set()
    image: dict[int, int] = {}
    before: RowPlaces | None = None
    for _ in range(15):
        inserted = set()
        for _ in range(chance.randrange(10)):
            row = chance.randrange(ROWS_MAX)
            if row in used:
                used.discard(row)
            else:
                used.add(row)
                inserted.add(row)
        rows = np.array(sorted(used), dtype=np.int64)
        places = RowPlaces.of(runs_of(used), len(used), before)
        stands = places.of_rows(rows).tolist()
        assert sorted(stands) == list(range(len(used)))
        copied = rows
        if before is not None:
            copied = np.union1d(places.moved_since(before), np.array(sorted(inserted & used), dtype=np.int64))
            assert set(copied.tolist()) <= used
        image |= dict(zip(places.of_rows(copied).tolist(), copied.tolist(), strict=True))
        assert [image[place] for place in stands] == rows.tolist()
        before = places
