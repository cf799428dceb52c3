"""Each training goes on from a checkpoint of its own as if it had not been interrupted, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import asyncckpt
from tests.lowbit.trainings import STEPS_AFTER, STEPS_BEFORE, TRAININGS, made

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_goes_on(tmp_path: Path, name: str) -> None:
    training = made(name, 1)
    for number in range(STEPS_BEFORE):
        training.step(number)
    with asyncckpt.Saver(path=tmp_path, tensors=training.state()) as saver:
        future = saver.save_async(STEPS_BEFORE)
        losses = [training.step(number) for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)]
        future.result()
    command = [sys.executable, "-m", "tests.lowbit.trainings", name, str(tmp_path)]
    output = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), check=True, capture_output=True, text=True, timeout=200
    ).stdout
    found = json.loads(output.splitlines()[-1])
    assert found["losses"] == losses
    assert found["image"] == training.image()
