"""Each callback that Lightning ships, beside ours: what it comes to is what it comes to without ours, however it ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks

import asyncckpt
from asyncckpt.integrations.lightning import AsyncCheckpointIO
from tests.integrations.lightning_callbacks import (
    OwnSaving,
    Programs,
    Raising,
    Run,
    ends,
    newest,
    same,
    shipped,
)

LEFT_OUT = {
    "BaseFinetuning": "is abstract; BackboneFinetuning is one",
    "ProgressBar": "is abstract; the two others are",
}


def made(kind: type, folder: Path) -> Callable[[], Any]:
    """Return what makes a callback of a class, by itself where it has arguments without a default."""
    return {
        "BackboneFinetuning": lambda: kind(unfreeze_backbone_at_epoch=1, verbose=True),
        "EarlyStopping": lambda: kind("val_loss", patience=1, min_delta=0.5),
        "EMAWeightAveraging": lambda: kind(decay=0.5),
        "GradientAccumulationScheduler": lambda: kind({0: 1, 1: 2}),
        "LearningRateFinder": lambda: kind(num_training_steps=10),
        "ModelCheckpoint": lambda: kind(folder / "own", monitor="val_loss", save_last=True),
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
    assert whole.differences(plain) == []
    wrong = []
    for step in asyncckpt.list_steps(tmp_path / "whole"):
        found, expected = AsyncCheckpointIO().load_checkpoint(tmp_path / "whole" / f"step={step}"), own.files[step]
        theirs = torch.load(__import__("io").BytesIO(expected), weights_only=False)
        for name in theirs.keys() - {"loops", "callback_metrics", "callbacks"}:
            if not same(theirs[name], found[name]):
                wrong.append(f"saved at {step}: {name}")
        shutil.copytree(tmp_path / "whole", tmp_path / "part")
        asyncckpt.checkpoints.remove_after(tmp_path / "part", step)
        resumed = Run(validated={at: losses for at, losses in whole.validated.items() if at < step or (at == step and step == 18)})
        error = programs.fit(resumed, programs.ours("part"), path="last")
        wrong += [f"resumed at {step}: {w} {error!r}" for w in resumed.differences(whole) or ([""] if error else [])]
        shutil.rmtree(tmp_path / "part")
    for hook, step, error in ends():
        run = Run()
        raising = Raising(hook, step, error)
        programs.fit(run, programs.ours("part"), first=[raising])
        at = newest(tmp_path / "part") if (tmp_path / "part").exists() else None
        got = programs.fit(run, programs.ours("part"), path="last")
        wrong += [f"{hook} {step} {type(error).__name__}, saved {at}: {w} {got!r}" for w in run.differences(whole) or ([""] if got else [])]
        shutil.rmtree(tmp_path / "part")
    assert wrong == []
