"""A resumed run goes on as one that was not ended: with averages, rates that follow a metric, failed validations."""

from __future__ import annotations

import argparse
import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from transformers import Trainer

import asyncckpt
from asyncckpt.integrations.lightning import AsyncCheckpoint, AsyncCheckpointIO
from tests.integrations import lightning_job, transformers_job
from tests.integrations.lightning_callbacks import LightningPrograms, RaisingCallback, RunFacts
from tests.integrations.lightning_job import TwoLayers, batches, held_out

NAME = "net.0.weight"


class Averaged(callbacks.EMAWeightAveraging):
    """Notes the weights that are trained after each step."""

    def __init__(self) -> None:
        super().__init__(decay=0.5)
        self.trained: dict[int, torch.Tensor] = {}

    def on_train_batch_end(self, running: Any, module: Any, *given: Any) -> None:
        super().on_train_batch_end(running, module, *given)
        self.trained[running.global_step] = module.state_dict()[NAME].clone()


def saved_weights(folder: Path) -> tuple[int, torch.Tensor]:
    step = asyncckpt.list_steps(folder)[-1]
    return step, AsyncCheckpointIO().load_checkpoint(folder / f"step={step}")["current_model_state"][NAME]


def test_the_last_step_is_saved_before_averages_take_the_place_of_its_weights(tmp_path: Path) -> None:
    averaged = Averaged()
    saving = AsyncCheckpoint(tmp_path, every_n_train_steps=7)
    lightning_job.trainer(tmp_path, averaged, saving).fit(TwoLayers(), batches(), held_out())
    step, weights = saved_weights(tmp_path)
    assert step == 20
    assert torch.equal(weights, averaged.trained[20])


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_start", "on_validation_end"])
def test_an_error_in_a_validation_saves_no_averages_as_weights(tmp_path: Path, error: Any, hook: str) -> None:
    averaged, raising = Averaged(), RaisingCallback(hook, 10, error)
    running = lightning_job.trainer(tmp_path, raising, averaged, AsyncCheckpoint(tmp_path, every_n_train_steps=4))
    with pytest.raises((ValueError, SystemExit)):
        running.fit(TwoLayers(), batches(), held_out())
    step, weights = saved_weights(tmp_path)
    assert torch.equal(weights, averaged.trained[step])


@pytest.mark.parametrize("step", [5, 6, 12])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"])
def test_an_error_after_a_step_loses_no_batch_and_no_validation(tmp_path: Path, hook: str, step: int) -> None:
    programs = LightningPrograms(tmp_path, callbacks.Callback)
    whole, run = RunFacts(), RunFacts()
    programs.fit(whole, programs.ours("whole"))
    programs.fit(run, programs.ours("part"), first=[RaisingCallback(hook, step, ValueError("broken"))])
    assert programs.fit(run, programs.ours("part"), path="last") is None
    assert not run.differences(whole)


class OnPlateau(TwoLayers):
    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0, threshold=0.9)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


@pytest.mark.parametrize("every", [4, 5])
def test_a_rate_that_follows_a_metric_is_lowered_once_where_an_epoch_fails_at_once(tmp_path: Path, every: int) -> None:
    def fitted(folder: Path, *first: Any, path: str | None = None) -> list[Any]:
        running = lightning_job.trainer(
            folder, *first, AsyncCheckpoint(folder, every_n_train_steps=every), max_epochs=3
        )
        try:
            running.fit(OnPlateau(), batches(), held_out(), ckpt_path=path)
        except ValueError:
            assert first
        scheduler = running.lr_scheduler_configs[0].scheduler
        return [running.optimizers[0].param_groups[0]["lr"], scheduler.last_epoch, scheduler.num_bad_epochs]

    whole = fitted(tmp_path / "whole")
    fitted(tmp_path / "parts", RaisingCallback("on_before_backward", 10, ValueError("broken")))
    assert fitted(tmp_path / "parts", path="last") == whole


class ColourOfTrainer(enum.Enum):
    RED = 1


class Configured(TwoLayers):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


VALUES = [Path("/data"), argparse.Namespace(lr=1.0), ColourOfTrainer.RED, torch.nn.MSELoss(), torch.nn.ReLU]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_hyperparameters_that_no_load_gives_back_are_refused_before_the_first_step(tmp_path: Path, value: Any) -> None:
    running = lightning_job.trainer(tmp_path, AsyncCheckpoint(tmp_path / "run", every_n_train_steps=4))
    with pytest.raises(asyncckpt.UsageError, match=r"hyper_parameters.*value"):
        running.fit(Configured(value), batches())
    assert running.global_step == 0
    own = lightning_job.trainer(tmp_path, plugins=[AsyncCheckpointIO()])
    with pytest.raises(asyncckpt.UsageError, match=r"hyper_parameters.*value"):
        own.fit(Configured(value), batches())  # Lightning's own callback saves at the end of an epoch.


def test_what_a_checkpoint_holds_is_loaded_though_less_will_be_saved(tmp_path: Path) -> None:
    """As Hugging Face's own Trainer loads it."""
    results = []
    for name, kind in (("own", Trainer), ("ours", transformers_job.ours.Trainer)):
        for more in ({"max_steps": 8, "lr_scheduler_type": "constant"}, {"save_only_model": True}):
            data = transformers_job.samples()
            settings = {"lr_scheduler_type": "constant", **more}
            made = transformers_job.arguments(tmp_path / name, **settings)
            running = kind(model=transformers_job.model(), args=made, train_dataset=data, eval_dataset=data[:8])
            running.train(resume_from_checkpoint="save_only_model" in more)
        results.append((running.model.state_dict(), running.lr_scheduler.state_dict()["last_epoch"]))
    (own, own_epochs), (ours, epochs) = results
    assert epochs == own_epochs == 20
    assert all(torch.equal(tensor, ours[name]) for name, tensor in own.items())


@pytest.mark.parametrize("hook", ["on_step_end", "on_evaluate", "on_log", "on_optimizer_step"])
def test_an_error_after_a_step_of_transformers_trains_no_batch_twice(tmp_path: Path, hook: str) -> None:
    whole = transformers_job.trainer(tmp_path / "whole", logging_steps=4)
    whole.train()
    raising = transformers_job.TrainerCallback()

    def fail(args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= 7:
            raise ValueError("broken")

    setattr(raising, hook, fail)
    with pytest.raises(ValueError, match="broken"):
        transformers_job.trainer(tmp_path / "parts", logging_steps=4, callbacks=[raising]).train()
    parts = transformers_job.trainer(tmp_path / "parts", logging_steps=4)
    parts.train(resume_from_checkpoint=True)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, parts.model.state_dict()[name])
    told = [[e.get("loss", e.get("eval_loss")) for e in run.state.log_history[:-1]] for run in (whole, parts)]
    assert told[0] == told[1]
