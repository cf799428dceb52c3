"""Upload marks: they come with the commit, keep the step, and go with the attempt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.checkpoints import collect_garbage, prune, remove
from asyncckpt.commit import transaction
from asyncckpt.commit.attempt import claims
from asyncckpt.commit.discover import KnownHeads, Listing
from asyncckpt.commit.removal import sweep
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.format.names import Attempt, upload_mark_name
from tests.unit.commit.test_retention import two_chains


def mark_upload(root: CheckpointRoot, attempt: Attempt) -> None:
    root.manifests.make_empty(upload_mark_name(attempt))


def mark_step(path: Path, step: int) -> Attempt:
    """Mark a step that is committed."""
    [folder] = (path / "data").glob(f"{step:012d}-*")
    attempt = Attempt(step, folder.name.partition("-")[2])
    with CheckpointRoot.for_reading(path) as root:
        mark_upload(root, attempt)
    return attempt


def marks(path: Path) -> list[int]:
    with CheckpointRoot.for_reading(path) as root:
        return [attempt.step for attempt in Listing.of(root).uploads]


def test_marks_that_others_remove_are_not_remembered(tmp_path: Path) -> None:
    """Who uploads has opened the directory anew, and a Saver makes a mark for each of its commits."""
    two_chains(tmp_path)
    with CheckpointRoot.for_reading(tmp_path) as root:
        mark_upload(root, Attempt.new(1))
        assert root.manifests.made == {}


def test_a_marked_step_stays_with_what_it_builds_upon(tmp_path: Path) -> None:
    two_chains(tmp_path)
    attempt = mark_step(tmp_path, 2)
    report = prune(tmp_path, 1)
    assert (report.removed, report.kept[2], report.kept[1]) == ((3,), ("not uploaded",), ("base of 2",))
    with CheckpointRoot.for_reading(tmp_path) as root:
        root.manifests.remove_file(upload_mark_name(attempt))
    assert prune(tmp_path, 1).removed == (1, 2)


def test_the_mark_of_a_removed_step_goes(tmp_path: Path) -> None:
    two_chains(tmp_path)
    mark_step(tmp_path, 7)
    remove(tmp_path, [7])
    assert marks(tmp_path) == [7]
    collect_garbage(tmp_path)
    assert marks(tmp_path) == []


def test_a_sweep_leaves_the_marks_of_what_is_there_and_of_what_runs(tmp_path: Path) -> None:
    two_chains(tmp_path)
    mark_step(tmp_path, 7)
    running, failed = Attempt.new(8), Attempt.new(9)
    with CheckpointRoot.for_reading(tmp_path) as root:
        mark_upload(root, running)
        mark_upload(root, failed)
        assert sweep(root, KnownHeads(root), keep_attempts={running.id}) == [upload_mark_name(failed)]
        assert marks(tmp_path) == [7, 8]


class Noted:
    """An uploader that uploads nothing."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []

    def upload(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)


def saver_with(path: Path, uploader: Noted) -> asyncckpt.Saver:
    saver = asyncckpt.Saver(path=path, tensors={"w": torch.ones(3)})
    object.__setattr__(saver._target.commits, "uploader", uploader)
    return saver


def test_a_commit_makes_the_mark_and_tells_the_uploader(tmp_path: Path) -> None:
    noted = Noted()
    with saver_with(tmp_path / "ckpt", noted) as saver:
        saver.save(3)
        saver.save(4)
    assert marks(tmp_path / "ckpt") == [3, 4]
    assert [attempt.step for attempt in noted.attempts] == [3, 4]


def test_a_commit_that_fails_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    saver = saver_with(tmp_path / "ckpt", noted)

    def refuse(*_: object) -> None:
        assert marks(tmp_path / "ckpt") == [3]  # It is there before the rename.
        raise asyncckpt.ConflictError("planned")

    with monkeypatch.context() as failing, saver:
        failing.setattr(transaction.Transaction, "_give_name", refuse)
        with pytest.raises(asyncckpt.ConflictError, match="planned"):
            saver.save(3)
    assert (marks(tmp_path / "ckpt"), noted.attempts, [*claims.held]) == ([], [], [])


def test_one_sweep_removes_a_folder_that_a_crash_has_left_and_its_mark(tmp_path: Path) -> None:
    two_chains(tmp_path)
    failed = Attempt.new(9)
    with CheckpointRoot.for_reading(tmp_path) as root:
        root.data.make_folder(failed.directory).close()
        mark_upload(root, failed)
        assert sweep(root, KnownHeads(root)) == [failed.directory, upload_mark_name(failed)]
    assert marks(tmp_path) == []
