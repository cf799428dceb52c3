"""Processes that end, or are forked, beside a store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import asyncckpt
from tests.cloud import seaweed
from tests.end_to_end.test_endings import NO_THREADS_AT_THE_EXIT

S_MAX = 60.0

LOOP = """
ckpt = asyncckpt.Checkpointer(sys.argv[1], every=1000, x=x, options=eval(sys.argv[2]))
for step in range(5):
    x += 1
    ckpt.step(step)
"""


@pytest.mark.parametrize("is_uploaded", [False, True])
def test_the_last_step_gets_into_a_store_when_no_thread_can_be_started_any_more(
    owner: seaweed.Server, url: str, tmp_path: Path, is_uploaded: bool
) -> None:
    """Of a tensor of several chunks, which are written one by one."""
    path, options = (str(tmp_path / "run"), {"upload": url}) if is_uploaded else (url, {})
    program = f"{NO_THREADS_AT_THE_EXIT}x = torch.zeros(40 << 20)\n{LOOP}"
    command = [sys.executable, "-c", program, path, repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=S_MAX)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool((asyncckpt.load(url)["x"] == 5).all())
