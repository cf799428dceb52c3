"""Jobs under torchrun, with a default store that is torchrun's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import asyncckpt
from tests.ranks.forked import NAME_SERVER_PATIENCE, REPOSITORY
from tests.ranks.processes import free_port
from tests.ranks.training import differences, image, load_whole, run_alone

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(200)]

RUN_S_MAX = 120.0


def torchrun(ranks_count: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks_count}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m", "tests.ranks.trainer"]
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "RES_OPTIONS": NAME_SERVER_PATIENCE}
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )


def check_newest(path: Path, step: int, ranks_count: int) -> None:
    found_step, found = load_whole(path)
    assert found_step == step
    assert differences(found, image(*run_alone(step, ranks_count))) == []


def test_a_script_that_ends_right_after_its_last_save(tmp_path: Path) -> None:
    """All saves are committed, by all ranks, and nothing is said about it."""
    path = tmp_path / "checkpoints"
    ended = torchrun(2, path, 4, "")
    assert ended.returncode == 0, ended.stderr[-4000:]
    for complaint in ("Traceback", "Error", "TCPStore"):
        assert complaint not in ended.stderr, ended.stderr[-4000:]
    assert asyncckpt.list_steps(path) == [1, 2, 3, 4]
    check_newest(path, 4, 2)


def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    """torchrun ends the other ranks, in the middle of their save; the save before that is whole."""
    path = tmp_path / "checkpoints"
    ended = torchrun(4, path, 2, "write")
    assert ended.returncode != 0
    assert "exitcode" in ended.stderr
    assert "-9" in ended.stderr
    assert asyncckpt.list_steps(path) == [1]
    check_newest(path, 1, 4)
