"""Where checkpoint directories are opened, and where they are not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.commit.root import make_folder
from asyncckpt.errors import UnsupportedError
from tests.worlds.saves import save_one

pytestmark = pytest.mark.any_core

DOORS: list[Callable[[Path], Any]] = [
    lambda path: asyncckpt.Saver(path=path / "new", tensors={"w": torch.zeros(3)}),
    lambda path: asyncckpt.Loader(path, tensors={"w": torch.zeros(3)}).load(),
    lambda path: asyncckpt.verify(path),
]


@pytest.mark.parametrize("door", DOORS)
def test_a_host_of_the_other_byte_order_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Callable[[Path], Any]
) -> None:
    """It would write its own order, and say that it is the other one."""
    save_one(tmp_path, tensors={"w": torch.ones(3)})
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(UnsupportedError, match="little-endian hosts, found 'big'"):
        door(tmp_path)
    assert not (tmp_path / "new").exists()


def then_made(look: Callable[[Path], bool]) -> Callable[[Path], bool]:
    """A look at a folder, which another process makes behind it."""

    def looked(path: Path) -> bool:
        found = look(path)
        Path(path).mkdir(parents=True, exist_ok=True)
        return found

    return looked


def test_a_folder_that_another_rank_makes_between_two_looks_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank said that it is no folder, and the others waited for that rank."""
    with monkeypatch.context() as patched:
        for name in ("isdir", "lexists"):
            patched.setattr(os.path, name, then_made(getattr(os.path, name)))
        make_folder(tmp_path / "iteration" / "common")
    assert (tmp_path / "iteration" / "common").is_dir()


def test_a_directory_that_another_process_makes_meanwhile_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of them may write is decided by its lock."""
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "exists", then_made(os.path.exists))
        save_one(tmp_path / "ckpt", tensors={"w": torch.ones(3)})
    asyncckpt.verify(tmp_path / "ckpt")
