"""Trainings whose low-bit tensors FSDP2 spreads over ranks go on from a checkpoint, on as many ranks bit for bit.

All of them: make test-lowbit ARGS="-m 'slow or not slow'".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# By their name, whether a fresh job can load it; else it has to make its state before.
TRAININGS = {
    "AdamW8bit": True,
    "AdamW8bit in a TrainerState": True,
    "AdamW4bit": False,
    "AdamWFp8": True,
    "float8": True,
    "int8_weight_only_quantized_training": True,
    "int8_mixed_precision_training": True,
    "bitnet_training": True,
}


def run(ranks: int, name: str, how: str, folder: Path, rows: int = 192) -> tuple[dict[str, Any], str]:
    """Return what the first rank has printed, and all the rest."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [*launcher, "tests.lowbit.spread_training", name, how, str(folder), str(rows)]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), check=False, capture_output=True, text=True, timeout=200
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(found[-1]) if found else {}, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name.startswith("AdamW8bit") else pytest.mark.slow) for name in TRAININGS]
)
def test_a_spread_training_goes_on(tmp_path: Path, name: str) -> None:
    how = "resume" if TRAININGS[name] else "made"
    saved, told = run(2, name, "save", tmp_path)
    assert saved, told
    same, told = run(2, name, how, tmp_path)
    assert same == saved, told
    more, told = run(3, name, "made", tmp_path)
    assert more.get("image") == saved["image"], told


@pytest.mark.slow
def test_fewer_ranks(tmp_path: Path) -> None:
    saved, _ = run(3, "AdamW8bit", "save", tmp_path)
    fewer, told = run(2, "AdamW8bit", "resume", tmp_path)
    assert fewer.get("image") == saved["image"], told


def test_a_state_with_numbers_of_its_shard_has_to_be_made_before(tmp_path: Path) -> None:
    run(2, "AdamW4bit", "save", tmp_path)
    found, told = run(2, "AdamW4bit", "resume", tmp_path)
    assert not found
    assert "make its state first, by a step with gradients of zero" in told


def test_a_block_of_two_ranks_is_refused(tmp_path: Path) -> None:
    found, told = run(2, "AdamW8bit", "save", tmp_path, rows=63)
    assert not found
    assert "'optimizer.state.0.exp_avg' is cut within a block of its class" in told
