"""Slots are aligned like their pieces and do not overlap; runs hold all of their pieces."""

from __future__ import annotations

import numpy as np
import pytest

from asyncckpt.devices.slots import SLOT_BYTES, runs_of, slots_of


@pytest.mark.parametrize("gap_bytes_max", [0, 100])
def test_runs_hold_their_pieces(gap_bytes_max: int) -> None:
    rng = np.random.default_rng(gap_bytes_max)
    begins = np.sort(rng.integers(0, 8000, 40)).astype(np.int64)
    sizes = rng.integers(1, 200, 40).astype(np.int64)
    runs = runs_of(begins, sizes, gap_bytes_max=gap_bytes_max)
    assert (begins >= runs.begins[runs.of]).all()
    assert (begins + sizes <= runs.ends[runs.of]).all()
    assert (runs.begins[1:] - runs.ends[:-1] > gap_bytes_max).all()
    assert (np.diff(runs.of) >= 0).all()
    assert len(np.unique(runs.of)) == len(runs.begins) > 1


def test_pieces_that_are_alone_are_runs_of_their_own() -> None:
    begins, sizes = np.array([0, 10, 20, 30, 50]), np.array([10, 10, 10, 10, 10])
    runs = runs_of(begins, sizes, alone=np.array([False, False, True, False, False]))
    assert runs.begins.tolist() == [0, 20, 30, 50]
    assert runs.ends.tolist() == [20, 30, 40, 60]
    assert runs.of.tolist() == [0, 0, 1, 2, 3]


def test_slots_have_room_and_are_aligned() -> None:
    rng = np.random.default_rng(1)
    begins, sizes = (rng.integers(1, 3000, 20).astype(np.int64) for _ in range(2))
    slots, bytes = slots_of(sizes, begins)
    assert (slots % SLOT_BYTES == begins % SLOT_BYTES).all()
    assert (slots[1:] >= slots[:-1] + sizes[:-1]).all()
    assert slots[-1] + sizes[-1] <= bytes
    plain, _ = slots_of(sizes)
    assert not (plain % SLOT_BYTES).any()


def test_no_pieces() -> None:
    none = np.empty(0, dtype=np.int64)
    runs = runs_of(none, none)
    assert (len(runs.begins), len(runs.ends), len(runs.of)) == (0, 0, 0)
    assert slots_of(none, none)[1] == 0
