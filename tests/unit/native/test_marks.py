"""Marks are set for exactly the rows named, and found again."""

from __future__ import annotations

import numpy as np
import pytest

from asyncckpt.native import U8, Core

# Around a block of 64, and large enough for several slices and threads.
COUNTS = [0, 1, 15, 63, 64, 65, 127, 128, 1000, 262_143, 262_145, (2 << 20) + 77]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 5000])
def test_mark_sets_the_rows_and_no_other(core: Core, rng: np.random.Generator, count: int) -> None:
    marks = rng.integers(0, 256, 3000, dtype=np.uint8)
    rows = rng.integers(-1, 3000, count)
    expected = marks.copy()
    expected[rows[rows >= 0]] = 7
    core.mark(marks, rows, 7)
    np.testing.assert_array_equal(marks, expected)


def test_mark_passes_over_minus_one(core: Core) -> None:
    marks = np.zeros(3, dtype=np.uint8)
    core.mark(marks, np.array([-1, -1], dtype=np.int64), 255)
    assert not marks.any()
    core.mark(marks, np.array([-1, 2, -1, 0, 2], dtype=np.int64), 255)
    assert marks.tolist() == [255, 0, 255]


@pytest.mark.parametrize("bad", [-2, -(2**63), 100, 101, 2**63 - 1])
@pytest.mark.parametrize("place", [0, 50, 199])
def test_mark_refuses_other_rows_and_sets_nothing(core: Core, bad: int, place: int) -> None:
    marks = np.zeros(100, dtype=np.uint8)
    rows = np.arange(200, dtype=np.int64) % 100
    rows[place] = bad
    with pytest.raises(ValueError, match="neither -1 nor one of the rows"):
        core.mark(marks, rows, 1)
    assert not marks.any()


def test_mark_of_no_rows(core: Core) -> None:
    marks = np.zeros(0, dtype=np.uint8)
    core.mark(marks, np.empty(0, dtype=np.int64), 1)
    core.mark(marks, np.array([-1], dtype=np.int64), 1)
    with pytest.raises(ValueError, match="neither -1 nor"):
        core.mark(marks, np.array([0], dtype=np.int64), 1)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.1, 1.0])
def test_marked_finds_every_row(core: Core, rng: np.random.Generator, count: int, share: float) -> None:
    marks = np.where(rng.random(count) < share, rng.integers(101, 256, count), rng.integers(0, 101, count))
    marks = marks.astype(np.uint8)
    for threads in (0, 1, 3):
        rows = core.marked(marks, 100, threads=threads)
        assert rows.dtype == np.int64
        np.testing.assert_array_equal(rows, np.flatnonzero(marks > 100))


@pytest.mark.parametrize("above", [0, 1, 127, 128, 254, 255])
def test_marked_compares_without_sign(core: Core, above: int) -> None:
    marks = np.arange(256, dtype=np.uint8).repeat(3)
    np.testing.assert_array_equal(core.marked(marks, above), np.arange(3 * (above + 1), 768))


@pytest.mark.parametrize("start", range(1, 5))
def test_marked_of_any_alignment(core: Core, rng: np.random.Generator, start: int) -> None:
    marks = rng.integers(0, 3, 1000, dtype=np.uint8)[start:]
    marks.flags.writeable = False
    np.testing.assert_array_equal(core.marked(marks, 1), np.flatnonzero(marks > 1))


@pytest.mark.parametrize(
    "marks",
    [np.zeros((2, 2), dtype=np.uint8), np.zeros(4, dtype=np.int8), np.zeros(8, dtype=np.uint8)[::2]],
)
def test_wrong_marks_are_refused(core: Core, marks: U8) -> None:
    with pytest.raises(ValueError, match="marks must be a C-contiguous uint8 array"):
        core.mark(marks, np.empty(0, dtype=np.int64), 1)
    with pytest.raises(ValueError, match="marks must be a C-contiguous uint8 array"):
        core.marked(marks, 1)


def test_wrong_values_are_refused(core: Core) -> None:
    marks, rows = np.zeros(4, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    for value in (-1, 256):
        with pytest.raises(ValueError, match=f"value must be from 0 to 255, found {value}"):
            core.mark(marks, rows, value)
        with pytest.raises(ValueError, match=f"above must be from 0 to 255, found {value}"):
            core.marked(marks, value)
    with pytest.raises(ValueError, match="rows must be an int64 array"):
        core.mark(marks, rows.astype(np.int32), 1)
    marks.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        core.mark(marks, rows, 1)
