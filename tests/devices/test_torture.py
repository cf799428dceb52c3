"""Whatever order devices run in, a checkpoint holds the state as it was at the call, and nothing from behind it.

Every seed is another state, other options and another order. The last tests leave an order out, and find it missing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.devices.batch import Batch
from asyncckpt.devices.host_copies import Pending
from asyncckpt.errors import SaveCancelledError
from tests.devices.training import DeviceTrainer, differing
from tests.shares import slow_but_for_a_share
from tests.simulated_device import SimulatedRuntime
from tests.simulated_device.runtime import KernelsChoice

pytestmark = pytest.mark.any_core

SEEDS_COUNT = 45
STEPS = 3
KERNELS: tuple[KernelsChoice, ...] = ("plain", "library", "torch")


@dataclass
class TortureRun:
    """One training with its saves, from a seed."""

    runtime: SimulatedRuntime
    trainer: DeviceTrainer
    saver: asyncckpt.Saver
    random: random.Random

    def step(self, step: int) -> tuple[asyncckpt.SaveFuture | None, dict[str, torch.Tensor]]:
        """Train, save, train on at once. Returns the future and the cut."""
        trainer = self.trainer
        trainer.change_all()
        trainer.join_strange()
        if self.random.random() < 0.15:
            cut = trainer.cut()
            self.saver.wait_idle()
            self.saver.save(step)
            return None, cut
        if self.random.random() < 0.5:
            return self._save_and_train_on(step)
        self.saver.wait_idle()
        with self.runtime.schedule.busy():  # Whoever waits for the copies waits until the trainer is through.
            return self._save_and_train_on(step, may_wait=False)

    def _save_and_train_on(
        self, step: int, *, may_wait: bool = True
    ) -> tuple[asyncckpt.SaveFuture, dict[str, torch.Tensor]]:
        trainer = self.trainer
        future = self.saver.save_async(step)
        cut = trainer.cut()
        trainer.change_all(strange=False)
        for name in list(trainer.leaves):
            if self.random.random() < 0.3:
                trainer.replace(name)
        if may_wait and self.random.random() < 0.3:
            future.wait_staged(30)
        else:
            trainer.fence_strange(future)
        trainer.change_all()
        return future, cut


def new_run(runtime: SimulatedRuntime, seed: int, path: Path) -> TortureRun:
    choices = random.Random(seed)
    trainer = DeviceTrainer.new(runtime, seed, leaves_count=choices.choice([2, 6, 20]))
    saver = asyncckpt.Saver(
        path=path,
        tensors=trainer.state,
        on_busy="queue",
        durability="none",
        device=asyncckpt.DeviceOptions(
            scratch_bytes=choices.choice([0, 700, 5000, 100_000, 1 << 30]),
            pinned_memory_limit=choices.choice([None, None, 0]),
            streams=trainer.known,
        ),
    )
    return TortureRun(runtime, trainer, saver, choices)


def wrong_tensors(runtime: SimulatedRuntime, seed: int, path: Path) -> list[str]:
    """Train and save; returns what is not as it was at the cut in any checkpoint."""
    cuts: dict[int, dict[str, torch.Tensor]] = {}
    with runtime.installed():
        run = new_run(runtime, seed, path)
        with run.saver, run.trainer.training():
            for step in range(STEPS):
                future, cut = run.step(step)
                cancelled = future is not None and run.random.random() < 0.15 and future.cancel()
                if future is not None and (cancelled or run.random.random() < 0.5):
                    error = future.exception(30)
                    assert error is None or isinstance(error, SaveCancelledError), error
                    cancelled = error is not None
                if not cancelled:
                    cuts[step] = cut
        found = []
        for step, cut in cuts.items():
            targets = {name: torch.zeros_like(values) for name, values in cut.items()}
            asyncckpt.Loader(path, tensors=targets, step=step).load()
            found += [f"{name} of step {step}" for name in differing(targets, cut)]
    return found


def is_wrong(runtime: SimulatedRuntime, seed: int, path: Path) -> bool:
    """Whether a checkpoint is wrong, or a save did what devices do not allow."""
    try:
        return wrong_tensors(runtime, seed, path) != []
    except Exception:
        return True


@pytest.mark.parametrize("seed", slow_but_for_a_share(range(SEEDS_COUNT), "torture of devices", every=6))
def test_checkpoints_hold_the_cut(seed: int, tmp_path: Path) -> None:
    runtime = SimulatedRuntime(1 + seed % 3, seed=seed, kernels=KERNELS[seed % len(KERNELS)])
    assert wrong_tensors(runtime, seed, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(8))
def test_checkpoints_of_many_seeds_hold_the_cut(hundred: int, tmp_path: Path) -> None:
    for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        runtime = SimulatedRuntime(1 + seed % 3, seed=seed, kernels=KERNELS[seed % len(KERNELS)])
        assert wrong_tensors(runtime, seed, tmp_path / str(seed)) == [], seed


class NoFence(SimulatedRuntime):
    """Trainers do not wait for a save."""

    def hold_back(self, stream: Any, event: Any) -> None:
        if stream is self.side_stream(stream.device):
            super().hold_back(stream, event)


class NoFollow(SimulatedRuntime):
    """A save does not wait for trainers."""

    def hold_back(self, stream: Any, event: Any) -> None:
        if stream is not self.side_stream(stream.device):
            super().hold_back(stream, event)


def without(name: str, owner: type) -> Any:
    """A change of the library: a method does nothing."""
    return lambda patch: patch.setattr(owner, name, lambda *_, **__: None)


def let_go_at_once(patch: pytest.MonkeyPatch) -> None:
    """A change of the library: the host reads what may not have arrived."""
    patch.setattr(Batch, "settle", lambda self, event: None)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param(NoFence, lambda patch: None, id="trainers do not wait"),
        pytest.param(NoFollow, lambda patch: None, id="saves do not wait for trainers"),
        pytest.param(SimulatedRuntime, without("fence", Pending), id="strange streams do not wait"),
        pytest.param(SimulatedRuntime, without("keep", Batch), id="memory is not kept"),
        pytest.param(SimulatedRuntime, let_go_at_once, id="the host does not wait"),
    ],
)
def test_an_order_left_out_is_found(
    kind: type[SimulatedRuntime], change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    assert any(is_wrong(kind(1, seed=seed), seed, tmp_path / str(seed)) for seed in range(40, 140))
