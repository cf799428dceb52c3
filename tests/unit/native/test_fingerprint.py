"""A row's print is what the xxhash package says, and tells rows apart that differ anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from asyncckpt.native import U8, U64, Core


def columns_of(columns: list[U8]) -> U64:
    return np.array([(column.ctypes.data, column.shape[1]) for column in columns], dtype=np.uint64).reshape(-1, 2)


def print_of(parts: list[bytes]) -> int:
    """What a print must be, computed by the xxhash package."""
    value = 0
    for part in parts:
        value = xxhash.xxh3_64_intdigest(part, value)
    return value


# Around every border inside XXH3: 3, 8, 16, 128, 240 bytes, and a block of 1024.
@pytest.mark.parametrize("row_bytes", [0, 1, 3, 4, 8, 9, 16, 17, 64, 128, 129, 240, 241, 256, 1024, 1025, 5000])
@pytest.mark.parametrize("threads", [1, 3])
def test_one_column(core: Core, rng: np.random.Generator, row_bytes: int, threads: int) -> None:
    column = rng.integers(0, 256, (50, row_bytes), dtype=np.uint8)
    prints = core.fingerprints(columns_of([column]), 50, threads=threads)
    assert prints.dtype == np.uint64
    assert prints.tolist() == [print_of([row.tobytes()]) for row in column]


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_columns_are_chained_in_order(core: Core, rng: np.random.Generator, threads: int) -> None:
    columns = [rng.integers(0, 256, (9000, row_bytes), dtype=np.uint8) for row_bytes in (8, 256, 0, 5)]
    prints = core.fingerprints(columns_of(columns), 9000, threads=threads)
    for row in [0, 1, 4095, 4096, 8191, 8192, 8999]:
        assert int(prints[row]) == print_of([column[row].tobytes() for column in columns])
    assert len(np.unique(prints)) == 9000
    assert not np.isin(core.fingerprints(columns_of(columns[::-1]), 100), prints[:100]).any()


def test_one_changed_bit_changes_the_print_of_its_row_alone(core: Core, rng: np.random.Generator) -> None:
    columns = [rng.integers(0, 256, (40, row_bytes), dtype=np.uint8) for row_bytes in (8, 300)]
    before = core.fingerprints(columns_of(columns), 40)
    columns[1][17, 299] ^= 1
    assert np.flatnonzero(core.fingerprints(columns_of(columns), 40) != before).tolist() == [17]


def test_no_rows_and_no_columns(core: Core) -> None:
    assert core.fingerprints(np.zeros((2, 2), dtype=np.uint64), 0).shape == (0,)
    assert core.fingerprints(np.zeros((0, 2), dtype=np.uint64), 3).tolist() == [0, 0, 0]
    assert core.fingerprints(np.zeros((1, 2), dtype=np.uint64), 2).tolist() == [print_of([b""])] * 2


def test_wrong_arguments_are_refused(core: Core) -> None:
    with pytest.raises(ValueError, match="columns must be"):
        core.fingerprints(np.zeros((1, 3), dtype=np.uint64), 1)
    with pytest.raises(ValueError, match="rows_count must be 0 or more, found -1"):
        core.fingerprints(np.zeros((1, 2), dtype=np.uint64), -1)
