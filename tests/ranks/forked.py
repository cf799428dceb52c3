"""Ranks as processes that need not import torch: a server that has it forks them.

The server (multiprocessing's) has one thread and computes nothing, so a fork of it is sound.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
# torch asks for the names of both ends of every connection; a name server that loses a question costs this much.
NAME_SERVER_PATIENCE = "timeout:1 attempts:1"
RUN_S_MAX = 90.0
PRELOADED = [
    f"tests.ranks.{name}"
    for name in ("schedule_rank", "job_ranks", "table_ranks", "random_jobs", "partial_tables", "told_ranks")
]


def fork_server() -> Any:
    """The context whose processes are forked from a server that has the tests' modules imported."""
    context = multiprocessing.get_context("forkserver")
    # Read by the server when it starts, which it does at the first process.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    os.environ["RES_OPTIONS"] = NAME_SERVER_PATIENCE
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    context.set_forkserver_preload(PRELOADED)
    return context


def start(function: Callable[..., None], arguments: Sequence[Any], output: Path) -> BaseProcess:
    process = fork_server().Process(target=_run, args=(function, tuple(arguments), output), daemon=True)
    process.start()
    return process  # type: ignore[no-any-return]


def _run(function: Callable[..., None], arguments: tuple[Any, ...], output: Path) -> None:
    stream = output.open("a", buffering=1)
    sys.stdout = sys.stderr = stream
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream, all_threads=True)
    function(*arguments)


def await_end(processes: Sequence[BaseProcess], seconds: float) -> list[int | None]:
    """Exit codes (negative: a signal); None for those that have not ended by then, which print their stacks and die."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process, code in zip(processes, codes, strict=True):
        if code is None:
            end(process)
    return codes


def end(process: BaseProcess) -> None:
    """Kill a process that hangs, or is stopped, after it has printed where it is."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)
        os.kill(process.pid, signal.SIGUSR1)
        process.join(1.0)
    process.kill()
    process.join()


def await_stopped(process: BaseProcess, seconds: float) -> bool:
    """Whether a process has stopped itself by then."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.exitcode is None:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/stat").read_text()
            if text.rsplit(")", 1)[1].split()[0] == "T":
                return True
        time.sleep(0.02)
    return False


def run(job: Callable[..., None], ranks_count: int, folder: Path, *arguments: Any) -> list[int | None]:
    """Run all ranks of a job, a function of (rank, folder, ...); return their exit codes.

    AssertionError with what they printed when one raised or hung.
    """
    name = getattr(job, "func", job).__name__  # Of a partial, its function.
    outputs = [folder / f"output-{name}-{rank}" for rank in range(ranks_count)]
    ranks = [start(job, (rank, folder, *arguments), output) for rank, output in enumerate(outputs)]
    try:
        codes = await_end(ranks, RUN_S_MAX)
    finally:
        for process in ranks:
            end(process)
    said = "\n".join(f"{output.name}: {output.read_text()[-3000:]}" for output in outputs if output.exists())
    assert 1 not in codes, said
    assert None not in codes, said
    return codes
