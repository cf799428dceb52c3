from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncckpt.errors import IOFailedError
from asyncckpt.storage.directory import Directory

THREADS_COUNT = 4
LISTINGS_COUNT = 300


def test_threads_that_list_at_once_see_all_names(tmp_path: Path) -> None:
    """A listing that misses a manifest lets a sweep take its data: they must not share a position in the folder."""
    names = {f"{number:03d}" for number in range(50)}
    for name in names:
        (tmp_path / name).touch()

    with Directory.open(tmp_path) as folder, ThreadPoolExecutor(THREADS_COUNT) as threads:
        listings = threads.map(lambda _: sorted(folder.names()), range(THREADS_COUNT * LISTINGS_COUNT))
        assert [listed for listed in listings if listed != sorted(names)] == []


def test_what_others_remove_meanwhile_does_not_keep_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "gone" / name).touch()
    listed = Directory.names

    def names(self: Directory) -> list[str]:
        found = sorted(listed(self))
        (self.path / "b").unlink()
        return found

    monkeypatch.setattr(Directory, "names", names)
    with Directory.open(tmp_path) as folder:
        folder.remove_folder("gone")
        folder.remove_folder("gone")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_close_is_no_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file has nothing to lose by it; beside another error it hid that one, as a bare OSError."""
    close = os.close

    def failing_close(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, "closing")

    def failing_fstat(_: int) -> os.stat_result:
        raise OSError(errno.EIO, "looking")

    with Directory.open(tmp_path) as folder, monkeypatch.context() as patched:
        patched.setattr(os, "close", failing_close)
        folder.make_empty("empty")
        patched.setattr(os, "fstat", failing_fstat)
        for act in (folder.open_file, folder.create_file):
            with pytest.raises(IOFailedError, match="cannot be"):
                act("empty" if act == folder.open_file else "new")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "new"]
