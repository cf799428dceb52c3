"""What differs between systems, run inside of a simulated one (test_systems.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt import system
from asyncckpt.native import implementation
from asyncckpt.storage.directory import Directory
from tests.experimental import simulated

every_module = [
    ".".join(path.relative_to(simulated.PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(Path(simulated.PACKAGE).rglob("*.py"))
    if path.name != "__main__.py" and "testing" not in path.parts
]


@pytest.mark.parametrize("name", every_module)
def test_every_module_is_imported(name: str) -> None:
    try:
        __import__("asyncckpt" if name == "__init__" else f"asyncckpt.{name}")
    except asyncckpt.UnsupportedError as error:  # Of the library that an integration is for.
        if not name.startswith("integrations.") or "which is not installed" not in str(error):
            raise


def test_the_twin_runs() -> None:
    assert implementation == "twin"


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open("r+b") as first, path.open("r+b") as second:
        system.lock(first.fileno())
        with pytest.raises(OSError) as refused:  # noqa: PT011
            system.lock(second.fileno())
        assert system.is_locked_elsewhere(refused.value)
        first.close()
        system.lock(second.fileno())


def test_reads_and_writes_at_an_offset(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0))
    try:
        assert system.pwrite(fd, b"0123456789", 0) == 10
        assert system.pwrite(fd, b"ab", 3) == 2
        assert system.pread(fd, 4, 2) == b"2ab5"
        target = bytearray(20)
        assert system.read_into(fd, memoryview(target), 8) == 2
        assert target[:2] == b"89"
        system.fsync(fd)
        assert bool(simulated.full_syncs) == (sys.platform == "darwin")
    finally:
        os.close(fd)


def test_a_folder_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with Directory.open(tmp_path / "here") as folder:
        assert folder.is_still(tmp_path / "here")
        folder.make_folder("below").close()
        assert folder.names() == ["below"]
        folder.check_writable()
        folder.remove_folder("below")
        (tmp_path / "here").rename(tmp_path / "there")
        (tmp_path / "here").mkdir()
        assert not folder.is_still(tmp_path / "here")


def test_nothing_is_published_over_another_file(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"new")
    (tmp_path / "target").write_bytes(b"old")
    with Directory.open(tmp_path) as folder:
        with pytest.raises(asyncckpt.ConflictError, match="already exists"):
            folder.publish("source", "target")
        folder.publish("source", "other")
    assert (tmp_path / "target").read_bytes() == b"old"
    assert (tmp_path / "other").read_bytes() == b"new"


def test_a_checkpoint_that_somebody_reads_stays_until_it_can_be_removed(tmp_path: Path) -> None:
    """Windows removes no open file: retention leaves it, the save succeeds, and a later one removes it."""
    weights = torch.zeros(1000)
    with asyncckpt.Saver(path=tmp_path, tensors={"weights": weights}, keep=1) as saver:
        saver.save(1)
        [shard] = (tmp_path / "data").glob("*1-*/*.safetensors")
        with shard.open("rb"):
            saver.save(2)
            saver.wait_idle()
        saver.save(3)
        saver.wait_idle()
        assert asyncckpt.list_steps(tmp_path) == [3]
    assert [path.name.split("-")[0].lstrip("0") for path in (tmp_path / "data").iterdir()] == ["3"]
