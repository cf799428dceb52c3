"""compute-sanitizer finds nothing in calls of all kernels, with the tools that see anything in them.

racecheck looks at shared memory and synccheck at barriers, of which the kernels have none (csrc/cuda/device.hpp).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "csrc" / "cuda").iterdir()))
TOOLS = ["memcheck", "initcheck"]
TOOLS += [tool for tool, word in (("racecheck", "__shared__"), ("synccheck", "__sync")) if word in SOURCES]
SECONDS_MAX = 400
FOUND = 9  # The exit status by which the program tells that it found something.
REFUSALS = ("Device not supported", "Unable to find injection", "Insufficient permissions")


@pytest.mark.cuda_only
@pytest.mark.timeout(SECONDS_MAX + 30)
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_found(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
    # Without torch's cache every tensor is an allocation of its own, so that a kernel which leaves one is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.gpu.kernel_calls"],
        cwd=ROOT,
        env=environment,
        timeout=SECONDS_MAX,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    refusals = [text for text in REFUSALS if text in done.stdout]
    if refusals:
        pytest.skip(f"compute-sanitizer does not run here: {refusals[0]}")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "calls made" in done.stdout
