"""How the parts of a file are sent: straight from the arena, which is given back when nothing reads it."""

from __future__ import annotations

import errno
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
import asyncckpt.checkpoints
from asyncckpt.native import memory_at
from asyncckpt.shard import sent
from asyncckpt.staging.pool import pool
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap
from tests.cloud.small_parts import objects, small_parts, state

__all__ = ["small_parts"]  # Every test of this file has it.


def is_released(view: memoryview) -> bool:
    try:
        return view.nbytes < 0
    except ValueError:
        return True


@pytest.mark.parametrize("by_upload", [True, False])
def test_a_line_that_is_too_slow_for_many_parts_at_once_gets_fewer(
    owner: seaweed.Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_upload: bool
) -> None:
    put, asked = ObjectStore.put, []

    def slow(self: ObjectStore, key: str, parts: Any, *, part_bytes: int, parallel: int) -> None:
        asked.append(parallel)
        if parallel > 1:
            raise asyncckpt.IOFailedError("it did not answer in time", errno=errno.ETIMEDOUT)
        put(self, key, parts, part_bytes=part_bytes, parallel=parallel)

    monkeypatch.setattr(ObjectStore, "put", slow)
    where: dict[str, Any] = {"path": tmp_path / "ckpt", "upload": url} if by_upload else {"path": url}
    with asyncckpt.Saver(tensors=state(), parallel=1, **where) as saver:
        saver.save_async(0).wait_uploaded(60)
    assert asked == [4, 2, 1]


def test_what_is_sent_is_the_arena_itself(owner: seaweed.Server, url: str) -> None:
    """In a process of its own: no second copy of 256 MiB is ever made."""
    program = """
import resource, sys, torch, asyncckpt
MIB = 1 << 20
tensors = {"w": torch.zeros(64 * MIB), "small": torch.zeros(10)}
with asyncckpt.Saver(path=sys.argv[1], tensors=tensors) as saver:
    saver.prepare().result(60)
    asyncckpt.save(sys.argv[1] + "/first", {"small": tensors["small"]}, step=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    saver.save_async(0).result(60)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, url], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100


def test_an_arena_is_given_back_when_nothing_reads_it(
    proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind an upload that fails while its parts are on their way."""
    views: list[memoryview] = []
    release = pool.release
    left: list[int] = []

    def noted(address: int, bytes: int) -> memoryview:
        views.append(memory_at(address, bytes))
        return views[-1]

    def released(arena: Any) -> None:
        left.append(sum(not is_released(view) for view in views))
        release(arena)

    monkeypatch.setattr(sent, "memory_at", noted)
    monkeypatch.setattr(pool, "release", released)
    with asyncckpt.Saver(path=url, tensors=state(), parallel=2) as saver:
        proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied")) if request.kind == "part" else None
        with pytest.raises(asyncckpt.IOFailedError, match="AccessDenied"):
            saver.save_async(0).result()
        proxy.fault = lambda request: None
        saver.save_async(0).result()
    assert len(views) > 3
    assert left == [0, 0]


@pytest.mark.parametrize("parts_before", range(4))
def test_a_cancelled_save_ends_at_any_part(
    proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch, parts_before: int
) -> None:
    """Also when the parts before are on their way, and answered with errors: who waits for them gets them back."""
    future: list[asyncckpt.SaveFuture] = []
    monkeypatch.setattr(sent, "LET_GO_S_MAX", 20.0)
    send_file = sent.send_file

    def cancelled(folder: Any, name: str, pieces: Any, *, sent: Any, check: Callable[[], None]) -> None:
        taken = itertools.count()

        def look() -> None:
            if next(taken) == parts_before:
                while not future or (parts_before > 1 and not proxy.of_kind("part")):
                    time.sleep(0.01)
                assert future[0].cancel()
            check()

        send_file(folder, name, pieces, sent=sent, check=look)

    monkeypatch.setattr(sent, "send_file", cancelled)
    with asyncckpt.Saver(path=url, tensors={"weight": torch.ones(5 << 20)}, parallel=2) as saver:
        proxy.fault = lambda request: Mishap(answer=(503, "SlowDown")) if request.kind == "part" else None
        future.append(saver.save_async(0))
        with pytest.raises(asyncckpt.SaveCancelledError):
            future[0].result()
        proxy.fault = lambda request: None
        assert objects(url) == set()
