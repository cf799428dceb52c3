"""pip install of the sources, with a compiler that does not work."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDED = ("pip", "scikit_build_core", "cmake", "ninja")
PROGRAM = "import asyncckpt; asyncckpt.save('ckpt', {'step': 7}); print(asyncckpt.load('ckpt'), asyncckpt.__file__)"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"this environment lacks one of {', '.join(NEEDED)}"),
]


def install(target: Path, core: str) -> subprocess.CompletedProcess[str]:
    options = ("--no-build-isolation", "--no-deps", "--no-index", f"--config-settings=build-dir={target / 'build'}")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target / "site"), str(REPOSITORY)]
    environment = {**os.environ, "CXX": "/bin/false", "ASYNCCKPT_NATIVE": core}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_without_a_compiler_the_twin_is_installed(tmp_path: Path) -> None:
    done = install(tmp_path, core="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "site").rglob("*.so")) == []
    assert [path.name for path in (tmp_path / "site").rglob("py.typed")] == ["py.typed"]
    environment = {**os.environ, "ASYNCCKPT_NATIVE": "", "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", f"import sys; sys.meta_path[:] = sys.meta_path[-3:]; {PROGRAM}"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.stdout.startswith(f"{{'step': 7}} {tmp_path}"), ran.stdout + ran.stderr
    assert ran.stderr.count("asyncckpt runs its portable twin") == 1


def test_a_core_that_was_asked_for_is_not_left_out(tmp_path: Path) -> None:
    done = install(tmp_path, core="1")
    assert done.returncode != 0
    assert "ASYNCCKPT_NATIVE=1 asks for it" in done.stdout + done.stderr
