"""The last step of a loop is saved whatever metadata it has, and no call takes its place or asks for it twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.checkpoints import remove_after


@pytest.mark.parametrize("metadata", [None, {"loss": torch.zeros(1)}, {"loss": "low"}, {1: 2}], ids=repr)
@pytest.mark.parametrize("keep", [None, asyncckpt.KeepPolicy(latest=2, best=1, metric="loss")], ids=["all", "best"])
@pytest.mark.parametrize("ending", ["end", "exception", "async", "sigterm"])
def test_no_metadata_keep_the_last_step_from_being_saved(
    tmp_path: Path, ending: str, keep: asyncckpt.KeepPolicy | None, metadata: Any
) -> None:
    """A metric that is known only where a save is due; or metadata that no due step has shown to be wrong."""
    x = torch.zeros(2)

    def loop(periodic: Any) -> None:
        for step in range(14):
            x.fill_(step)
            if ending == "sigterm" and step == 13:
                os.kill(os.getpid(), signal.SIGTERM)
            periodic.step(step, metadata={"loss": 1.0} if step == 10 else metadata)
        if ending == "exception":
            raise ValueError

    async def run(saver: asyncckpt.Saver) -> None:
        async with asyncckpt.PeriodicSaver(saver, every_steps=10) as periodic:
            loop(periodic)

    if ending == "sigterm":
        with (
            pytest.raises(SystemExit),
            asyncckpt.Checkpointer(tmp_path, every=10, keep=keep, x=x) as ckpt,
        ):
            loop(ckpt)
    else:
        with contextlib.suppress(ValueError), asyncckpt.Saver(path=tmp_path, tensors={"x": x}, keep=keep) as saver:
            if ending == "async":
                asyncio.run(run(saver))
            else:
                with asyncckpt.PeriodicSaver(saver, every_steps=10) as periodic:
                    loop(periodic)
    assert asyncckpt.list_steps(tmp_path) == [10, 13]
    assert asyncckpt.load(tmp_path)["x"].tolist() == [13, 13]
    found = asyncckpt.describe(tmp_path).metadata.get("loss")
    assert (
        found == metadata["loss"] if keep is None and metadata == {"loss": "low"} else found is None or found != found
    )


def test_a_step_that_was_saved_already_is_not_due(tmp_path: Path) -> None:
    """It was a ConflictError in the middle of training."""
    x = torch.zeros(2)
    with asyncckpt.Checkpointer(tmp_path, every=2, x=x) as ckpt:
        ckpt.save_now(0)
        for step in range(7):
            x.fill_(step)
            if step in (3, 4):
                ckpt.save_now(step)
            ckpt.step(step)
            ckpt._periodic.drain()
        with pytest.raises(asyncckpt.UsageError, match="each step must be greater"):
            ckpt.save_now(5)
        ckpt.step(7)
    assert asyncckpt.list_steps(tmp_path) == [0, 2, 3, 4, 6, 7]
    expected = pytest.raises(asyncckpt.UsageError, match=r"call restore\(\) before")
    with asyncckpt.Checkpointer(tmp_path, every=2, x=x) as ckpt, expected:
        ckpt.save_now(5)
    assert asyncckpt.list_steps(tmp_path) == [0, 2, 3, 4, 6, 7]


def test_save_now_does_not_take_the_place_of_a_later_step(tmp_path: Path) -> None:
    with (
        asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(2)}) as saver,
        asyncckpt.PeriodicSaver(saver, every_steps=100) as periodic,
    ):
        periodic.step(45)
        with pytest.raises(asyncckpt.UsageError, match=r"step must be at least 45"):
            periodic.save_now(3)
    assert asyncckpt.list_steps(tmp_path) == [45]


def test_a_step_that_somebody_has_removed_is_saved_again(tmp_path: Path) -> None:
    """By save_now, which says that it is there, and at the end of the loop."""
    x = torch.zeros(2)
    with asyncckpt.Saver(path=tmp_path, tensors={"x": x}) as saver:
        with asyncckpt.PeriodicSaver(saver, every_steps=1000) as periodic:
            for step in range(3):
                x.fill_(step)
                periodic.step(step)
                periodic.save_now()
            remove_after(tmp_path, 1)
            assert asyncckpt.list_steps(tmp_path) == [0, 1]
            assert periodic.save_now().step == 2
            assert asyncckpt.load(tmp_path, 2)["x"].tolist() == [2.0, 2.0]
            remove_after(tmp_path, 1)
        assert asyncckpt.load(tmp_path)["x"].tolist() == [2.0, 2.0]
