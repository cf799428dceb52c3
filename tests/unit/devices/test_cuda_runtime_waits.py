"""Waits for devices end: with the device, or at their deadline. What a device may still use is held then."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.devices import batch as batch_module
from asyncckpt.devices.cuda_runtime import wait_until
from asyncckpt.devices.host_copies import Launched, Pending
from asyncckpt.errors import DeadlineError
from asyncckpt.staging.pool import ArenaState, pool
from tests.simulated_device import SimulatedRuntime
from tests.simulated_device import runtime as runtime_module

pytestmark = pytest.mark.any_core


def test_a_wait_ends_with_the_device() -> None:
    answers = iter([False, False, True])
    wait_until(lambda: next(answers), deadline_s=60)
    assert next(answers, None) is None


def test_a_wait_ends_at_its_deadline() -> None:
    with pytest.raises(DeadlineError, match=r"0\.01 s"):
        wait_until(lambda: False, deadline_s=0.01)


def test_what_a_hanging_device_may_use_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails; its arena is not used again, its tensors stay; the next save, of a host's state, is made."""
    monkeypatch.setattr(batch_module, "_abandoned", [])
    runtime = SimulatedRuntime(1)
    runtime.schedule.pace = 0.0
    with runtime.installed():
        state = {"x": runtime.new_tensor((1000,), torch.float32, values=torch.arange(1000)), "host": torch.ones(3)}
        held = weakref.ref(state["x"].untyped_storage())
        with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
            with monkeypatch.context() as hanging:
                hanging.setattr(runtime_module.SimulatedEvent, "wait", _hangs)
                future = saver.save_async(1)
                [used] = [arena for arena in pool._arenas if arena.state is not ArenaState.FREE]
                error = future.exception(30)
            assert isinstance(error, DeadlineError)
            assert used in pool._lost
            assert used not in pool._arenas
            del state["x"]
            gc.collect()
            assert held() is not None
            saver.save_async(2).result(30)
    assert asyncckpt.list_steps(tmp_path) == [2]
    target = {"host": torch.zeros(3)}
    asyncckpt.Loader(tmp_path, tensors=target).load()
    assert np.array_equal(target["host"], np.ones(3))


def _hangs(event: object) -> None:
    wait_until(lambda: False, deadline_s=0.01)


def test_an_interrupt_waits_for_the_devices() -> None:
    """And is raised then, so that nobody uses memory that a device still writes to."""
    settled: list[str] = []

    class Settling:
        def __init__(self, name: str, *, interrupts: int) -> None:
            self.name, self.left, self.device = name, interrupts, 0

        def settle(self, event: object) -> None:
            self.left -= 1
            if self.left >= 0:
                raise KeyboardInterrupt
            settled.append(self.name)

    batches: list[Any] = [Settling("first", interrupts=2), Settling("second", interrupts=0)]
    event: Any = object()
    pending = Pending([Launched(batch=batch, fence=event, step_fence=event, end=event) for batch in batches])
    with pytest.raises(KeyboardInterrupt):
        pending.settle()
    assert settled == ["first", "second"]
    assert not pending.is_lost
    assert pending.devices == []
    pending.settle()
