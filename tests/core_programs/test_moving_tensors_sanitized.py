"""Saves of tensors that move meanwhile, by a core that the address sanitizer watches, in a process of Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.moving_tensors import CASES

CSRC = Path(__file__).parents[2] / "csrc"
SECONDS_MAX = 900
SEED = os.environ.get("ASYNCCKPT_FAULT_SEED", "1")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS_MAX),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has its places elsewhere"),
]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the core, built with the sanitizer, and the sanitizer's library."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if shutil.which("cmake") is None or compiler is None:
        pytest.skip("no cmake or no C++ compiler")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    runtime = Path(found.stdout.strip())
    if not runtime.is_absolute() or not runtime.exists():
        pytest.skip(f"{compiler} has no shared library of the address sanitizer")
    folder = tmp_path_factory.mktemp("core")
    options = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1"]
    configure = ["cmake", "-S", str(CSRC), "-B", str(folder), "-DASYNCCKPT_SANITIZE=address", *options]
    build = ["cmake", "--build", str(folder), "--target", "asyncckpt", "--parallel", "2"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "libasyncckpt.so", runtime


def run(sanitized: tuple[Path, Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    core, runtime = sanitized
    # Torch leaks on purpose, and frees with another function than it allocates with.
    options = "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0"
    environment = {**os.environ, "LD_PRELOAD": str(runtime), "ASAN_OPTIONS": options, "ASYNCCKPT_NATIVE": "1"}
    program = str(Path(__file__).with_name("moving_tensors_sanitized.py"))
    command = [sys.executable, program, str(core), *arguments]
    environment["PYTHONPATH"] = str(CSRC.parent)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in CASES}))
def test_no_save_reads_memory_that_is_not_a_tensors(tmp_path: Path, sanitized: tuple[Path, Path], kind: str) -> None:
    done = run(sanitized, str(tmp_path), "60", SEED, kind)
    assert (done.returncode, done.stdout) == (0, ""), f"seed {SEED}: {done.stdout}{done.stderr[-8000:]}"


def test_a_read_behind_a_tensor_is_found(tmp_path: Path, sanitized: tuple[Path, Path]) -> None:
    done = run(sanitized, str(tmp_path), "planted")
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr  # By what name depends on what lies behind the tensor.
