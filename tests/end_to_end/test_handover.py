"""The interpreter's switch interval is short during a save, and the user's own afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.engine.process.background import HANDOVER_S_MAX
from asyncckpt.model.write_block import WriteBlock

USUAL_S = 0.005


@pytest.fixture(autouse=True)
def usual_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before)


def intervals_during_a_save(path: Path, *, set_to: float | None = None) -> list[float]:
    seen: list[float] = []

    def look(blocks: list[WriteBlock]) -> list[WriteBlock]:
        seen.append(sys.getswitchinterval())
        if set_to is not None:
            sys.setswitchinterval(set_to)
        return blocks

    with asyncckpt.Saver(path=path, tensors={"x": torch.zeros(3)}, filter_func=look) as saver:
        saver.save_async(1).result(60)
        seen.append(sys.getswitchinterval())
    return seen


def test_it_is_short_during_a_save(tmp_path: Path) -> None:
    assert intervals_during_a_save(tmp_path) == pytest.approx([HANDOVER_S_MAX, USUAL_S])


def test_what_the_user_sets_meanwhile_stays(tmp_path: Path) -> None:
    assert intervals_during_a_save(tmp_path, set_to=0.02) == pytest.approx([HANDOVER_S_MAX, 0.02])


def test_a_shorter_one_stays(tmp_path: Path) -> None:
    sys.setswitchinterval(0.0001)
    assert intervals_during_a_save(tmp_path) == pytest.approx([0.0001, 0.0001])


def test_a_forked_child_has_the_usual_one(tmp_path: Path) -> None:
    codes: list[int] = []

    def fork(blocks: list[WriteBlock]) -> list[WriteBlock]:
        child = os.fork()
        if child == 0:
            os._exit(0 if abs(sys.getswitchinterval() - USUAL_S) < 1e-6 else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return blocks

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.zeros(3)}, filter_func=fork) as saver:
        saver.save_async(1).result(60)
    assert codes == [0]


def test_a_failed_save_gives_it_back(tmp_path: Path) -> None:
    def fail(blocks: list[WriteBlock]) -> list[WriteBlock]:
        raise ValueError("no")

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.zeros(3)}, filter_func=fail) as saver:
        with pytest.raises(asyncckpt.errors.FilterError):
            saver.save_async(1).result(60)
        assert sys.getswitchinterval() == pytest.approx(USUAL_S)
