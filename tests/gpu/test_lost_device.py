"""A device that is lost fails the save that needs it, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import asyncckpt

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 200


@pytest.mark.cuda_only
@pytest.mark.timeout(SECONDS_MAX + 30)
def test_a_save_of_a_lost_device_fails_and_the_host_is_saved(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.lost_device", str(tmp_path)],
        cwd=ROOT,
        timeout=SECONDS_MAX,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout + done.stderr[-8000:]
    assert done.returncode == 0, done.stderr[-8000:]
    assert asyncckpt.list_steps(tmp_path / "all") == [1]
    assert asyncckpt.list_steps(tmp_path / "host") == [1, 2]
