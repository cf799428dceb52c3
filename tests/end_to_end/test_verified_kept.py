"""Retention keeps the newest checkpoint that this process has verified: that one, and not whatever has its step."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.commit import chain
from asyncckpt.commit.discover import KnownHeads
from asyncckpt.format.head import SealedHead

STATE = {"x": torch.arange(3.0)}


def save(root: Path, *steps: int, keep: int | None = None) -> None:
    with asyncckpt.Saver(path=root, tensors=STATE, keep=keep) as saver:
        for step in steps:
            saver.save(step)
            saver.wait_idle(60)  # Also for retention.


def empty(root: Path) -> None:
    """As `rm -rf root/*`: what this process remembers of the directory is of no use then."""
    for folder in list(root.iterdir()):
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()


def test_it_stays_until_a_newer_one_is_verified(tmp_path: Path) -> None:
    save(tmp_path, 1)
    asyncckpt.verify(tmp_path, 1)
    save(tmp_path, 2, 3, keep=1)
    assert asyncckpt.list_steps(tmp_path) == [1, 3]
    asyncckpt.Loader(tmp_path, tensors={"x": torch.zeros(3)}).load()
    save(tmp_path, 4, keep=1)
    assert asyncckpt.list_steps(tmp_path) == [3, 4]


def test_a_directory_that_was_emptied_is_a_new_one(tmp_path: Path) -> None:
    save(tmp_path, 0)
    asyncckpt.verify(tmp_path, 0)
    empty(tmp_path)
    save(tmp_path, 0, 1, keep=1)
    assert asyncckpt.list_steps(tmp_path) == [1]


def test_what_was_verified_in_an_emptied_directory_hides_nothing(tmp_path: Path) -> None:
    save(tmp_path, 100)
    asyncckpt.verify(tmp_path, 100)
    empty(tmp_path)
    save(tmp_path, 5)
    asyncckpt.verify(tmp_path, 5)
    save(tmp_path, 6, 7, keep=1)
    assert asyncckpt.list_steps(tmp_path) == [5, 7]


def test_a_step_that_was_removed_does_not_hide_an_older_one(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 60)
    asyncckpt.verify(tmp_path, 20)
    asyncckpt.verify(tmp_path, 60)
    asyncckpt.checkpoints.remove_after(tmp_path, 20)
    save(tmp_path, 21, 22, 23, keep=1)
    assert asyncckpt.list_steps(tmp_path) == [20, 23]


def test_a_step_that_was_removed_and_saved_anew_is_not_verified(tmp_path: Path) -> None:
    save(tmp_path, 1)
    asyncckpt.verify(tmp_path, 1)
    asyncckpt.checkpoints.remove(tmp_path, [1])
    save(tmp_path, 1, 2, keep=1)
    assert asyncckpt.list_steps(tmp_path) == [2]


def test_a_compacted_one_stands_for_it(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("t", 2)
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        for step in (1, 2):
            table.insert(torch.tensor([step]), torch.ones(1, 2))
            saver.save(step, kind="delta" if step > 1 else "full")
    asyncckpt.verify(tmp_path, 2)
    asyncckpt.compact(tmp_path, 2)
    save(tmp_path, 3, 4, keep=1)
    assert asyncckpt.list_steps(tmp_path) == [2, 4]


def test_the_newest_is_remembered_whenever_it_was_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "VERIFIED_MAX", 2)
    save(tmp_path, *range(6))
    for step in (5, 3, 2, 1, 0):
        asyncckpt.verify(tmp_path, step)
    asyncckpt.checkpoints.remove_after(tmp_path, 4)
    asyncckpt.verify(tmp_path, 4)
    asyncckpt.verify(tmp_path, 3)
    save(tmp_path, 6, 7, keep=1)
    assert asyncckpt.list_steps(tmp_path) == [4, 7]


def test_it_stays_where_nobody_can_look_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk or a store that fails for a moment does not say that it is gone."""
    save(tmp_path, 1)
    asyncckpt.verify(tmp_path, 1)
    looks, of_step = [errno.EMFILE], KnownHeads.of_step

    def fails_once(heads: KnownHeads, step: int) -> SealedHead:
        if step == 1 and looks:
            raise asyncckpt.IOFailedError("file cannot be opened", errno=looks.pop())
        return of_step(heads, step)

    monkeypatch.setattr(KnownHeads, "of_step", fails_once)
    save(tmp_path, 2, 3, keep=1)
    assert asyncckpt.list_steps(tmp_path) == [1, 3]
