"""A constructor that fails, whatever argument or step of it does, leaves no LOCK, no descriptor and no thread."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.storage import owner_lock
from tests.interrupts.fails_at import FailsAt
from tests.ranks.channels import at_once

WRONG: dict[str, Any] = {
    "hashtables": {"t": 1}, "tensors": 1, "filter_func": 1, "on_busy": "later", "durability": "never",
    "host_memory_limit": -1, "keep": 0, "deltas": 1, "filters": [1], "device": 1, "ranks": 1, "debug": 1,
    "parallel": 0, "shard_index": 1,
}  # fmt: skip


def what_is_held() -> tuple[set[str], set[tuple[int, int]], int]:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("asyncckpt")]
    for thread in threads:
        thread.join(30)
    folder = "/proc/self/fd"
    opened = {os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if os.path.exists(f"{folder}/{name}")}
    return opened, set(owner_lock._registry.held), threading.active_count()


def construct(path: Path, **options: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    chosen: dict[str, Any] = {
        "tensors": {"x": torch.ones(3)},
        "hashtables": {"t": asyncckpt.HashTable("t", 2)},
        "device": asyncckpt.DeviceOptions(optimizers=[optimizer]),
        "durability": "none",
    }
    saver = asyncckpt.Saver(path=path, **{**chosen, **options})
    sys.setprofile(None)
    saver.close()


def fail_at_each(make: Callable[[FailsAt], None]) -> int:
    """Let each call fail in turn; return how many there are. Nothing stays held.

    No garbage is collected meanwhile: Python drops what is raised in a destructor.
    """
    gc.collect()
    gc.disable()
    try:
        return _fail_at_each(make)
    finally:
        gc.enable()


def _fail_at_each(make: Callable[[FailsAt], None]) -> int:
    before = what_is_held()
    number = 0
    while True:
        number += 1
        fails = FailsAt(number)
        try:
            make(fails)
        except (MemoryError, asyncckpt.CheckpointError):
            pass
        finally:
            sys.setprofile(None)
        assert what_is_held() == before, f"call {number}"
        if fails.count < number:
            return number


@pytest.mark.parametrize("is_new", [True, False])
def test_every_step_may_fail(tmp_path: Path, is_new: bool) -> None:
    """In a directory that is there, and in one that is not."""
    construct(tmp_path / "run")

    def make(fails: FailsAt) -> None:
        sys.setprofile(fails)
        construct(tmp_path / (f"run-{fails.number}" if is_new else "run"))

    assert fail_at_each(make) > 50
    construct(tmp_path / "run")


@pytest.mark.parametrize("argument", WRONG)
def test_every_argument_may_be_wrong(tmp_path: Path, argument: str) -> None:
    before = what_is_held()
    with pytest.raises(asyncckpt.CheckpointError):
        construct(tmp_path / "run", **{argument: WRONG[argument]})
    assert what_is_held() == before
    construct(tmp_path / "run")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_while_it_looks_for_the_others_leaves_nothing(tmp_path: Path, failing: int) -> None:
    """At every twentieth step; the other one finds nobody."""

    def make(fails: FailsAt) -> None:
        def rank(index: int) -> None:
            if index == failing:
                sys.setprofile(fails)
            try:
                ranks = asyncckpt.RankOptions(peer_deadline=0.3)
                tables = {"t": asyncckpt.HashTable("t", 2, shard=(index, 2))}
                place = {"shard_index": index, "shard_num": 2, "ranks": ranks}
                construct(tmp_path / f"run-{fails.number}", hashtables=tables, **place)
            except (MemoryError, asyncckpt.CheckpointError):
                pass
            finally:
                sys.setprofile(None)

        at_once(lambda index=index: rank(index) for index in range(2))  # type: ignore[misc]

    before = what_is_held()
    for number in range(10, 200, 40):
        fails = FailsAt(number)
        make(fails)
        assert what_is_held() == before, f"call {number}"
        assert list((tmp_path / f"run-{number}").glob("ranks/s-*")) == []
