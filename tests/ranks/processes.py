"""Ranks in processes of their own, each a module of the tests, forked from a server that has torch imported."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.ranks.forked import REPOSITORY, fork_server


@dataclass(frozen=True)
class RankProcess:
    """A process, and the file that its output goes to."""

    process: BaseProcess
    output: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


@dataclass(frozen=True)
class Ended:
    """How a rank ended: exit status (negative: the signal that killed it, None: it hung), and what it printed."""

    status: int | None
    output: str


def start_rank(module: str, arguments: Sequence[object], folder: Path, **environment: str) -> RankProcess:
    """Run a module of the tests as a program whose output goes to a file `output-<number>` in `folder`."""
    output = folder / f"output-{len(list(folder.glob('output-*')))}"
    output.touch()
    ours = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | environment
    words = [module, *map(str, arguments)]
    process = fork_server().Process(target=_run, args=(words, ours, output), daemon=False)
    process.start()
    return RankProcess(process, output)


def _run(words: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    """Be the rank, in a child of the server."""
    import torch

    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    faulthandler.enable()
    os.chdir(REPOSITORY)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = list(words)
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # Which a child of the server leaves out.


def await_ranks(ranks: Sequence[RankProcess], seconds: float) -> list[Ended]:
    """Wait for all; those that have not ended by then are asked for their stacks and killed."""
    until = time.monotonic() + seconds
    hung = set()
    try:
        for rank in ranks:
            rank.process.join(max(0.0, until - time.monotonic()))
            if rank.process.exitcode is None:
                hung.add(rank.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGABRT)  # faulthandler prints where it is.
                rank.process.join(5)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
    return [
        Ended(
            status=None if rank.pid in hung else rank.process.exitcode,
            output=rank.output.read_text(errors="replace"),
        )
        for rank in ranks
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def outputs(ended: Sequence[Ended]) -> str:
    return "\n".join(rank.output for rank in ended)
