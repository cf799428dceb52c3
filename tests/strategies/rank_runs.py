"""Start the ranks of a test in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 240


def run_ranks(module: str, ranks_count: int, store: Path, folder: Path) -> None:
    """Run `python -m tests.strategies.<module> <rank> <ranks_count> <store> <folder>` for every rank, to its end."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(REPOSITORY)]),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    arguments = [str(ranks_count), str(store), str(folder)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.strategies.{module}", str(rank), *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks_count)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * ranks_count, "\n".join(outputs)
    assert all(output.endswith("done\n") for output in outputs), outputs
