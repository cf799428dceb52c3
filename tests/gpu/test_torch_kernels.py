"""The twin of the CUDA library: torch's own operations pass the same tests; and what ASYNCCKPT_CUDA says is done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.device import DEVICE

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 280
SAME = ("test_stream_order.py", "test_states.py", "test_host.py", "test_tables.py")
SAVE = f"""
import sys, torch, asyncckpt
with asyncckpt.Saver(path=sys.argv[1], tensors={{"x": torch.ones(1000, device={DEVICE!r})}}) as saver:
    saver.save_async(1).result(60)
from asyncckpt.devices.current_runtime import runtime
print(runtime().kernels(0).name)
"""


@pytest.mark.timeout(SECONDS_MAX + 20)
def test_the_suite_passes_with_torch_operations() -> None:
    files = [str(Path("tests", "gpu", name)) for name in SAME]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not ten_thousand", *files],
        cwd=ROOT,
        env={**os.environ, "ASYNCCKPT_CUDA": "0"},
        timeout=SECONDS_MAX,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


def run_save(path: Path, wish: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SAVE, str(path)],
        cwd=ROOT,
        env={**os.environ, "ASYNCCKPT_CUDA": wish},
        timeout=SECONDS_MAX,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.cuda_only
@pytest.mark.parametrize(("wish", "name"), [("0", "torch"), ("1", "cuda"), ("", "cuda")])
def test_the_environment_chooses(tmp_path: Path, wish: str, name: str) -> None:
    done = run_save(tmp_path, wish)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [name]


@pytest.mark.cuda_only
def test_a_wrong_wish_is_an_error(tmp_path: Path) -> None:
    done = run_save(tmp_path, "yes")
    assert done.returncode != 0
    assert "UsageError" in done.stderr
    assert "ASYNCCKPT_CUDA" in done.stderr
