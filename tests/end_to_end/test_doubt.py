"""A commit that may or may not be durable: told as such, resolvable, and nothing more is committed until reopened."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.storage.directory import Directory


@pytest.fixture
def broken_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync of manifests/ fails after a publication."""
    published: list[str] = []
    publish, sync = Directory.publish, Directory.sync

    def note(self: Directory, source: str, target: str) -> None:
        publish(self, source, target)
        published.append(target)

    def fail(self: Directory) -> None:
        if published and self.path.name == "manifests":
            raise asyncckpt.IOFailedError(f"folder cannot be synced: {os.strerror(errno.EIO)}", errno=errno.EIO)
        sync(self)

    monkeypatch.setattr(Directory, "publish", note)
    monkeypatch.setattr(Directory, "sync", fail)


def test_commit_in_doubt_stops_the_saver(tmp_path: Path, broken_sync: None, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.arange(4.0)}
    saver = asyncckpt.Saver(path=tmp_path, tensors=state, keep=1)
    with pytest.raises(asyncckpt.IndeterminateError, match="perhaps not durable") as caught:
        saver.save_async(1).result(60)
    for save in (saver.save_async, saver.save):
        with pytest.raises(asyncckpt.IndeterminateError, match="in doubt"):
            save(2)
    saver.close()
    monkeypatch.undo()
    assert caught.value.resolve()
    target = {"w": torch.zeros(4)}
    assert asyncckpt.Loader(tmp_path, tensors=target).load().step == 1
    assert target["w"].equal(state["w"])
    with asyncckpt.Saver(path=tmp_path, tensors=state) as again:
        again.save(2)


def test_a_save_queued_behind_the_doubtful_one_fails_too(tmp_path: Path, broken_sync: None) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.arange(4.0)}, on_busy="queue")
    futures = [saver.save_async(1), saver.save_async(2)]
    for future in futures:
        assert isinstance(future.exception(60), asyncckpt.IndeterminateError)
    saver.close()
    assert asyncckpt.list_steps(tmp_path) == [1]
