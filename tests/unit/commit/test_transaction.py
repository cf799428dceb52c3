"""The one transaction: nobody else publishes, and beside compacted checkpoints a step keeps one meaning."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.commit.attempt import Claim, Draft
from asyncckpt.commit.discover import is_committed, read_head
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.process.background import background
from asyncckpt.engine.process.held_directory import held_directory
from asyncckpt.format.names import Attempt
from asyncckpt.storage.directory import Directory
from tests.chains.model import layer_of
from tests.chains.written import Written, write
from tests.worlds.directories import manifest_path

PACKAGE = Path(asyncckpt.__file__).parent
# Which names may be called where, besides the file that defines them.
CALLERS = {
    "encode_manifest": {"commit/attempt.py"},
    # commit/store_root.py and cli/doctor.py also try whether the store refuses a second one; storage/store_folder.py
    # makes marks, commit/aside.py copies what is damaged.
    "put_new": {
        "commit/aside.py",
        "cli/doctor.py",
        "commit/store_root.py",
        "engine/upload/upload_attempt.py",
        "storage/store_folder.py",
    },
    # The files of coordination, of the trial of a disk, and what is exported are no manifests.
    "publish": {
        "commit/root.py",
        "commit/transaction.py",
        "coordination/session_files.py",
        "coordination/driver.py",
        "storage/disk_probe.py",
        "formats/recis/export_checkpoint.py",
        "formats/recis/save.py",
        "commit/new_entry.py",
    },
}


def callers_of(name: str) -> set[str]:
    """Files of the package that call something of this name."""
    call = re.compile(rf"(?<!def )\b{name}\(")
    return {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if call.search(path.read_text())}


@pytest.mark.parametrize("name", CALLERS)
def test_nobody_else_publishes_a_manifest(name: str) -> None:
    assert callers_of(name) == CALLERS[name]


@pytest.fixture
def saved(tmp_path: Path) -> Written:
    return write(tmp_path / "root", 5, {"user": layer_of({})})


def publish_again(saved: Written, made: Written, *, compacted: bool) -> None:
    """Commit what `made` is, which lies elsewhere, into the directory of `saved`."""
    with CheckpointRoot.for_writing(saved.root) as root, held_directory(root, "fsync") as commits:
        attempt = Attempt(step=made.head.step, id=made.head.attempt)
        claim = Claim(root.root.identity, "compaction" if compacted else "save", attempt)
        with Transaction.begin(commits, claim) as transaction:
            for path in made.folder.iterdir():
                assert isinstance(transaction.place, Directory)
                fd, _ = transaction.place.create_file(path.name)
                os.write(fd, path.read_bytes())
                os.close(fd)
            draft = Draft(made.head, made.body, made.digests)
            background.run(lambda: transaction.commit(draft), "a test")


def test_compacted_checkpoint_stands_for_its_step(saved: Written, tmp_path: Path) -> None:
    made = write(tmp_path / "elsewhere", 5, {"user": layer_of({})}, replaces=saved.digest)
    publish_again(saved, made, compacted=True)
    with CheckpointRoot.for_reading(saved.root) as root:
        assert read_head(root, 5).attempt == made.head.attempt
        assert asyncckpt.list_steps(saved.root) == [5]
        saved.manifest.unlink()
        assert is_committed(root, 5)
        assert not is_committed(root, 6)


def test_an_attempt_begins_in_no_folder_that_is_there(saved: Written, tmp_path: Path) -> None:
    """Of a compaction, which does not sweep before."""
    made = write(tmp_path / "elsewhere", 5, {"user": layer_of({})}, replaces=saved.digest)
    folder = saved.root / "data" / Attempt(step=5, id=made.head.attempt).directory
    folder.mkdir()
    (folder / "of somebody else").touch()
    with pytest.raises(asyncckpt.CheckpointError, match="cannot be made"):
        publish_again(saved, made, compacted=True)
    assert [path.name for path in folder.iterdir()] == ["of somebody else"]


def test_step_is_compacted_once(saved: Written, tmp_path: Path) -> None:
    for number in range(2):
        made = write(tmp_path / f"elsewhere{number}", 5, {"user": layer_of({})}, replaces=saved.digest)
        if number == 0:
            publish_again(saved, made, compacted=True)
        else:
            with pytest.raises(asyncckpt.ConflictError, match="step 5 already exists"):
                publish_again(saved, made, compacted=True)


def test_step_that_is_there_only_compacted_is_not_saved_again(saved: Written, tmp_path: Path) -> None:
    """Its own manifest is gone, so that nothing but the look for the compacted one stands in the way."""
    publish_again(saved, write(tmp_path / "a", 5, {"user": layer_of({})}, replaces=saved.digest), compacted=True)
    saved.manifest.unlink()
    with pytest.raises(asyncckpt.ConflictError, match="step 5 already exists"):
        publish_again(saved, write(tmp_path / "b", 5, {"user": layer_of({})}), compacted=False)
    assert not saved.manifest.exists()


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale"), MemoryError(), RuntimeError("a bug")])
@pytest.mark.parametrize("operation", ["publish", "sync", "check_file", "has"])
def test_an_error_of_any_kind_behind_the_rename_or_of_it_is_a_doubt_and_removes_nothing(
    operation: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = getattr(Directory, operation)

    def fail(self: Directory, *arguments: Any, **options: Any) -> Any:
        if operation == "publish":  # The rename itself: it is looked into.
            plain(self, *arguments)
            raise error
        if manifest_path(tmp_path, 1).exists():
            raise error
        return plain(self, *arguments, **options)

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(Directory, operation, fail)
            failed = saver.save_async(1).exception(60)
        assert isinstance(failed, asyncckpt.IndeterminateError)
        assert failed.resolve()
    asyncckpt.verify(tmp_path, 1)


def test_many_saves_leave_nothing_in_the_open_directory(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}) as saver:
        for step in range(3):
            saver.save(step)
        assert saver._target.root.manifests.made == {}
