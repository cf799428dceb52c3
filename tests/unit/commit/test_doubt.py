"""A commit in doubt: who looks again believes no sync that was repeated, in this process or another."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.commit import doubt as doubt_room
from asyncckpt.commit.doubt import InDoubt, settle
from asyncckpt.storage.directory import Directory


@pytest.fixture
def doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InDoubt:
    """Of step 1, whose manifest has its name; the sync of manifests/ has failed."""
    sync = Directory.sync

    def fail(self: Directory) -> None:
        if self.path.name == "manifests" and (self.path / f"{1:012d}.json").exists():
            raise asyncckpt.IOFailedError("folder cannot be synced", errno=errno.EIO)
        sync(self)

    with monkeypatch.context() as patched:
        patched.setattr(Directory, "sync", fail)
        with asyncckpt.Saver(path=tmp_path / "root", tensors={"x": torch.ones(3)}) as saver:
            error = saver.save_async(1).exception(60)
    assert isinstance(error, InDoubt)
    return error


def test_it_is_resolved_in_other_processes_too(doubt: InDoubt) -> None:
    assert doubt.resolve()
    assert pickle.loads(pickle.dumps(doubt)).resolve()


def test_the_directory_is_changed_anew_before_its_sync_is_believed(
    doubt: InDoubt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    create, sync = Directory.create_file, Directory.sync

    def note_file(self: Directory, name: str, **options: bool) -> tuple[int, bool]:
        made.append(name)
        return create(self, name, **options)

    def note_sync(self: Directory) -> None:
        made.append("sync")
        sync(self)

    monkeypatch.setattr(Directory, "create_file", note_file)
    monkeypatch.setattr(Directory, "sync", note_sync)
    assert doubt.resolve()
    assert [name[:3] for name in made] == [".m-", "syn"]
    assert os.listdir(tmp_path / "root" / "manifests") == [f"{1:012d}.json"]


def test_what_is_gone_or_not_whole_is_not_there(doubt: InDoubt, tmp_path: Path) -> None:
    (file,) = (tmp_path / "root" / "data").glob("*/*")
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    assert not doubt.resolve()
    file.write_bytes(raw)
    assert doubt.resolve()
    file.unlink()
    assert not doubt.resolve()
    shutil.rmtree(file.parent)
    assert not doubt.resolve()
    shutil.rmtree(tmp_path / "root")
    assert not doubt.resolve()


def test_what_cannot_be_found_out_is_an_error(doubt: InDoubt, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Directory, *_: object, **__: object) -> None:
        raise asyncckpt.IOFailedError("file cannot be created", errno=errno.EROFS)

    monkeypatch.setattr(Directory, "create_file", fail)
    with pytest.raises(asyncckpt.IOFailedError, match="cannot be created"):
        doubt.resolve()


def test_a_delta_is_there_only_with_what_it_builds_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent was removed when it got its name."""
    table = asyncckpt.HashTable("t", 2)
    publish, parent = Directory.publish, tmp_path / "manifests" / f"{1:012d}.json"

    def publish_and_remove(self: Directory, *names: str) -> None:
        publish(self, *names)
        parent.rename(tmp_path / "kept")

    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        saver.save(1)
        with monkeypatch.context() as patched:
            patched.setattr(Directory, "publish", publish_and_remove)
            error = saver.save_async(2, kind="delta").exception(60)
    assert isinstance(error, InDoubt)
    assert not error.resolve()
    (tmp_path / "kept").rename(parent)
    assert error.resolve()
    (file,) = (tmp_path / "data").glob(f"{1:012d}-*/*")
    file.unlink()
    assert not error.resolve()


def test_a_save_and_a_compaction_may_settle_the_same(doubt: InDoubt) -> None:
    meeting = threading.Barrier(2, timeout=60)
    doubt.settle = lambda: bool(meeting.wait()) and None
    in_doubt: list[asyncckpt.IndeterminateError] = [doubt]
    with ThreadPoolExecutor(2) as threads:
        for settling in [threads.submit(settle, in_doubt) for _ in range(2)]:
            settling.result(60)
    assert not in_doubt


@pytest.mark.parametrize("ends_first", [False, True])
def test_nobody_is_told_that_it_is_not_there_while_it_is_sent(
    doubt: InDoubt, monkeypatch: pytest.MonkeyPatch, ends_first: bool
) -> None:
    looks: list[Callable[[], None]] = [lambda: None]

    def look(*_: object) -> bool:
        looks.pop()()
        return False

    monkeypatch.setattr(doubt_room, "is_committed_whole", look)

    def send() -> None:
        if not ends_first:
            resolve_anew()

    def resolve_anew() -> None:
        with pytest.raises(asyncckpt.IOFailedError, match="step 1 is being sent once more"):
            doubt.resolve()

    if ends_first:
        looks[0] = lambda: bool(doubt.send_anew(send)) and None
        resolve_anew()
    else:
        assert doubt.send_anew(send)
    looks.append(lambda: None)
    assert not doubt.resolve()
    assert not doubt.send_anew(lambda: pytest.fail("somebody was told that it is not there"))
