"""On macOS and Windows the library runs by its twin: simulated, for the calls that are missing there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SMOKE = ("end_to_end/test_save_once.py", "end_to_end/test_round_trip.py", "experimental/what_differs.py")
MORE = (
    "end_to_end/test_load_as_dict.py",
    "end_to_end/test_compaction.py",
    "end_to_end/test_filters.py",
    "end_to_end/test_follow.py",
    "end_to_end/test_future.py",
    "end_to_end/test_loading.py",
    "end_to_end/test_multi_level.py",
    "end_to_end/test_on_busy.py",
    "end_to_end/test_periodic.py",
    "end_to_end/test_retention_behind.py",
    "end_to_end/test_two_savers.py",
    "trainer_state",
    "unit/cli",
)


def run(system: str, *names: str) -> None:
    environment = {**os.environ, "ASYNCCKPT_NATIVE": "0"}
    command = [sys.executable, "-m", "tests.experimental.simulated", system, *(f"tests/{name}" for name in names)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("system", ["macos", "windows"])
def test_saves_and_loads(system: str) -> None:
    run(system, *SMOKE)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["macos", "windows"])
def test_much_of_the_suite(system: str) -> None:
    run(system, *MORE)
