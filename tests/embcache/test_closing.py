"""The end of a Saver of several folders: all are let go, and no error is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import asyncckpt
from asyncckpt.embcache import Saver
from tests.embcache.models import Net

DEADLINE_S = 60.0


def save_and_fail(saver: Saver, net: Net, path: Path) -> BaseException:
    """Return the error of a save that nobody has asked for."""
    saver.save(net, path)
    shutil.rmtree(path / "data")
    future = saver.save_async(net, path)
    future._wait_done(DEADLINE_S)
    error = future._inner.exception(0)
    assert error is not None
    return error


def test_errors_of_several_folders_are_raised_together(tmp_path: Path) -> None:
    net = Net().trained(range(2))
    saver = Saver(rank=0)
    first, second = (save_and_fail(saver, net, tmp_path / name) for name in ("one", "two"))
    with pytest.raises(asyncckpt.CheckpointError) as caught:
        saver.close()
    assert caught.value is first
    if hasattr(first, "add_note"):
        assert first.__notes__ == [f"and closing another folder raised: {second}"]
    saver.close()


async def test_async_with_lets_the_folders_go(tmp_path: Path) -> None:
    net = Net().trained(range(2))
    async with Saver(rank=0) as saver:
        futures = []
        for name in ("one", "two"):
            await saver.when_free()
            futures.append(saver.save_async(net, tmp_path / name))
    assert [future.result(0).step for future in futures] == [0, 0]
    with Saver(rank=0) as saver:
        assert saver.save(net, tmp_path / "one").step == 1
    with pytest.raises(asyncckpt.CheckpointError):
        async with Saver(rank=0) as saver:
            save_and_fail(saver, net, tmp_path / "two")
    assert saver._open == {}
