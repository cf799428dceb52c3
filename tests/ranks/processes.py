"""Ranks in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# torch asks for the names of both ends of every connection; a name server that loses a question costs this much.
NAME_SERVER_PATIENCE = "timeout:1 attempts:1"


@dataclass(frozen=True)
class Ended:
    """How a rank ended: exit status (negative: the signal that killed it, None: it hung), and what it printed."""

    status: int | None
    output: str


def start_rank(module: str, arguments: Sequence[object], folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Run a module of the tests as a process whose output goes to a file `output-<number>` in `folder`."""
    number = len(list(folder.glob("output-*")))
    with (folder / f"output-{number}").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "PYTHONFAULTHANDLER": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "FATAL",
                "RES_OPTIONS": NAME_SERVER_PATIENCE,
                **environment,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    process.output = folder / f"output-{number}"  # type: ignore[attr-defined]
    return process


def await_ranks(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[Ended]:
    """Wait for all; those that have not ended by then are asked for their stacks and killed."""
    until = time.monotonic() + seconds
    hung = set()
    try:
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung.add(process.pid)
                process.send_signal(signal.SIGABRT)  # faulthandler prints where it is.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        Ended(
            status=None if process.pid in hung else process.returncode,
            output=process.output.read_text(errors="replace"),  # type: ignore[attr-defined]
        )
        for process in processes
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
