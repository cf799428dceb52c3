"""Training runs that end in one of many ways, each a process that ends as a script does: `python -m` this module.

It imports torch once. For each Ending in JSON on its standard input it forks a child, which goes on as the script, and
answers with the exit status (negative: a signal) when that has ended.

The state follows from the number of steps: in every step one optimizer adds 1 to `a`, and then another one to `b`.
"""

from __future__ import annotations

import code
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import asyncckpt

PLACES = ("before", "between", "behind", "after")
WAIT_S_MAX = 600.0
UNSYNCED: dict[str, Any] = {"durability": "none"}  # No run loses power.


@dataclass(frozen=True)
class Ending:
    """How a run is written and how it ends.

    use: "with" or "bare", a Checkpointer; "cells", one in the cells of a notebook; "periodic", a PeriodicSaver;
    "lossy", one that nobody asks to save the last step. how: what happens in `step`, at `place`: before both
    optimizers, between or behind them, or after the step was noted. late_s: or the signal of this name comes from
    outside, so long after the first step. times: how often the signal comes.
    """

    folder: str
    use: str = "with"
    how: str = "end"
    step: int = 5
    place: str = "after"
    every: int = 1000
    steps: int = 10
    late_s: float | None = None
    times: int = 1

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @property
    def ckpt(self) -> Path:
        return Path(self.folder) / "ckpt"

    @property
    def log(self) -> Path:
        """The steps that have ended, one to a line."""
        return Path(self.folder) / "log"


class EndingRun:
    """The state, and a step of training."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        self.a, self.b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
        self.table = asyncckpt.HashTable("t", 2)
        self.first, self.second = (torch.optim.SGD([tensor], lr=1.0) for tensor in (self.a, self.b))
        self._log = os.open(ending.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @property
    def state(self) -> dict[str, Any]:
        return {"a": self.a, "b": self.b, "first": self.first, "second": self.second, "t": self.table}

    def train(self, step: int) -> None:
        self.happens(step, "before")
        self.a.grad, self.b.grad = -torch.ones(3), -torch.ones(3)
        self.first.step()
        self.happens(step, "between")
        self.second.step()
        self.table.insert(torch.tensor([step]), torch.full((1, 2), float(step)))
        self.happens(step, "behind")
        if self.ending.late_s is not None:
            time.sleep(0.002)
        os.write(self._log, b"%d\n" % step)

    def happens(self, step: int, place: str) -> None:
        ending = self.ending
        if ending.late_s is not None or (step, place) != (ending.step, ending.place):
            return
        if ending.how == "raise":
            raise ValueError("the loss is not finite")
        if ending.how == "exit":
            sys.exit(7)
        if ending.how.startswith("SIG"):
            for _ in range(ending.times):
                os.kill(os.getpid(), getattr(signal, ending.how))

    def loop(self, ckpt: Any, first: int) -> None:
        for step in range(first, self.ending.steps):
            self.train(step)
            ckpt.step(step)
            if self.ending.how == "break" and step == self.ending.step:
                break
            self.happens(step, "after")


def with_checkpointer(run: EndingRun) -> None:
    ending = run.ending
    checkpointer = asyncckpt.Checkpointer(ending.ckpt, every=ending.every, options=UNSYNCED, **run.state)
    with checkpointer if ending.use == "with" else nullcontext():
        run.loop(checkpointer, checkpointer.restore())


def with_periodic(run: EndingRun) -> None:
    ending = run.ending
    state = run.state
    with asyncckpt.Saver(path=ending.ckpt, hashtables={"t": state.pop("t")}, tensors=state, **UNSYNCED) as saver:
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=ending.every)
        with periodic if ending.use == "periodic" else nullcontext():
            run.loop(periodic, 0)


def in_cells(run: EndingRun) -> None:
    """What a cell raises is printed, and the next one runs."""
    notebook = code.InteractiveInterpreter({"run": run, "asyncckpt": asyncckpt, "unsynced": UNSYNCED})
    for cell in (
        "ckpt = asyncckpt.Checkpointer(run.ending.ckpt, every=run.ending.every, options=unsynced, **run.state)",
        "run.loop(ckpt, ckpt.restore())",
        "print('a further cell')",
    ):
        notebook.runcode(compile(cell, "cell", "exec"))


USES: dict[str, Callable[[EndingRun], None]] = {
    "with": with_checkpointer,
    "bare": with_checkpointer,
    "cells": in_cells,
    "periodic": with_periodic,
    "lossy": with_periodic,
}


def send_late(ending: Ending, child: int) -> None:
    """Send a signal some time after the first step has ended, unless the run has ended before."""
    assert ending.late_s is not None
    until = time.monotonic() + WAIT_S_MAX
    while not ending.log.exists() or not ending.log.stat().st_size:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        assert time.monotonic() < until
        time.sleep(0.002)
    time.sleep(ending.late_s)
    os.kill(child, getattr(signal, ending.how))


def next_child() -> Ending | None:
    """Return, in a child, what it is to do; None in the server, at the end."""
    for line in sys.stdin:
        ending = Ending(**json.loads(line))
        child = os.fork()
        if child == 0:
            output = os.open(Path(ending.folder) / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            return ending
        if ending.late_s is not None:
            send_late(ending, child)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell that starts jobs in the background ignores it.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0).step()  # The first step imports much: once for all.
    wanted = next_child()
    if wanted is not None:
        USES[wanted.use](EndingRun(wanted))
