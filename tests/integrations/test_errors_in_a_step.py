"""An error in the middle of a step leaves the step before, whose trainer goes on from it as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from transformers import TrainerCallback

import asyncckpt
from asyncckpt.integrations.lightning import AsyncCheckpoint
from tests.integrations import lightning_job, transformers_job
from tests.integrations.lightning_callbacks import RaisingCallback
from tests.integrations.lightning_job import TwoLayers, batches


class Raise(TrainerCallback):
    """Raises once, behind forward and backward of a step."""

    def __init__(self, error: BaseException, step: int) -> None:
        self._error: BaseException | None = error
        self._step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step and self._error is not None:
            error, self._error = self._error, None
            raise error


@pytest.mark.parametrize("step", [7, 9])
def test_transformers(step: int, tmp_path: Path) -> None:
    """Its random numbers, and the loss that no log has told: not those of the step that has failed."""
    whole = transformers_job.trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(ValueError, match="broken"):
        transformers_job.trainer(tmp_path / "parts", callbacks=[Raise(ValueError("broken"), step)]).train()
    assert asyncckpt.list_steps(tmp_path / "parts" / "checkpoints")[-1] == step - 1
    parts = transformers_job.trainer(tmp_path / "parts")
    parts.train(resume_from_checkpoint=True)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, parts.model.state_dict()[name])
    for entry, expected in zip(parts.state.log_history[:-1], whole.state.log_history[:-1], strict=True):
        timed = ("runtime", "per_second")
        assert {k: v for k, v in entry.items() if not k.endswith(timed)} == {
            k: v for k, v in expected.items() if not k.endswith(timed)
        }
    assert parts.state.total_flos == whole.state.total_flos


@pytest.mark.parametrize(("batch", "accumulated"), [(6, 1), (9, 1), (10, 1), (7, 2), (8, 2), (13, 4)])
def test_lightning(batch: int, accumulated: int, tmp_path: Path) -> None:
    """Its random numbers, and its place among the batches: the batch that has failed is trained on again."""

    class Broken(TwoLayers):
        def training_step(self, *given: Any) -> torch.Tensor:
            loss = super().training_step(*given)
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == batch + 1:
                raise ValueError("broken")
            return loss

    def fitted(place: Path, model: TwoLayers) -> TwoLayers:
        saved = AsyncCheckpoint(place, every_n_train_steps=100)
        lightning_job.trainer(place, saved, accumulate_grad_batches=accumulated).fit(model, batches())
        return model

    whole = fitted(tmp_path / "whole", TwoLayers())
    with pytest.raises(ValueError, match="broken"):
        fitted(tmp_path / "parts", Broken())
    epoch, at = divmod(batch, 10)
    assert asyncckpt.list_steps(tmp_path / "parts") == [epoch * -(-10 // accumulated) + at // accumulated]
    parts = fitted(tmp_path / "parts", TwoLayers())
    assert parts.trainer.global_step == whole.trainer.global_step
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, parts.state_dict()[name])


COUNTED = (
    "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_before_optimizer_step",
    "on_train_batch_end", "on_train_epoch_end",
)  # fmt: skip


class CountingHooks(callbacks.Callback):
    """Counts calls of its hooks, and remembers what it drew when a batch began."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTED, 0)
        self.drawn: list[float] = []
        for hook in COUNTED:
            setattr(self, hook, lambda *_, hook=hook: self._count(hook))

    def _count(self, hook: str) -> None:
        self.counts[hook] += 1
        if hook == "on_train_batch_start":
            self.drawn = [*self.drawn, torch.rand(()).item()]

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts.update(state_dict["counts"])
        self.drawn = list(state_dict["drawn"])


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(("hook", "epochs"), [
    ("on_train_batch_start", 1.4), ("on_before_backward", 1.4), ("on_before_optimizer_step", 1.4),
    ("on_before_backward", 1.0), ("on_before_optimizer_step", 1.0),
])  # fmt: skip
def test_callbacks_of_lightning_count_a_step_that_failed_once(
    hook: str, epochs: float, accumulated: int, tmp_path: Path
) -> None:
    def fitted(place: Path, *more: Any) -> CountingHooks:
        counting, saved = CountingHooks(), AsyncCheckpoint(place, every_n_train_steps=100)
        running = lightning_job.trainer(place, counting, saved, *more, accumulate_grad_batches=accumulated)
        running.fit(TwoLayers(), batches(), ckpt_path="last")
        return counting

    whole = fitted(tmp_path / "whole")
    with pytest.raises(ValueError, match="broken"):
        fitted(tmp_path / "parts", RaisingCallback(hook, int(epochs * 10) // accumulated, ValueError("broken")))
    assert asyncckpt.list_steps(tmp_path / "parts") == [int(epochs * 10) // accumulated]
    parts = fitted(tmp_path / "parts")
    assert parts.counts == whole.counts
    assert epochs == 1.0 or parts.drawn == whole.drawn


class CountingEnds(callbacks.Callback):
    """Counts the epochs that have ended."""

    ended = 0

    def on_train_epoch_end(self, *_: Any) -> None:
        self.ended += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ended = state_dict["ended"]


@pytest.mark.parametrize("held_out", [None, lightning_job.held_out()])
def test_callbacks_of_lightning_count_an_end_of_an_epoch_that_failed_once(held_out: Any, tmp_path: Path) -> None:
    def fitted(*more: Any) -> int:
        counting, saved = CountingEnds(), AsyncCheckpoint(tmp_path, every_n_train_steps=100)
        running = lightning_job.trainer(tmp_path, counting, *more, saved)
        running.fit(TwoLayers(), batches(), held_out, ckpt_path="last")
        return counting.ended

    with pytest.raises(ValueError, match="broken"):
        fitted(RaisingCallback("on_train_epoch_end", 10, ValueError("broken")))
    assert asyncckpt.list_steps(tmp_path) == [10]
    assert fitted() == 2


def test_a_run_that_begins_anew_with_smaller_batches_is_ended(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    for step, ends in ((6, True), (1, False)):
        place = tmp_path / str(step)
        running = transformers_job.trainer(place, callbacks=[Raise(error, step)], auto_find_batch_size=True)
        if not ends:  # Nothing was trained yet.
            running.train()
            continue
        with pytest.raises(asyncckpt.UsageError, match="start again with smaller batches"):
            running.train()
        assert asyncckpt.list_steps(place / "checkpoints") == [4, 5]
        transformers_job.trainer(place).train(resume_from_checkpoint=True)
