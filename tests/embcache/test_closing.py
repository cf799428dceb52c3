"""The end of a Saver of several folders: all are let go, and no error is lost."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from asyncckpt.commit.transaction import Transaction
from asyncckpt.embcache import Saver
from asyncckpt.embcache.load_ranks import RanksLoad
from tests.embcache.models import CachedNet

DEADLINE_S = 60.0


def save_and_fail(saver: Saver, net: CachedNet, path: Path) -> BaseException:
    """Return the error of a save that nobody has asked for."""
    saver.save(net, path)
    shutil.rmtree(path / "data")
    future = saver.save_async(net, path)
    future._wait_done(DEADLINE_S)
    error = future._inner.exception(0)
    assert error is not None
    return error


def test_errors_of_several_folders_are_raised_together(tmp_path: Path) -> None:
    net = CachedNet().trained(range(2))
    saver = Saver(rank=0)
    first, second = (save_and_fail(saver, net, tmp_path / name) for name in ("one", "two"))
    with pytest.raises(asyncckpt.CheckpointError) as caught:
        saver.close()
    assert caught.value is first
    if hasattr(first, "add_note"):
        assert first.__notes__ == [f"and closing another folder raised: {second}"]
    saver.close()


async def test_async_with_lets_the_folders_go(tmp_path: Path) -> None:
    net = CachedNet().trained(range(2))
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


async def test_a_folder_that_would_have_to_be_waited_for_raises_on_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_publish = held_publishing(monkeypatch)
    async with Saver(rank=0, on_busy="queue") as saver:
        first = saver.save_async(CachedNet().trained(range(2)), tmp_path / "one")
        other = CachedNet().trained(range(3))
        with pytest.raises(asyncckpt.SaveInProgressError, match=r"folder '.*one' is not free.*stop its event loop"):
            saver.save_async(other, tmp_path / "one")
        may_publish.set()
        await first
        await asyncio.to_thread(saver.wait_idle)
        assert (await saver.save_async(other, tmp_path / "one")).step == 1


def test_waiting_goes_on_behind_a_folder_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = CachedNet().trained(range(2))
    with Saver(rank=0, on_busy="queue") as saver:
        error = save_and_fail(saver, net, tmp_path / "one")
        may_publish = held_publishing(monkeypatch)
        second = saver.save_async(net, tmp_path / "two")
        with pytest.raises(asyncckpt.DeadlineError):
            saver.wait_idle(0.01)
        threading.Timer(0.05, may_publish.set).start()
        with pytest.raises(asyncckpt.CheckpointError) as caught:
            saver.wait_idle()
        assert caught.value is error
        assert second.done()


async def test_closing_goes_on_behind_a_folder_that_cannot_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, saver = CachedNet().trained(range(2)), Saver(rank=0)
    for name in ("one", "two"):
        saver.save(net, tmp_path / name)
    first, second = (folder.saver for folder in saver._open.values())

    def fail() -> None:
        raise asyncckpt.DeadlineError("a save did not end")

    with monkeypatch.context() as patch:
        patch.setattr(first, "_end", fail)
        with pytest.raises(asyncckpt.DeadlineError, match="a save did not end"):
            await saver.aclose()
    assert not second._finalizer.alive
    first.close()


@pytest.mark.parametrize("where", ["_prepare", "run"])
def test_the_other_ranks_hear_of_an_interrupted_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    heard: list[BaseException | None] = []

    def agree(what: str, error: BaseException | None, *, result: str = "") -> None:
        heard.append(error)
        if error is not None:
            raise error

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    net = CachedNet().trained(range(2))
    with Saver(rank=0) as saver:
        saver.save(net, tmp_path)
        monkeypatch.setattr(saver._peers, "agree_on_load", agree)
        monkeypatch.setattr(*((saver, where) if where == "_prepare" else (RanksLoad, where)), interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.load(net, tmp_path)
    assert isinstance(heard[-1], KeyboardInterrupt)


def held_publishing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no save commit before the event is set."""
    may_publish, publish = threading.Event(), Transaction._publish

    def hold(transaction: Transaction, *arguments: Any) -> Any:
        assert may_publish.wait(DEADLINE_S)
        return publish(transaction, *arguments)

    monkeypatch.setattr(Transaction, "_publish", hold)
    return may_publish
