"""The snapshot kernel copies exactly the bytes it was told to, whatever their alignment and size."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from asyncckpt.native import U8, U64, Core

# Around every border inside the kernels: a line, four lines, a page, four pages, a grain.
BORDERS = [
    0,
    1,
    63,
    64,
    65,
    255,
    256,
    4095,
    4096,
    16383,
    16384,
    16385,
    20480,
    65536 + 17,
    (1 << 20) + 1,
    (3 << 20) + 77,
]


def copy_and_check(core: Core, source: U8, target: U8, places: list[tuple[int, int, int]], threads: int) -> None:
    """Copy (source offset, target offset, bytes) and compare the whole target, bytes between the places included."""
    expected = target.copy()
    segments = np.empty((len(places), 3), dtype=np.uint64)
    for index, (source_at, target_at, count) in enumerate(places):
        expected[target_at : target_at + count] = source[source_at : source_at + count]
        segments[index] = source.ctypes.data + source_at, target.ctypes.data + target_at, count
    core.copy(segments, threads=threads)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("count", BORDERS)
@pytest.mark.parametrize(("source_at", "target_at"), [(0, 0), (1, 0), (0, 1), (63, 17), (4095, 4032)])
def test_one_segment(core: Core, rng: np.random.Generator, count: int, source_at: int, target_at: int) -> None:
    source = rng.integers(0, 256, source_at + count + 64, dtype=np.uint8)
    target = rng.integers(0, 256, target_at + count + 64, dtype=np.uint8)
    copy_and_check(core, source, target, [(source_at, target_at, count)], threads=2)


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_random_segments(core: Core, rng: np.random.Generator, threads: int) -> None:
    source = rng.integers(0, 256, 24 << 20, dtype=np.uint8)
    target = np.zeros(24 << 20, dtype=np.uint8)
    cuts = np.unique(np.concatenate([[0, len(target)], rng.integers(0, len(target), 400)]))
    gaps = rng.integers(0, 3, len(cuts) - 1)
    places = [
        (int(rng.integers(0, len(source) - (end - begin) + 1)), int(begin), max(0, int(end - begin - gap)))
        for begin, end, gap in zip(cuts[:-1], cuts[1:], gaps, strict=True)
    ]
    copy_and_check(core, source, target, places, threads=threads)


def test_very_many_tiny_segments(core: Core, rng: np.random.Generator) -> None:
    source = rng.integers(0, 256, 4 << 20, dtype=np.uint8)
    target = np.zeros(4 << 20, dtype=np.uint8)
    starts = np.arange(0, len(source), 40, dtype=np.uint64)
    segments = np.stack(
        [source.ctypes.data + starts, target.ctypes.data + starts, np.full(len(starts), 33, dtype=np.uint64)], axis=1
    )
    segments[-1, 2] = 0
    core.copy(segments, threads=2)
    copied = (np.arange(len(source)) % 40 < 33) & (np.arange(len(source)) < int(starts[-1]))
    np.testing.assert_array_equal(target, np.where(copied, source, 0))


def test_nothing_to_copy(core: Core) -> None:
    core.copy(np.empty((0, 3), dtype=np.uint64))
    core.copy(np.zeros((2, 3), dtype=np.uint64))


@pytest.mark.parametrize(
    "segments",
    [
        np.zeros((1, 2), dtype=np.uint64),
        np.zeros(3, dtype=np.uint64),
        np.zeros((1, 3), dtype=np.int64),
        np.zeros((2, 6), dtype=np.uint64)[:, ::2],
    ],
)
def test_wrong_table_is_refused(core: Core, segments: U64) -> None:
    with pytest.raises(ValueError, match="segments must be"):
        core.copy(segments)


def test_copies_from_several_threads_at_once(core: Core, rng: np.random.Generator) -> None:
    source = rng.integers(0, 256, 8 << 20, dtype=np.uint8)
    targets = [np.zeros_like(source) for _ in range(4)]

    def copy_often(target: U8) -> None:
        segments = np.array([[source.ctypes.data, target.ctypes.data, source.nbytes]], dtype=np.uint64)
        for _ in range(5):
            core.copy(segments, threads=3)

    threads = [threading.Thread(target=copy_often, args=[target]) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for target in targets:
        np.testing.assert_array_equal(target, source)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_has_threads_of_its_own(core: Core, rng: np.random.Generator) -> None:
    source = rng.integers(0, 256, 8 << 20, dtype=np.uint8)
    copy_and_check(core, source, np.zeros_like(source), [(0, 0, len(source))], threads=3)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            copy_and_check(core, source, np.zeros_like(source), [(0, 0, len(source))], threads=3)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    copy_and_check(core, source, np.zeros_like(source), [(0, 0, len(source))], threads=3)
