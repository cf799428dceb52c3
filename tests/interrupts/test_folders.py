"""What opens something in a folder, and fails at any of its steps, leaves no descriptor."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncckpt.storage.directory import Directory
from asyncckpt.storage.written_chunks import WrittenChunks
from tests.interrupts.fails_at import FailsAt

USES: dict[str, Callable[[Directory], object]] = {
    "open": lambda folder: Directory.open(folder.path).close(),
    "child": lambda folder: folder.child("child", create=True).close(),
    "make_folder": lambda folder: folder.make_folder("new").close(),
    "create_file": lambda folder: os.close(folder.create_file("new", direct=True)[0]),
    "open_file": lambda folder: os.close(folder.open_file("file")),
    "read_file": lambda folder: folder.read_file("file", bytes_max=10),
    "names": lambda folder: folder.names(),
    "remove_folder": lambda folder: folder.remove_folder("full"),
    "written chunks": lambda folder: WrittenChunks.open(folder, "identity").close(),
}


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """What was there before is not looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
@pytest.mark.parametrize("name", USES)
def test_nothing_is_left_open(tmp_path: Path, name: str) -> None:
    for number in range(1, 100):
        path = tmp_path / str(number)
        (path / "full").mkdir(parents=True)
        (path / "file").write_text("text")
        (path / "full" / "file").touch()
        fails = FailsAt(number, spared={"close", "__enter__", "__exit__"})
        with Directory.open(path, exact_modes=True) as folder:
            gc.collect()
            before = sorted(os.listdir("/proc/self/fd"))
            sys.setprofile(fails)
            try:
                USES[name](folder)
            except MemoryError:
                pass
            finally:
                sys.setprofile(None)
            assert sorted(os.listdir("/proc/self/fd")) == before, f"call {number}"
        if fails.count < number:
            return
    pytest.fail("it has more calls than were tried")
