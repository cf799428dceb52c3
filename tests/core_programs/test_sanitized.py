"""The test programs of the core and of the CUDA library (csrc/tests), built with sanitizers and run without Python.

The kernels of the CUDA library are compiled for the CPU there. They run on the thread that launches them, so they have
nothing to show to the thread sanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.shares import share_of

CSRC = Path(__file__).parents[2] / "csrc"
BUILD_SECONDS_MAX = 900


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS_MAX)
@pytest.mark.parametrize(
    ("sanitizers", "programs"),
    share_of([("address,undefined", ["core_test", "tests/cuda/cuda_test"]), ("thread", ["core_test"])], "sanitizers"),
)
def test_core_programs_are_clean(tmp_path: Path, sanitizers: str, programs: list[str]) -> None:
    if shutil.which("cmake") is None or shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no cmake or no C++ compiler")
    options = ["TESTS=ON", "WERROR=ON", f"SANITIZE={sanitizers}"]
    configure = ["cmake", "-S", str(CSRC), "-B", str(tmp_path), "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    configure += ["-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1"]  # Sanitizers see as much, and it builds in half the time.
    configure += [f"-DASYNCCKPT_{option}" for option in options]
    targets = [Path(program).name for program in programs]
    build = ["cmake", "--build", str(tmp_path), "--target", *targets, "--parallel", "2"]
    # One test forks; a child that starts threads is what it tests.
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
    for command in (configure, build, *([str(tmp_path / program)] for program in programs)):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
