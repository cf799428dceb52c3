"""Each callback that Lightning ships comes to the same beside ours as without it, however a fit ends."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.integrations.lightning import AsyncCheckpointIO
from tests.integrations.lightning_callbacks import (
    STEPS,
    OwnSaving,
    Programs,
    Raising,
    Run,
    ends,
    newest,
    same,
    shipped,
)
from tests.shares import share_of

LEFT_OUT = {
    "BaseFinetuning": "is abstract; BackboneFinetuning is one",
    "ProgressBar": "is abstract; the two others are",
}
# Undone with its trials, whose random numbers Lightning keeps and ours puts back.
DRAWN = ("BatchSizeFinder", "LearningRateFinder")


def made(kind: type, folder: Path) -> Callable[[], Any]:
    """Return what makes a callback of a class, by itself where it has arguments without a default."""
    return {
        "BackboneFinetuning": lambda: kind(unfreeze_backbone_at_epoch=1, verbose=True),
        "BatchSizeFinder": lambda: kind(max_trials=2),
        "EarlyStopping": lambda: kind("val_loss", patience=1, min_delta=0.5),
        "EMAWeightAveraging": lambda: kind(decay=0.5),
        "GradientAccumulationScheduler": lambda: kind({0: 1, 1: 2}),
        "LearningRateFinder": lambda: kind(num_training_steps=10),
        "ModelCheckpoint": lambda: kind(tempfile.mkdtemp(dir=folder), monitor="val_loss", save_last=True),
        "ModelPruning": lambda: kind("l1_unstructured", amount=0.2),
        "OnExceptionCheckpoint": lambda: kind(folder / "own"),
        "SpikeDetection": lambda: kind(atol=1000.0),
        "StochasticWeightAveraging": lambda: kind(1e-3, swa_epoch_start=2),
        "ThroughputMonitor": lambda: kind(batch_size_fn=len),
    }.get(kind.__name__, kind)


@pytest.mark.parametrize("kind", shipped(), ids=lambda kind: kind.__name__)
def test_a_fit_goes_on_where_it_was_ended(kind: type, tmp_path: Path) -> None:
    if kind.__name__ in LEFT_OUT:
        pytest.skip(LEFT_OUT[kind.__name__])
    programs = Programs(tmp_path, made(kind, tmp_path))
    plain, whole, own = Run(), Run(), OwnSaving()
    assert programs.fit(plain, own) is None
    assert programs.fit(whole, programs.ours("whole")) is None
    if kind.__name__ not in DRAWN:
        assert whole.differences(plain) == []
    wrong, folder = {}, tmp_path / "part"

    def go_on(run: Run, what: str) -> None:
        step, error = newest(folder), programs.fit(run, programs.ours("part"), path="last")
        found = run.differences(whole) if error is None else [repr(error)]
        if found and (step == 0 or programs.own_goes_on(min(step, STEPS - 1))):
            wrong[f"{what}, from step {step}"] = found
        elif found:
            print(f"{what}, from step {step}: Lightning's own saving does not go on either: {found}")
        shutil.rmtree(folder)

    for step in asyncckpt.list_steps(tmp_path / "whole"):
        theirs = torch.load(io.BytesIO(own.files[step]), weights_only=False)
        ours = AsyncCheckpointIO().load_checkpoint(tmp_path / "whole" / f"step={step}")
        compared = theirs.keys() - {"loops", "epoch", "callbacks"}  # With them a fit goes on elsewhere.
        assert [name for name in compared if not same(theirs[name], ours[name])] == []
        shutil.copytree(tmp_path / "whole", folder)
        asyncckpt.checkpoints.remove_after(folder, step)
        before = {at: losses for at, losses in whole.validated.items() if at < step or step == STEPS}
        go_on(Run(validated=before), "killed")
    for hook, step, error in share_of(ends(), f"ends of {kind.__name__}"):
        run = Run()
        programs.fit(run, programs.ours("part"), first=[Raising(hook, step, error)])
        go_on(run, f"{type(error).__name__} in {hook} at step {step}")
    assert wrong == {}
