"""A run that was resumed in another process is bit-equal to the one that was not interrupted."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import asyncckpt
from tests.trainer_state.run import ResumedRun

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS_COUNT = 33  # Two epochs and a half, of 13 batches each.

pytestmark = [pytest.mark.any_core, pytest.mark.usefixtures("one_thread")]


def test_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    run = ResumedRun()
    save_at = 18
    with asyncckpt.Saver(path=tmp_path, hashtables=run.tables, tensors=run.state) as saver:
        expected = run.train(until=STEPS_COUNT, saver=saver, save_at=save_at)
    resumed = subprocess.run(
        [sys.executable, "-m", "tests.trainer_state.run", str(tmp_path), str(STEPS_COUNT)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.split() == expected[save_at:]


@pytest.mark.parametrize("save_at", [1, 12, 13, 14, 26, 32])
def test_saves_anywhere_in_an_epoch(tmp_path: Path, save_at: int) -> None:
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    run = ResumedRun()
    with asyncckpt.Saver(path=tmp_path, hashtables=run.tables, tensors=run.state) as saver:
        expected = run.train(until=STEPS_COUNT, saver=saver, save_at=save_at)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    other = ResumedRun()
    other.train(until=5)  # Leaves traces everywhere, an optimizer's state and a position too.
    asyncckpt.Loader(tmp_path, hashtables=other.tables, tensors=other.state).load()
    assert other.train(until=STEPS_COUNT) == expected[save_at:]


def test_the_numbers_tell_runs_apart(tmp_path: Path) -> None:
    # Without the random numbers a resumed run is another one: the test above could fail.
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    run = ResumedRun()
    state = {name: run.state[name] for name in ("model", "adam")}
    with asyncckpt.Saver(path=tmp_path, hashtables=run.tables, tensors=state) as saver:
        expected = run.train(until=20, saver=saver, save_at=18)
    other = ResumedRun()
    report = asyncckpt.Loader(tmp_path, hashtables=other.tables, tensors={n: other.state[n] for n in state}).load()
    assert report.step == 18
    assert other.train(until=2) != expected[18:]
