"""Each callback that Lightning ships comes to the same beside ours as without it, however a fit ends."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.integrations.lightning import AsyncCheckpointIO
from tests.integrations.lightning_callbacks import LightningPrograms, OwnSaving, RunFacts, ends, shipped
from tests.integrations.remaining import differing
from tests.integrations.same import same
from tests.shares import share_of

LEFT_OUT = {
    "BaseFinetuning": "is abstract; BackboneFinetuning is one",
    "ProgressBar": "is abstract; the two others are",
}


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


@pytest.mark.parametrize("kind", share_of(shipped(), "callbacks of Lightning"), ids=lambda kind: kind.__name__)
def test_a_fit_goes_on_where_it_was_ended(kind: type, tmp_path: Path) -> None:
    if kind.__name__ in LEFT_OUT:
        pytest.skip(LEFT_OUT[kind.__name__])
    programs = LightningPrograms(tmp_path, made(kind, tmp_path))
    plain, own, wrong, dropout = RunFacts(), OwnSaving(), {}, 0.5
    assert programs.fit(plain, own) is None
    whole = programs.whole(dropout)
    if differs := whole.differences(plain):
        assert differing(kind.__name__, {"random numbers"}), differs
        plain, dropout = RunFacts(), 0.0
        programs.fit(plain, own, dropout=dropout)
        assert programs.whole(dropout).differences(plain) == set()

    def go_on(what: str, ended: Callable[[float], RunFacts]) -> None:
        step, run, error = programs.resumed(ended, 0.5)
        if error is None and not run.differences(whole):
            return
        # Lightning saves no random numbers: beside its own saving nothing may draw any.
        step, run, error = programs.resumed(ended, 0.0)
        by_own, own_error = programs.own_resumed(step)
        differs = {type(error).__name__} if error is not None else run.differences(programs.whole(0.0))
        is_as_own = type(error) is type(own_error) and (error is not None or not differs & run.differences(by_own))
        is_refused = isinstance(error, asyncckpt.UsageError) and run.facts["steps"][0] in (0, step)
        if not differing(kind.__name__, differs or {"random numbers"}, is_as_own=is_as_own or is_refused):
            wrong[f"{what}, from step {step}"] = differs

    for step in asyncckpt.list_steps(tmp_path / f"whole-{dropout}"):
        theirs = torch.load(io.BytesIO(own.files[step]), weights_only=False)
        ours = AsyncCheckpointIO().load_checkpoint(tmp_path / f"whole-{dropout}" / f"step={step}")
        compared = theirs.keys() - {"loops", "epoch", "callbacks"}  # With them a fit goes on elsewhere.
        assert [name for name in compared if not same(theirs[name], ours[name])] == []
        go_on("killed", partial(programs.part, step))
    for hook, step, error in share_of(ends(), f"ends of {kind.__name__}", every=2):
        go_on(f"{type(error).__name__} in {hook} at step {step}", partial(programs.ended, hook, step, error))
    assert wrong == {}, wrong
