"""Ranks in processes of their own, over gloo: they agree on steps and ids, and on what went wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncckpt.embcache import Saver
from tests.embcache.models import Net, image, owners, union

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = "tests.embcache.rank_process"
DEADLINE_S = 240


@pytest.mark.parametrize("world_size", [2])
def test_ranks_agree(tmp_path: Path, world_size: int) -> None:
    path = tmp_path / "sparse"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", SCRIPT, str(rank), str(world_size), str(tmp_path / "store"), str(path)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world_size, "\n".join(outputs)
    assert all(output.endswith("done\n") for output in outputs), outputs

    # What they saved is read here, by one rank and by three.
    net = Net()
    with Saver(rank=0) as saver:
        report = saver.load(net, path)
    assert (report.step, report.world_size) == (22, world_size)
    whole = image(net)
    parts = []
    for rank in range(3):
        part = Net(shard=(rank, 3))
        with Saver(rank=rank, world_size=3) as saver:
            saver.load(part, path)
        parts.append(image(part))
        assert owners(parts[-1]["user"], 3) <= {rank}
    assert union(parts) == whole
    assert owners(whole["user"], world_size) == set(range(world_size))
