from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
