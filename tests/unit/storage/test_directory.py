from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

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
