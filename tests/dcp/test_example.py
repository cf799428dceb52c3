"""The example runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.any_core, pytest.mark.slow]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dcp_fsdp.py"
SECONDS_MAX = 120


@pytest.mark.timeout(SECONDS_MAX)
def test_the_example_saves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(EXAMPLE)]
    command += [str(tmp_path / "run"), "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checkpoints [10, 20]" in done.stdout
