"""Training jobs as processes of their own: ended in the middle by a signal, resumed, and compared by their losses.

A job prints `loss STEP VALUE` for every step it trains, and `log STEP VALUE` for what its trainer logs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import asyncckpt

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS_MAX = 900  # Machines that many share are slow.
Losses = dict[tuple[str, int], set[str]]


def run_job(
    module: str,
    *arguments: object,
    ranks: int = 1,
    expected: Sequence[int] = (0,),
    environment: Mapping[str, str] | None = None,
) -> tuple[Losses, str]:
    """Run a job; return what it says about its steps, and all that it prints."""
    python = [sys.executable, "-m"]
    if ranks > 1:
        python += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    done = subprocess.run(
        [*python, f"tests.integrations.{module}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    assert done.returncode in expected, f"{done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    losses: Losses = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) == 3 and words[0] in ("loss", "log"):
            losses.setdefault((words[0], int(words[1])), set()).add(words[2])
    return losses, done.stdout


def tell(kind: str, step: int, value: float) -> None:
    """Say something about a step, in one write: lines of ranks do not mix."""
    sys.stdout.write(f"{kind} {step} {value!r}\n")
    sys.stdout.flush()


def wait_for_step(directory: Path) -> None:
    """Wait until a directory has a durable step, which another process may write."""
    until = time.monotonic() + SECONDS_MAX
    while not asyncckpt.list_steps(directory):
        assert time.monotonic() < until, f"nothing became durable in {directory}"
        time.sleep(0.05)


def differences(whole: Losses, *parts: Losses) -> dict[tuple[str, int], set[str]]:
    """Where parts of a run say something else than the whole run, or all together say less."""
    wrong = {key: values for part in parts for key, values in part.items() if values != whole.get(key)}
    missing = whole.keys() - {key for part in parts for key in part}
    return wrong | {key: set() for key in missing}
