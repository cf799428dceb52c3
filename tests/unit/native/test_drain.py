"""A drain leaves files of exactly the bytes and length asked for, and reports why when it cannot."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncckpt.native import (
    DIGEST_BYTES,
    U8,
    U64,
    CancelledDrain,
    Core,
    CoreIOError,
    DrainOptions,
    FileImage,
    Progress,
)

MIB = 1 << 20
LENGTHS = [0, 1, 4095, 4096, 4097, 3 * MIB + 5, 5 * MIB]
NO_SPANS = np.empty((0, 2), dtype=np.uint64)
O_DIRECT = getattr(os, "O_DIRECT", 0)


@contextlib.contextmanager
def opened(path: Path, *, direct: bool = False) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (O_DIRECT if direct else 0))
    try:
        yield fd
    finally:
        os.close(fd)


def image(fd: int, data: U8, *, direct: bool = False) -> FileImage:
    return FileImage(fd=fd, extents=((data.ctypes.data, data.nbytes),), direct=direct)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("block_bytes", [0, 4096, 12345, MIB])
@pytest.mark.parametrize("length", LENGTHS)
def test_one_file(
    core: Core, tmp_path: Path, page_aligned: Callable[[int], U8], length: int, block_bytes: int, direct: bool
) -> None:
    if block_bytes == 4096 and length > MIB:
        pytest.skip("a thousand small writes show nothing more")
    data = page_aligned(length)
    progress = Progress()
    with opened(tmp_path / "f", direct=direct) as fd:
        core.drain([image(fd, data, direct=direct)], NO_SPANS, DrainOptions(block_bytes=block_bytes), progress)
    assert (tmp_path / "f").read_bytes() == data.tobytes()
    assert progress.bytes_done == length


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("writers", "digest_threads", "background"), [(1, 1, 0), (3, 2, 1), (0, 0, 2)])
def test_many_files_and_digests(
    core: Core,
    tmp_path: Path,
    page_aligned: Callable[[int], U8],
    spans_of: Callable[[list[U8]], U64],
    rows_of: Callable[[bytes], list[bytes]],
    direct: bool,
    writers: int,
    digest_threads: int,
    background: int,
) -> None:
    datas = [page_aligned(length) for length in LENGTHS * 3]
    spans = [datas[5][7:], datas[6], datas[0], datas[12][: 2 * MIB], datas[1]]
    options = DrainOptions(
        block_bytes=MIB, writers=writers, digest_threads=digest_threads, background=background, sync=background == 0
    )
    with contextlib.ExitStack() as stack:
        files = [
            image(stack.enter_context(opened(tmp_path / str(index), direct=direct)), data, direct=direct)
            for index, data in enumerate(datas)
        ]
        progress = Progress()
        digests = core.drain(files, spans_of(spans), options, progress)
    for index, data in enumerate(datas):
        assert (tmp_path / str(index)).read_bytes() == data.tobytes()
    assert progress.bytes_done == sum(LENGTHS) * 3
    assert [row.tobytes() for row in digests] == [row for span in spans for row in rows_of(span.tobytes())]


def test_nothing_to_drain(core: Core) -> None:
    assert core.drain([], NO_SPANS, DrainOptions(), Progress()).shape == (0, DIGEST_BYTES)


def test_digests_without_files(
    core: Core,
    page_aligned: Callable[[int], U8],
    spans_of: Callable[[list[U8]], U64],
    digest_of: Callable[[bytes], bytes],
) -> None:
    data = page_aligned(9 * MIB)
    digests = core.drain([], spans_of([data]), DrainOptions(), Progress())
    assert digests[0].tobytes() == digest_of(data.tobytes())


def test_refusal_names_the_file_and_the_reason(core: Core, tmp_path: Path, page_aligned: Callable[[int], U8]) -> None:
    data = page_aligned(10_000)
    (tmp_path / "readonly").touch()
    readonly = os.open(tmp_path / "readonly", os.O_RDONLY)
    with opened(tmp_path / "f") as fd, pytest.raises(CoreIOError) as caught:
        core.drain([image(fd, data), image(readonly, data)], NO_SPANS, DrainOptions(), Progress())
    os.close(readonly)
    assert caught.value.errno == errno.EBADF
    assert caught.value.item == 1
    assert "file 1" in str(caught.value)


@pytest.mark.parametrize("direct", [False, True])
def test_no_room(core: Core, tmp_path: Path, page_aligned: Callable[[int], U8], direct: bool) -> None:
    """The limit for file sizes stands in for a full disk: both are met when the space is reserved."""
    data = page_aligned(4 * MIB)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path / "f", direct=direct) as fd:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        try:
            with pytest.raises(CoreIOError) as caught:
                core.drain([image(fd, data, direct=direct)], NO_SPANS, DrainOptions(), Progress())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.item == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_device(core: Core, page_aligned: Callable[[int], U8]) -> None:
    data = page_aligned(4096)
    with opened(Path("/dev/full")) as fd, pytest.raises(CoreIOError) as caught:
        core.drain([image(fd, data)], NO_SPANS, DrainOptions(), Progress())
    assert caught.value.errno == errno.ENOSPC


def test_cancelled_before_the_first_byte(core: Core, tmp_path: Path, page_aligned: Callable[[int], U8]) -> None:
    data = page_aligned(MIB)
    progress = Progress()
    progress.cancel()
    with opened(tmp_path / "f") as fd, pytest.raises(CancelledDrain):
        core.drain([image(fd, data)], NO_SPANS, DrainOptions(), progress)
    assert progress.bytes_done == 0


def test_cancelled_digests(core: Core, page_aligned: Callable[[int], U8], spans_of: Callable[[list[U8]], U64]) -> None:
    progress = Progress()
    progress.cancel()
    with pytest.raises(CancelledDrain):
        core.drain([], spans_of([page_aligned(MIB)]), DrainOptions(), progress)


def test_misaligned_direct_file_is_refused(core: Core, tmp_path: Path, page_aligned: Callable[[int], U8]) -> None:
    data = page_aligned(8192)[1:]
    with opened(tmp_path / "f", direct=True) as fd, pytest.raises(ValueError, match="direct"):
        core.drain([image(fd, data, direct=True)], NO_SPANS, DrainOptions(), Progress())


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("block_bytes", [0, 4096, 12345])
def test_extents_follow_each_other(
    core: Core, tmp_path: Path, page_aligned: Callable[[int], U8], block_bytes: int, direct: bool
) -> None:
    lengths = [8192, 0, 4096, 3 * 4096, 0, 5001] if direct else [8192, 0, 1, 4095, 70_001, 5, 0]
    datas = [page_aligned(length) for length in lengths]
    file_bytes = b"".join(data.tobytes() for data in datas)
    progress = Progress()
    with opened(tmp_path / "f", direct=direct) as fd:
        file = FileImage(fd, tuple((data.ctypes.data, data.nbytes) for data in datas), direct)
        assert file.bytes == len(file_bytes)
        core.drain([file], NO_SPANS, DrainOptions(block_bytes=block_bytes), progress)
    assert (tmp_path / "f").read_bytes() == file_bytes
    assert progress.bytes_done == len(file_bytes)


@pytest.mark.parametrize("extents", [(), ((0, 0),), ((0, 0), (0, 0))])
def test_files_without_bytes(core: Core, tmp_path: Path, extents: tuple[tuple[int, int], ...]) -> None:
    for direct in (False, True):
        with opened(tmp_path / str(direct), direct=direct) as fd:
            core.drain([FileImage(fd, extents, direct)], NO_SPANS, DrainOptions(), Progress())
        assert (tmp_path / str(direct)).read_bytes() == b""


def test_extents_that_break_the_contract_are_refused(
    core: Core, tmp_path: Path, page_aligned: Callable[[int], U8]
) -> None:
    data = page_aligned(8192)
    address = data.ctypes.data
    cases = [
        (((address, 8192), (address + 8, 100)), True, "extent 1 of file 1 is direct but its address"),
        (((address, 100), (address + 4096, 100)), True, "extent 0 of file 1 is direct and not the last"),
        (((address, -1),), False, "extent 0 of file 1 has address"),
        (((0, 1),), False, "extent 0 of file 1 has address"),
    ]
    for extents, direct, message in cases:
        with opened(tmp_path / "f") as good, opened(tmp_path / "g", direct=direct) as fd:
            files = [image(good, data), FileImage(fd, extents, direct)]
            with pytest.raises(ValueError, match=message):
                core.drain(files, NO_SPANS, DrainOptions(), Progress())
        assert (tmp_path / "f").read_bytes() == b""


def test_write_at_offsets(core: Core, tmp_path: Path, page_aligned: Callable[[int], U8]) -> None:
    data = page_aligned(20_000)
    with opened(tmp_path / "f") as fd:
        core.write(fd, data.ctypes.data + 7, 11_111, offset=7, direct=False)
        core.write(fd, data.ctypes.data, 7, offset=0, direct=False)
        core.write(fd, data.ctypes.data, 0, offset=50_000, direct=False)
    assert (tmp_path / "f").read_bytes() == data[: 7 + 11_111].tobytes()


def test_direct_write(core: Core, tmp_path: Path, page_aligned: Callable[[int], U8]) -> None:
    data = page_aligned(4 * 4096)
    with opened(tmp_path / "f", direct=True) as fd:
        core.write(fd, data.ctypes.data + 4096, 3 * 4096, offset=4096, direct=True)
        core.write(fd, data.ctypes.data, 4096, offset=0, direct=True)
        with pytest.raises(ValueError, match="direct"):
            core.write(fd, data.ctypes.data, 100, offset=0, direct=True)
    assert (tmp_path / "f").read_bytes() == data.tobytes()


def test_write_to_a_closed_descriptor(core: Core, tmp_path: Path, page_aligned: Callable[[int], U8]) -> None:
    data = page_aligned(100)
    with opened(tmp_path / "f") as fd:
        pass
    with pytest.raises(CoreIOError) as caught:
        core.write(fd, data.ctypes.data, 100, offset=0, direct=False)
    assert caught.value.errno == errno.EBADF
