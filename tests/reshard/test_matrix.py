"""1 -> 2 -> 4 -> 3 -> 1 ranks, in processes of their own: every bit of the state comes through every hop.

In the same processes, two ranks train and resume (rank_process.resume).
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

import asyncckpt
from tests.reshard.rank_process import HOPS, PROCESSES

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 120


def test_everything_comes_through_every_number_of_ranks(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"}
    outputs = [tmp_path / f"output{rank}" for rank in range(PROCESSES)]
    with ExitStack() as stack:
        ranks = []
        for rank, output in enumerate(outputs):
            arguments = [str(rank), str(tmp_path / "store"), str(tmp_path)]
            command = [sys.executable, "-m", "tests.reshard.rank_process", *arguments]
            file = stack.enter_context(output.open("w"))
            ranks.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=file, stderr=file))
            stack.callback(ranks[-1].kill)
        # The first one that fails ends the others, which may wait for it.
        waits = stack.enter_context(ThreadPoolExecutor(PROCESSES))
        for done in as_completed([waits.submit(rank.wait, DEADLINE_S) for rank in ranks]):
            if done.exception() or done.result() != 0:
                for rank in ranks:
                    rank.kill()
    texts = [output.read_text() for output in outputs]
    assert [rank.returncode for rank in ranks] == [0] * PROCESSES, "\n".join(texts)
    assert all(text.endswith("done\n") for text in texts), texts
    for hop in range(len(HOPS)):
        assert asyncckpt.list_steps(tmp_path / str(hop)) == [10, 11]
        assert asyncckpt.verify(tmp_path / str(hop)).steps == (11, 10)
