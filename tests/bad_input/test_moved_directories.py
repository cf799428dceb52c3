"""Case 54: a checkpoint directory, or what is in it, is moved, replaced or removed beside an open Saver."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sentinels import save_one

import asyncckpt
from asyncckpt.engine.features.go_back import go_back


def test_case_054_root_replaced_during_a_save(tmp_path: Path) -> None:
    """Bytes go on into the folder that was opened; the commit sees that it is not the one of that name any more."""
    root, moved = tmp_path / "root", tmp_path / "moved"

    other = tmp_path / "other"
    save_one(other, 5)

    def replace(blocks: Any) -> Any:
        root.rename(moved)
        other.rename(root)
        return blocks

    with asyncckpt.Saver(path=root, tensors={"w": torch.ones(3)}, filter_func=replace) as saver:
        future = saver.save_async(0)
        with pytest.raises(asyncckpt.ConflictError, match="was moved or replaced while"):
            future.result()
    assert asyncckpt.list_steps(root) == [5]
    assert asyncckpt.list_steps(moved) == []
    assert list((moved / "data").iterdir()) == []


@pytest.mark.parametrize("is_anew", [False, True])
@pytest.mark.parametrize("names", [["manifests"], ["data"], ["manifests", "data"]], ids=str)
def test_case_054_folders_of_a_root_moved_between_saves(tmp_path: Path, names: list[str], is_anew: bool) -> None:
    """`mv run/* elsewhere` beside an open Saver: what it saves then would be elsewhere, and what it removes."""
    root, moved = tmp_path / "root", tmp_path / "moved"
    moved.mkdir()
    with asyncckpt.Checkpointer(root, every=1, x=torch.ones(3)) as checkpointer:
        checkpointer.save_now(0)
        checkpointer.save_now(1)
        for name in names:
            (root / name).rename(moved / name)
            if is_anew:
                (root / name).mkdir()
        future = checkpointer._saver.save_async(2)
        with pytest.raises(asyncckpt.ConflictError, match="was moved or replaced while step 2 was saved"):
            future.result()
        with pytest.raises(asyncckpt.ConflictError, match="was moved or replaced while checkpoints were to be removed"):
            go_back(checkpointer._saver._target, None, 0)
        for name in names:
            if is_anew:
                (root / name).rmdir()
            (moved / name).rename(root / name)
        checkpointer.save_now(2)
    assert asyncckpt.list_steps(root) == [0, 1, 2]
    assert float(asyncckpt.load(root, step=2)["x"][0]) == 1


@pytest.mark.parametrize("is_moved", [False, True])
def test_case_054_root_that_is_gone_is_named_before_anything_is_written(tmp_path: Path, is_moved: bool) -> None:
    """`rm -r run`, or `mv run elsewhere`, beside an open Saver. What was put aside is not swept."""
    root, moved = tmp_path / "root", tmp_path / "moved"
    with asyncckpt.Saver(path=root, tensors={"w": torch.ones(3)}) as saver:
        saver.save(0)
        stray = f"{1:012d}-{'0' * 32}"
        (root / "data" / stray).mkdir()
        if is_moved:
            root.rename(moved)
        else:
            shutil.rmtree(root)
        future = saver.save_async(1)
        with pytest.raises(asyncckpt.ConflictError, match="was moved or replaced while step 1 was saved"):
            future.result()
    assert not root.exists()
    assert not is_moved or (moved / "data" / stray).exists()
