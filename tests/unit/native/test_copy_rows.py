"""Rows are copied by index, gathered or scattered, and no byte beside them changes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from asyncckpt.native import I64, U8, U64, Core

# Sizes with a way of their own, those around them, and odd ones.
ROW_BYTES = [0, 1, 3, 4, 7, 8, 12, 16, 17, 31, 32, 48, 64, 65, 100, 128, 192, 256, 300, 511, 512, 1000, 1024, 4096]


def columns_of(pairs: list[tuple[U8, U8]]) -> U64:
    """The table of some columns, each a source and a target uint8 [rows, row bytes]."""
    return np.array(
        [(source.ctypes.data, target.ctypes.data, source.shape[1]) for source, target in pairs], dtype=np.uint64
    ).reshape(-1, 3)


def copy_and_check(core: Core, pairs: list[tuple[U8, U8]], sources: I64 | None, targets: I64 | None) -> None:
    """Copy and compare whole targets, on one thread and on three."""
    count = len(sources if sources is not None else targets if targets is not None else [])
    for threads in (1, 3):
        for _, target in pairs:
            target[...] = 0xA5
        core.copy_rows(columns_of(pairs), sources, targets, threads=threads)
        for source, target in pairs:
            expected = np.full_like(target, 0xA5)
            expected[np.arange(count) if targets is None else targets] = source[
                np.arange(count) if sources is None else sources
            ]
            np.testing.assert_array_equal(target, expected)


def aligned(rows_count: int, row_bytes: int, *, shift: int = 0) -> U8:
    """An array [rows_count, row_bytes] that begins `shift` bytes behind a cache line."""
    raw = np.zeros(rows_count * row_bytes + 64 + shift, dtype=np.uint8)
    start = -int(raw.ctypes.data) % 64 + shift
    return raw[start : start + rows_count * row_bytes].reshape(rows_count, row_bytes)


def random_column(rng: np.random.Generator, rows_count: int, row_bytes: int) -> tuple[U8, U8]:
    source = aligned(rows_count, row_bytes)
    source[...] = rng.integers(0, 256, source.shape, dtype=np.uint8)
    return source, aligned(rows_count, row_bytes)


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_every_row_size(core: Core, rng: np.random.Generator, row_bytes: int) -> None:
    column = random_column(rng, 700, row_bytes)
    sources, targets = (rng.permutation(700)[:501].astype(np.int64) for _ in range(2))
    copy_and_check(core, [column], sources, targets)
    copy_and_check(core, [column], np.sort(sources), None)
    copy_and_check(core, [column], None, np.sort(targets))


@pytest.mark.parametrize("row_bytes", [8, 64, 100, 256, 1024])
@pytest.mark.parametrize(("source_shift", "target_shift"), [(1, 0), (0, 8), (4, 12), (63, 1)])
def test_any_alignment(
    core: Core, rng: np.random.Generator, row_bytes: int, source_shift: int, target_shift: int
) -> None:
    source = aligned(300, row_bytes, shift=source_shift)
    source[...] = rng.integers(0, 256, source.shape, dtype=np.uint8)
    rows = np.sort(rng.permutation(300)[:200].astype(np.int64))
    copy_and_check(core, [(source, aligned(300, row_bytes, shift=target_shift))], rows, rows)


@pytest.mark.parametrize("share", [0.002, 0.05, 0.5, 0.95, 1.0])
def test_many_rows_of_several_columns(core: Core, rng: np.random.Generator, share: float) -> None:
    """Enough rows for several grains and threads; a growing share makes ever longer runs of neighbours."""
    count = 20_000
    columns = [random_column(rng, count, row_bytes) for row_bytes in (8, 0, 64, 20)]
    rows = np.flatnonzero(rng.random(count) < share).astype(np.int64)
    copy_and_check(core, columns, rows, rows)
    copy_and_check(core, columns, rows, None)
    copy_and_check(core, columns, None, rng.permutation(count)[: len(rows)].astype(np.int64))


@pytest.mark.parametrize("row_bytes", [8, 64, 1000])
def test_runs_that_break_inside_and_between_blocks(core: Core, rng: np.random.Generator, row_bytes: int) -> None:
    """Neighbours in the source alone, in the target alone, in both with jumps, and the same rows backwards."""
    column = random_column(rng, 9000, row_bytes)
    up = np.arange(4000, dtype=np.int64)
    jumping = up + (up // 8) * 3 + (up >= 1500) * 7
    for sources, targets in [
        (up, jumping),
        (jumping, up),
        (jumping, jumping),
        (up + 17, up + 4000),
        (up[::-1], up),
        (up[::-1], up[::-1]),
        (np.full(100, 5, dtype=np.int64), up[:100]),
    ]:
        copy_and_check(core, [column], sources, targets)


def test_rows_need_not_be_contiguous(core: Core, rng: np.random.Generator) -> None:
    column = random_column(rng, 400, 16)
    rows = rng.permutation(400).astype(np.int64)
    copy_and_check(core, [column], rows[::2], rows[1::2])


def test_last_row_of_a_huge_column_alone(core: Core, rng: np.random.Generator) -> None:
    """Offsets of more than 32 bits; the memory before the row is never touched."""
    memory = core.map_memory(4096) if core.implementation == "twin" else core.map_memory((4 << 30) + (2 << 20))
    source = rng.integers(0, 256, (1, 256), dtype=np.uint8)
    row = memory.bytes // 256 - 1
    columns = np.array([[source.ctypes.data, memory.address, 256]], dtype=np.uint64)
    core.copy_rows(columns, None, np.array([row], dtype=np.int64))
    np.testing.assert_array_equal(memory.view()[row * 256 :], source[0])
    assert not memory.view()[row * 256 - 256 : row * 256].any()
    memory.close()


def test_nothing_to_copy(core: Core) -> None:
    none = np.empty(0, dtype=np.int64)
    some = np.array([5, 1, 9], dtype=np.int64)
    core.copy_rows(np.zeros((2, 3), dtype=np.uint64), none, none)
    core.copy_rows(np.zeros((0, 3), dtype=np.uint64), some, None)
    core.copy_rows(np.zeros((2, 3), dtype=np.uint64), some, some)


@pytest.mark.parametrize("bad", [-1, -(2**63)])
def test_negative_rows_are_refused_before_anything_is_copied(core: Core, rng: np.random.Generator, bad: int) -> None:
    source, target = random_column(rng, 50, 8)
    good = np.arange(50, dtype=np.int64)
    wrong = good.copy()
    wrong[-1] = bad
    for sources, targets in [(wrong, good), (good, wrong), (wrong, None), (None, wrong)]:
        with pytest.raises(ValueError, match="negative"):
            core.copy_rows(columns_of([(source, target)]), sources, targets)
    assert not target.any()


def test_wrong_arguments_are_refused(core: Core) -> None:
    table = np.zeros((1, 3), dtype=np.uint64)
    rows = np.zeros(3, dtype=np.int64)
    with pytest.raises(ValueError, match="columns must be"):
        core.copy_rows(np.zeros((1, 2), dtype=np.uint64), rows, rows)
    with pytest.raises(ValueError, match="at most one of them None, found none and none"):
        core.copy_rows(table, None, None)
    with pytest.raises(ValueError, match="found 3 and 2"):
        core.copy_rows(table, rows, rows[:2])
    with pytest.raises(ValueError, match="source_rows must be an int64 array"):
        core.copy_rows(table, rows.astype(np.int32), rows)
    with pytest.raises(ValueError, match="target_rows must be an int64 array"):
        core.copy_rows(table, None, rows.reshape(3, 1))


def test_a_column_without_memory_is_refused(native: Core) -> None:
    with pytest.raises(ValueError, match="no source or no target"):
        native.copy_rows(np.array([[0, 0, 8]], dtype=np.uint64), np.zeros(1, dtype=np.int64), None)


def test_copies_from_several_threads_at_once(core: Core, rng: np.random.Generator) -> None:
    source, _ = random_column(rng, 40_000, 64)
    rows = rng.permutation(40_000).astype(np.int64)
    targets = [np.zeros_like(source) for _ in range(4)]

    def gather(target: U8) -> None:
        for _ in range(3):
            core.copy_rows(columns_of([(source, target)]), rows, None, threads=3)

    threads = [threading.Thread(target=gather, args=[target]) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for target in targets:
        np.testing.assert_array_equal(target, source[rows])
