"""A compaction reads nothing while a save or load is in flight, but not for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.engine.compact import copy_blocks
from asyncckpt.engine.process.save_lock import Kind, SaveLock, save_lock
from asyncckpt.options import BusyPolicy
from asyncckpt.shard.reader import ChainReader

WAIT_S_MAX = 60
BUSY = BusyPolicy("raise", deadline=WAIT_S_MAX)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that have read blocks since."""
    run, found = ChainReader.run, []

    def noted(reader: ChainReader) -> None:
        found.append(threading.current_thread().name)
        run(reader)

    monkeypatch.setattr(ChainReader, "run", noted)
    return found


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when somebody waits until nothing is in flight."""
    wait, waits = SaveLock.wait_until_free, threading.Event()

    def noted(lock: SaveLock, seconds: float) -> bool:
        waits.set()
        return wait(lock, seconds)

    monkeypatch.setattr(SaveLock, "wait_until_free", noted)
    return waits


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[asyncckpt.Saver]:
    """Step 2 is a delta."""
    table = asyncckpt.HashTable("rows", 4)
    with asyncckpt.Saver(path=tmp_path, hashtables={"rows": table}) as saver:
        table.insert(torch.arange(100), torch.ones(100, 4))
        saver.save(1, kind="full")
        table.insert(torch.arange(10), torch.zeros(10, 4))
        saver.save(2, kind="delta")
        yield saver


@pytest.mark.parametrize("kind", ["save", "load"])
def test_saves_and_loads_go_first(
    chain: asyncckpt.Saver, kind: Kind, reads: list[str], waits: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_blocks, "WAIT_S", 10 * WAIT_S_MAX)
    with save_lock.held(kind, None, 3, busy=BUSY):
        compaction = chain.compact()
        assert waits.wait(WAIT_S_MAX)
        assert reads == []
    assert not compaction.result(WAIT_S_MAX).skipped
    assert reads


@pytest.mark.parametrize(("wait_s", "waits_per_work"), [(0.0, 0.0), (0.05, 1.0)])
def test_a_compaction_ends_beside_a_save_that_does_not(
    chain: asyncckpt.Saver, reads: list[str], monkeypatch: pytest.MonkeyPatch, wait_s: float, waits_per_work: float
) -> None:
    monkeypatch.setattr(copy_blocks, "WAIT_S", wait_s)
    monkeypatch.setattr(copy_blocks, "WAITS_PER_WORK", waits_per_work)
    with save_lock.held("save", None, 3, busy=BUSY):
        assert not chain.compact().result(WAIT_S_MAX).skipped
    assert reads


def test_a_compaction_that_waits_can_be_cancelled(
    chain: asyncckpt.Saver, waits: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_blocks, "WAIT_S", 10 * WAIT_S_MAX)
    with save_lock.held("save", None, 3, busy=BUSY):
        compaction: Any = chain.compact()
        assert waits.wait(WAIT_S_MAX)
        assert compaction.cancel()
        with pytest.raises(asyncckpt.SaveCancelledError):
            compaction.result(WAIT_S_MAX)
