"""Uploads of what is not there: it never committed, or was discarded, or nobody can begin; who waits hears of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.upload import uploads
from asyncckpt.format.names import Attempt, upload_mark_name
from asyncckpt.storage.directory import Directory
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap, Request
from tests.cloud.test_uploads import marks, open_saver, options
from tests.worlds.gates import Gate


def refuse_data(request: Request) -> Mishap | None:
    return Mishap(answer=(403, "AccessDenied")) if "/data/" in request.path and request.method != "GET" else None


def test_what_a_kill_has_kept_from_its_commit_is_not_missed(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    """Right before the rename it has its mark, and all of its files."""
    open_saver(tmp_path, options(url))[0].close()
    with CheckpointRoot.for_reading(tmp_path) as root:
        killed = Attempt.new(0)
        root.data.make_folder(killed.directory).close()
        root.manifests.make_empty(upload_mark_name(killed))
    saver, _ = open_saver(tmp_path, options(url))
    saver.wait_idle()
    saver.save_async(1).wait_uploaded()
    saver.close()
    assert (asyncckpt.list_steps(url), marks(tmp_path)) == ([1], [])


def test_another_saver_leaves_the_mark_of_a_commit_under_way(
    proxy: FaultProxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, make_empty = Gate(), Directory.make_empty

    def wait_after_it(self: Directory, name: str) -> None:
        make_empty(self, name)
        gate()

    monkeypatch.setattr(Directory, "make_empty", wait_after_it)
    saver, _ = open_saver(tmp_path, options(url), keep=1)
    proxy.fault = refuse_data
    future = saver.save_async(0)
    assert gate.reached.wait(60)
    other, _ = open_saver(tmp_path, options(url))
    other.wait_idle()
    gate.open()
    with pytest.raises(asyncckpt.IOFailedError, match="AccessDenied"):
        future.wait_uploaded()
    assert marks(tmp_path) == [0]
    proxy.fault = lambda request: None
    saver.close()
    other.close()


@pytest.mark.parametrize("is_saved_anew", [False, True])
def test_what_a_loop_discards_it_does_not_miss_at_its_end(
    proxy: FaultProxy, url: str, tmp_path: Path, is_saved_anew: bool
) -> None:
    """One step has failed, one is being uploaded, and one waits."""
    x = torch.zeros(3)
    with asyncckpt.Checkpointer(tmp_path, every=1, options={"upload": options(url)}, x=x) as checkpointer:
        checkpointer.save_now(0)
        checkpointer._saver.wait_idle()
        proxy.fault = refuse_data
        checkpointer.save_now(1)
        checkpointer._saver._uploads.wait(60)
        proxy.fault = lambda request: Mishap(answer=(503, "SlowDown"))
        checkpointer.save_now(2)
        checkpointer.save_now(3)
        checkpointer.restore(0, discard_newer=True)
        proxy.fault = lambda request: None
        if is_saved_anew:
            checkpointer.save_now(1)
    assert asyncckpt.list_steps(tmp_path) == asyncckpt.list_steps(url) == [0, 1][: 1 + is_saved_anew]


def test_an_upload_that_no_thread_begins_has_failed(
    owner: seaweed.Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == uploads.uploaders._name:
            raise RuntimeError("can't start new thread")
        start(thread)

    saver, _ = open_saver(tmp_path, options(url))
    monkeypatch.setattr(threading.Thread, "start", refusing)
    future = saver.save_async(0)
    future.result()
    with pytest.raises(asyncckpt.IOFailedError, match="cannot be started"):
        future.wait_uploaded(5)
    monkeypatch.setattr(threading.Thread, "start", start)
    saver.save(1)
    saver.close()
    assert asyncckpt.list_steps(url) == [0, 1]
