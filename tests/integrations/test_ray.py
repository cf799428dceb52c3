"""Ray Train with ours: a run that loses a worker is restarted by Ray, and ends like one that was not disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray.train

import asyncckpt
from asyncckpt.integrations.ray import saved_step
from tests.integrations.jobs import differences, run_job

QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}


def test_a_run_that_loses_a_worker_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    whole, printed = run_job("ray_job", tmp_path / "whole", environment=QUIET)
    assert "ended at 19 from 0 tensors 2" in printed
    parts, printed = run_job("ray_job", tmp_path / "parts", 14, environment=QUIET)
    assert "ended at 19 from" in printed
    assert "from 0" not in printed, "Ray has restarted it, and it went on where it was"
    assert "directory True steps [12, 16, 19]" in printed
    assert differences(whole, parts) == {}


def test_a_checkpoint_of_others_is_refused(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.NotFoundError, match="names no step"):
        saved_step(ray.train.Checkpoint.from_directory(tmp_path))
