"""A read brings every item to its target, whatever the order, size and alignment, and knows a short file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncckpt.native import LEAF_BYTES, U8, CancelledDrain, Core, CoreIOError, Progress, Reads, ShortFile

MIB = 1 << 20
FILE_BYTES = 21 * MIB + 1234
O_DIRECT = getattr(os, "O_DIRECT", 0)


@pytest.fixture(scope="module")
def content() -> U8:
    return np.random.default_rng(7).integers(0, 256, FILE_BYTES, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, content: U8) -> Path:
    path = tmp_path_factory.mktemp("read") / "f"
    path.write_bytes(content.tobytes())
    # Pages that were not written yet make the first direct read wait for them.
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def fd(request: pytest.FixtureRequest, path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | (O_DIRECT if request.param else 0))
    yield fd
    os.close(fd)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT)


def read(
    core: Core, fds: list[int], places: list[tuple[int, int, int]], *, threads: int = 0, digests: bool = True
) -> U8 | None:
    """Read (target address, offset, bytes)."""
    progress = Progress()
    reads = Reads(
        np.array(places, dtype=np.uint64).reshape(-1, 3),
        np.array(fds, dtype=np.int32),
        direct=np.array([is_direct(fd) for fd in fds], dtype=np.int32),
    )
    result = core.read(reads, digests=digests, threads=threads, progress=progress)
    assert progress.bytes_done == sum(count for _, _, count in places)
    return result


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 70_000, MIB, LEAF_BYTES, 2 * LEAF_BYTES + 1, 17 * MIB + 3])
@pytest.mark.parametrize(("offset", "shift"), [(0, 0), (0, 5), (4096, 0), (4097, 0), (FILE_BYTES, 0), (12_345, 99)])
def test_one_item(
    core: Core,
    fd: int,
    content: U8,
    page_aligned: Callable[[int], U8],
    digest_of: Callable[[bytes], bytes],
    count: int,
    offset: int,
    shift: int,
) -> None:
    if offset == FILE_BYTES:
        offset -= count
    target = page_aligned(count + shift + 1)
    after = int(target[-1])
    digests = read(core, [fd], [(target.ctypes.data + shift, offset, count)])
    expected = content[offset : offset + count]
    np.testing.assert_array_equal(target[shift : shift + count], expected)
    assert target[-1] == after
    assert digests is not None
    assert digests[0].tobytes() == digest_of(expected.tobytes())


@pytest.mark.parametrize("threads", [0, 1, 7])
@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("size_max", [3000, 300_000, 12 * MIB])
def test_random_items_of_two_files(
    core: Core,
    fd: int,
    path: Path,
    content: U8,
    rng: np.random.Generator,
    digest_of: Callable[[bytes], bytes],
    threads: int,
    digests: bool,
    size_max: int,
) -> None:
    count = 300 if size_max < MIB else 8
    offsets = rng.integers(0, FILE_BYTES, count)
    sizes = np.minimum(rng.integers(0, size_max, count), FILE_BYTES - offsets)
    targets = [np.zeros(int(size), dtype=np.uint8) for size in sizes]
    other = os.open(path, os.O_RDONLY)
    fds = [fd if chosen else other for chosen in rng.integers(0, 2, count)]
    places = [
        (target.ctypes.data, int(offset), int(size))
        for target, offset, size in zip(targets, offsets, sizes, strict=True)
    ]
    taken = read(core, fds, places, threads=threads, digests=digests)
    os.close(other)
    assert (taken is not None) == digests
    for index, (target, offset) in enumerate(zip(targets, offsets, strict=True)):
        expected = content[offset : offset + len(target)]
        np.testing.assert_array_equal(target, expected)
        if taken is not None:
            assert taken[index].tobytes() == digest_of(expected.tobytes())


def test_whole_file_as_small_neighbours(core: Core, fd: int, content: U8) -> None:
    size = 60_000
    target = np.zeros(FILE_BYTES, dtype=np.uint8)
    starts = range(0, FILE_BYTES, size)
    places = [(target.ctypes.data + start, start, min(size, FILE_BYTES - start)) for start in starts]
    read(core, [fd] * len(places), places[::-1])
    np.testing.assert_array_equal(target, content)


def test_same_bytes_twice(core: Core, fd: int, content: U8) -> None:
    one, other = np.zeros((2, 1000), dtype=np.uint8)
    read(core, [fd, fd], [(one.ctypes.data, 500, 1000), (other.ctypes.data, 700, 1000)])
    np.testing.assert_array_equal(one, content[500:1500])
    np.testing.assert_array_equal(other, content[700:1700])


def test_no_item(core: Core) -> None:
    assert read(core, [], [], digests=False) is None
    digests = read(core, [], [])
    assert digests is not None
    assert digests.shape == (0, 16)


@pytest.mark.parametrize(
    ("offset", "count"),
    [(FILE_BYTES - 10, 11), (FILE_BYTES, 1), (FILE_BYTES + 9999, 5), (4096, FILE_BYTES), (MIB, 1 << 30)],
)
def test_short_file_names_the_item(
    core: Core, fd: int, page_aligned: Callable[[int], U8], offset: int, count: int
) -> None:
    small, target = np.zeros(10, dtype=np.uint8), page_aligned(min(count, 32 * MIB))
    # A short file ends the read before anything beyond its end is stored, so the target may be smaller than it says.
    with pytest.raises(ShortFile, match="file ended at offset") as caught:
        read(core, [fd, fd], [(small.ctypes.data, 0, 10), (target.ctypes.data, offset, count)], threads=1)
    assert caught.value.item == 1


def test_short_file_after_a_good_neighbour(core: Core, fd: int) -> None:
    target = np.zeros(200, dtype=np.uint8)
    places = [(target.ctypes.data, FILE_BYTES - 50, 100), (target.ctypes.data + 100, FILE_BYTES - 90, 40)]
    with pytest.raises(ShortFile) as caught:
        read(core, [fd, fd], places)
    assert caught.value.item == 0


def test_cancelled(core: Core, fd: int) -> None:
    target = np.zeros(100, dtype=np.uint8)
    progress = Progress()
    progress.cancel()
    place = np.array([[target.ctypes.data, 0, 100]], dtype=np.uint64)
    reads = Reads(place, np.array([fd], dtype=np.int32), direct=np.zeros(1, dtype=np.int32))
    with pytest.raises(CancelledDrain):
        core.read(reads, digests=False, threads=1, progress=progress)
    assert progress.bytes_done == 0


def test_refusal_names_the_item(core: Core, fd: int, tmp_path: Path) -> None:
    target = np.zeros(100, dtype=np.uint8)
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(CoreIOError) as caught:
        read(core, [fd, folder], [(target.ctypes.data, 0, 50), (target.ctypes.data + 50, 0, 50)])
    os.close(folder)
    assert caught.value.errno == errno.EISDIR
    assert caught.value.item == 1


@pytest.mark.parametrize("wrong", ["fds", "direct"])
def test_wrong_arrays_are_refused(core: Core, wrong: str) -> None:
    arrays = {"fds": np.zeros(1, dtype=np.int32), "direct": np.zeros(1, dtype=np.int32)}
    arrays[wrong] = np.zeros(2, dtype=np.int32)
    reads = Reads(np.zeros((1, 3), dtype=np.uint64), **arrays)
    with pytest.raises(ValueError, match=f"{wrong} must be"):
        core.read(reads, digests=False, threads=1, progress=Progress())
