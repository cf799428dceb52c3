"""What the cgroups of a process still allow, in both versions, and beside a page cache that fills them."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt.staging import limits
from asyncckpt.staging.chunks import ChunkBuffers, chunk_bytes
from asyncckpt.staging.limits import cgroup_free_bytes

pytestmark = pytest.mark.any_core

GIB = 1 << 30


def cgroup(folder: Path, **files: object) -> None:
    """Make a cgroup of these files; a dot stands for a double underscore."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def free(root: Path, membership: str) -> int | None:
    (root / "membership").write_text(membership)
    return cgroup_free_bytes(root, root / "membership")


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    cgroup(tmp_path / "a", memory__max=1000, memory__current=400)
    cgroup(tmp_path / "a" / "b", memory__max="max", memory__current=400)
    assert free(tmp_path, "0::/a/b\n") == 600
    cgroup(tmp_path / "memory" / "c", memory__limit_in_bytes=500, memory__usage_in_bytes=450)
    assert free(tmp_path, "5:cpu,memory:/c\n0::/a/b\n") == 50


@pytest.mark.parametrize("membership", ["0::/nowhere\n", "", "7:cpu:/c\n"])
def test_without_a_limit_there_is_none(tmp_path: Path, membership: str) -> None:
    assert free(tmp_path, membership) is None


def test_page_cache_that_can_be_reclaimed_is_free(tmp_path: Path) -> None:
    """A pod that has read its data: it uses all but a MiB of 64 GiB, and 55 of these are files read long ago."""
    stat = f"anon {4 * GIB}\nfile {59 * GIB}\ninactive_anon 1\ninactive_file {55 * GIB}\nactive_file {4 * GIB}"
    cgroup(tmp_path / "pod", memory__max=64 * GIB, memory__current=64 * GIB - 1, memory__stat=stat)
    assert free(tmp_path, "0::/pod\n") == 55 * GIB + 1
    stat = f"cache {59 * GIB}\ninactive_file 7\ntotal_inactive_file {55 * GIB}"
    files = {"memory__limit_in_bytes": 64 * GIB, "memory__usage_in_bytes": 64 * GIB - 1, "memory__stat": stat}
    cgroup(tmp_path / "memory" / "pod", **files)
    assert free(tmp_path, "9:memory:/pod\n") == 55 * GIB + 1


@pytest.mark.parametrize(
    ("stat", "expected"),
    [
        ("inactive_file 900", 1000),  # More than is used: the two files are not read at one moment.
        ("inactive_file many", 200),
        ("inactive_file", 200),
        ("", 200),
    ],
)
def test_numbers_that_do_not_fit(tmp_path: Path, stat: str, expected: int) -> None:
    cgroup(tmp_path / "pod", memory__max=1000, memory__current=800, memory__stat=stat)
    assert free(tmp_path, "0::/pod\n") == expected


def test_more_than_the_limit_is_used(tmp_path: Path) -> None:
    """A limit that was lowered: what is reclaimed first makes up for what is too much."""
    cgroup(tmp_path / "pod", memory__max=500, memory__current=800, memory__stat="inactive_file 400")
    assert free(tmp_path, "0::/pod\n") == 100
    cgroup(tmp_path / "pod", memory__max=500, memory__current=800, memory__stat="inactive_file 100")
    assert free(tmp_path, "0::/pod\n") == 0


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("Name:\tpython\nVmHWM:\t  900 kB\nVmRSS:\t  600 kB\nRssAnon:\t  500 kB\n", 300 << 10),
        ("VmHWM:\t  900 kB\nVmRSS:\t  600 kB\nRssAnon:\t  100 kB\n", 100 << 10),
        ("VmHWM:\t  900 kB\n", 0),
        ("VmHWM:\tmuch\nVmRSS:\t  600 kB\n", 0),
    ],
)
def test_what_the_process_has_given_back_is_not_to_spare(tmp_path: Path, status: str, expected: int) -> None:
    (tmp_path / "status").write_text(status)
    assert limits._given_back_bytes(tmp_path / "status") == expected
    assert limits._given_back_bytes(tmp_path / "nothing") == 0


@pytest.mark.parametrize(
    ("spare", "files", "expected"),
    [(1 << 40, 1 << 40, 64), (100 << 20, 1 << 40, 12), (0, 1 << 40, 1), (1 << 40, 5 << 20, 5), (1 << 40, 0, 1)],
)
def test_chunk_buffers_follow_what_is_to_spare(spare: int, files: int, expected: int) -> None:
    assert chunk_bytes(files, spare=spare) == expected << 20


def test_chunk_buffers_are_given_back_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = ChunkBuffers()
    monkeypatch.setattr("asyncckpt.staging.chunks.spare_bytes", lambda held: 40 << 20)
    with buffers.borrow(1 << 30) as chunks:
        assert chunks.bytes == 5 << 20
        assert chunks.addresses[1] - chunks.addresses[0] == chunks.bytes
    assert buffers._memory is None
    monkeypatch.setattr("asyncckpt.staging.chunks.spare_bytes", lambda held: 1 << 40)
    for _ in range(2):
        with buffers.borrow(1 << 30) as chunks:
            assert chunks.bytes == 64 << 20
        assert buffers._memory is not None
