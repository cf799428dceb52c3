"""Retention goes on behind the future: it delays neither the save that it belongs to nor the next one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.storage.directory import Directory

WAIT_S_MAX = 60.0
STATE = {"x": torch.arange(3.0)}


@pytest.fixture
def may_remove(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Manifests of checkpoints are removed when it is set."""
    event, remove = threading.Event(), Directory.remove_file

    def held(self: Directory, name: str) -> None:
        if name.endswith(".json"):
            assert event.wait(WAIT_S_MAX)
        remove(self, name)

    monkeypatch.setattr(Directory, "remove_file", held)
    yield event
    event.set()


def test_saves_end_while_retention_stands_still(tmp_path: Path, may_remove: threading.Event) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, keep_latest=1) as saver:
        for step in range(3):
            assert saver.save_async(step).result(WAIT_S_MAX).step == step
        saver.save(3)
        assert asyncckpt.list_steps(tmp_path) == [0, 1, 2, 3]
        with pytest.raises(asyncckpt.DeadlineError, match=r"retention in .* did not end"):
            saver.wait_idle(0.01)
        may_remove.set()
        saver.wait_idle(WAIT_S_MAX)
        assert asyncckpt.list_steps(tmp_path) == [3]


def test_a_saver_that_is_dropped_lets_retention_end(tmp_path: Path, may_remove: threading.Event) -> None:
    saver: Any = asyncckpt.Saver(path=tmp_path, tensors=STATE, keep_latest=1)
    saver.save(0)
    saver.save(1)
    retaining = saver._target.memory.retention
    del saver
    may_remove.set()
    retaining.result(WAIT_S_MAX)
    assert asyncckpt.list_steps(tmp_path) == [1]
    with asyncckpt.Saver(path=tmp_path, tensors=STATE) as again:
        again.save(2)


def test_a_callback_may_close_the_saver(tmp_path: Path, may_remove: threading.Event) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors=STATE, keep_latest=1)
    saver.save(0)
    may_remove.set()
    closed = threading.Event()

    def close(_: object) -> None:
        saver.close()
        closed.set()

    saver.save_async(1).add_done_callback(close)
    assert closed.wait(WAIT_S_MAX)
    assert asyncckpt.list_steps(tmp_path) == [1]
