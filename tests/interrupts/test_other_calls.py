"""Ctrl-C at places of calls around Savers and Loaders: strategies, queues, followers, and what is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
import asyncckpt.dcp
from asyncckpt.checkpoints import collect_garbage, pin, prune, remove_after, unpin
from asyncckpt.commit.attempt import claims
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.storage.owner_lock import _registry
from asyncckpt.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from asyncckpt.strategies.common_state import CommonLoad, CommonSave
from asyncckpt.strategies.mapping import ShardedObject, ShardedTensor
from asyncckpt.strategies.sharded_state import ShardedLoad, ShardedSave
from tests.interrupts.places import FEW, interrupt_at
from tests.interrupts.world import DEADLINE_S, check_nothing_is_held, settled_fds, wait_for

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 looks for signals in other places")


class Process:
    """What a process has open between calls."""

    def __init__(self) -> None:
        gc.collect()
        self.fds = settled_fds()
        self.locks = set(_registry.held)

    def check(self) -> None:
        """Check that nothing more is held now."""
        check_nothing_is_held()
        if self._has_more():
            settled_fds()
            asyncio.set_event_loop(None)  # One that asyncio.run was kept from closing.
            gc.collect()
            assert not self._has_more(), (os.listdir("/proc/self/fd"), self.fds, _registry.held)

    def _has_more(self) -> bool:
        return len(os.listdir("/proc/self/fd")) > self.fds or _registry.held.keys() != self.locks


# -- strategies --------------------------------------------------------------------------------------------------------


def _sharded(value: float) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value)),
        "v": ShardedTensor.from_rank_offsets("v", torch.full((2,), value)),
        "o": ShardedObject("o", {"n": torch.ones(3)}, (1,), (0,)),
    }


def _load(path: Path) -> None:
    ShardedLoad().load(_sharded(0.0), path)


def _load_common(path: Path) -> None:
    CommonLoad().load_common(path)


def _metadata(path: Path) -> None:
    ShardedLoad().load_sharded_metadata(path)


def _save(path: Path) -> None:
    ShardedSave(durability="none").save(_sharded(2.0), path)


def _save_common(path: Path) -> None:
    CommonSave(durability="none").save_common({"a": torch.arange(6.0)}, path)


def _save_for_other_processes(path: Path) -> None:
    strategy = ShardedSave(durability="none", request_type=lambda _: AsyncRequest)
    request = strategy.async_save(_sharded(2.0), path)
    request.execute_sync()


@pytest.mark.parametrize("use", [_load, _load_common, _metadata, _save, _save_common, _save_for_other_processes])
def test_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], None]) -> None:
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(files))
    path = tmp_path / "checkpoint"
    _save(path)
    _save_common(path)
    process = Process()

    def check_whole() -> None:
        process.check()
        assert wait_for(lambda: not list(files.iterdir()))
        assert torch.equal(CommonLoad().load_common(path)["a"], torch.arange(6.0))
        assert torch.equal(ShardedLoad().load(_sharded(0.0), path)["w"], torch.full((4,), 2.0))
        _save(path)

    interrupt_at(FEW, lambda: lambda: use(path), check_nothing_is_held, check_whole)


def _remove(path: Path) -> None:
    ShardedLoad().remove_sharded_tensors(path, "v")


def test_removal_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    _save(path)
    process = Process()

    def check() -> None:
        assert (save_lock.in_flight(), claims.held, _registry.held) == ([], {}, {}), "it goes on"
        process.check()
        assert "w" in ShardedLoad().load_tensors_metadata(path)
        _save(path)

    interrupt_at(FEW, lambda: lambda: _remove(path), check)


@pytest.mark.parametrize(
    "act",
    [
        lambda path: remove_after(path, 1),
        lambda path: prune(path, asyncckpt.KeepPolicy(every_steps=3)),
        lambda path: (pin(path, 1), unpin(path, 1)),
        collect_garbage,
    ],
)
def test_choosing_what_stays(tmp_path: Path, act: Callable[[Path], object]) -> None:
    """Each is done or not, nothing is held, and it can be done again."""
    for step in range(5):
        asyncckpt.save(tmp_path / "model", {"x": torch.ones(2)}, step, durability="none")
    numbers = itertools.count()
    path = tmp_path
    process = Process()

    def prepare() -> Callable[[], object]:
        nonlocal path
        path = tmp_path / str(next(numbers))
        shutil.copytree(tmp_path / "model", path)
        return lambda: act(path)

    def check() -> None:
        process.check()
        act(path)
        assert asyncckpt.list_steps(path)[:2] in ([0, 1], [0, 3])
        assert {path.suffix for path in (path / "manifests").iterdir()} == {".json"}

    interrupt_at(FEW, prepare, check)


def test_a_queue_of_async_calls() -> None:
    queue = AsyncCallsQueue()
    finalized: list[int] = []
    scheduled = 0

    def prepare() -> Callable[[], object]:
        nonlocal scheduled
        scheduled += 1
        call = scheduled
        queue.schedule_async_request(AsyncRequest(lambda: time.sleep(0.002), (), [lambda: finalized.append(call)]))
        return lambda: queue.maybe_finalize_async_calls(blocking=True)

    def check() -> None:
        check_nothing_is_held()
        queue.maybe_finalize_async_calls(blocking=True)
        assert finalized == list(range(1, scheduled + 1))

    interrupt_at(FEW, prepare, check)


# -- Savers and what is around them ------------------------------------------------------------------------------------


def _new_saver(path: Path) -> asyncckpt.Saver:
    return asyncckpt.Saver(path=path, tensors={"w": torch.ones(3)}, durability="none", keep=2)


def _wait_idle(saver: asyncckpt.Saver, step: int) -> None:
    saver.save_async(step)
    saver.wait_idle(DEADLINE_S)


def _cancel(saver: asyncckpt.Saver, step: int) -> None:
    future = saver.save_async(step)
    future.wait_staged(DEADLINE_S)
    future.cancel()
    future.exception(DEADLINE_S)


def _drain(saver: asyncckpt.Saver, step: int) -> None:
    with asyncckpt.PeriodicSaver(saver, every_steps=1) as periodic:
        periodic.step(step)
        periodic.step(step + 1)
        periodic.drain(DEADLINE_S)


def _statistics(saver: asyncckpt.Saver, step: int) -> None:
    saver.statistics()


def _list_steps(saver: asyncckpt.Saver, step: int) -> None:
    asyncckpt.list_steps(saver.path)
    assert asyncckpt.dcp.StorageReader.validate_checkpoint_id(saver.path)


def _drop(saver: asyncckpt.Saver, step: int) -> None:
    _new_saver(Path(saver.path).with_name("dropped"))


def _follow(saver: asyncckpt.Saver, step: int) -> None:
    async def run() -> None:
        async with asyncckpt.follow(saver.path) as follower:
            update = await anext(follower)
            await update.load(tensors={"w": torch.zeros(3)})

    with contextlib.suppress(asyncio.CancelledError):  # asyncio.run cancels, and does not always say why.
        asyncio.run(run())


USES = [_wait_idle, _cancel, _drain, _statistics, _list_steps, _drop, _follow]


@pytest.mark.parametrize("use", USES)
def test_calls_around_a_saver(tmp_path: Path, use: Callable[[asyncckpt.Saver, int], None]) -> None:
    saver = _new_saver(tmp_path / "run")
    saver.save(1)
    steps = 1
    process = Process()

    def prepare() -> Callable[[], None]:
        nonlocal steps
        steps += 3
        return lambda: use(saver, steps)

    def check() -> None:
        saver.wait_idle(DEADLINE_S)
        check_nothing_is_held()

    def check_whole() -> None:
        nonlocal steps
        process.check()
        steps += 3
        assert saver.save(steps).step == steps

    with saver:
        interrupt_at(FEW, prepare, check, check_whole)
