"""A directory, the jobs on it, and what is to be seen of them afterwards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncckpt
from tests.night import job
from tests.program import invoke
from tests.ranks.forked import REPOSITORY
from tests.worlds.directories import flip_byte

STEPS = 9
OPENED = "INFO {run} is open and locked: "
COMMITTED = "INFO step {} of {{run}} is committed: "
RESTORED = "INFO step {} of {{run}} is restored: "
PASSED_BY = "WARNING step 6 of {run} is damaged and passed by, step 4 is tried: "
WAIT_S = 100.0


@dataclass
class EndedJob:
    """How a job has ended: its exit code, log, counts of saves ("save committed": 3), and what its tensor held."""

    code: int
    log: list[str]
    counts: dict[str, int]
    done: list[float]


class Night:
    """A directory, and the jobs on it."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.environment: dict[str, str] = {}

    def start(self, *, under: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
        """under: the start of a command that runs the job in other circumstances."""
        steps = options.pop("steps", STEPS)
        command = [*under, sys.executable, "-m", job.__name__, str(self.run), str(steps), json.dumps(options)]
        environment = {**os.environ, **self.environment}
        return subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY, env=environment
        )

    @staticmethod
    def ended(process: subprocess.Popen[str]) -> EndedJob:
        try:
            out, log = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()  # One that hangs is not left behind.
        metrics = re.findall(r"^METRICS (.*)$", out, re.M)  # A forked child prints its own before.
        done = re.findall(r"^DONE (.*)$", out, re.M)
        counts = json.loads(metrics[-1]) if metrics else {}
        return EndedJob(process.returncode, log.splitlines(), counts, json.loads(done[-1]) if done else [])

    def job(self, **options: Any) -> EndedJob:
        return self.ended(self.start(**options))

    def wait_for(self, waits: str = "wait") -> None:
        """Wait for a job that waits."""
        until = time.monotonic() + WAIT_S
        while not (self.run.parent / waits).exists():
            assert time.monotonic() < until
            time.sleep(0.01)

    def go_on(self, waits: str = "wait") -> None:
        """Let a job go on that waits."""
        (self.run.parent / f"{waits} is over").touch()

    def says(self, log: list[str], *lines: str) -> None:
        """Demand lines that begin so, in this order, among those of a log."""
        left = iter(log)
        for line in lines:
            begin = line.format(run=self.run)
            assert any(found.startswith(begin) or begin in found for found in left), "\n".join([begin, *log])

    def says_of_error(self, ended: EndedJob, error: str, *words: str) -> None:
        """Demand that a job has ended by an error of ours, in one line that has all these words."""
        assert ended.code == 1, ended
        [*_, line] = [line for line in ended.log if re.match(rf"(\w+\.)*{error}: ", line)] or [""]
        missing = [word for word in words if word.format(run=self.run) not in line]
        assert not missing, "\n".join([f"{error} without {missing}", *ended.log])

    def counts(self, ended: EndedJob, **counts: int) -> None:
        """Compare the counts of saves, where there is prometheus_client: committed=3."""
        if ended.counts:
            found = {name: ended.counts[f"save {name}"] for name in counts}
            assert found == counts, ended

    def check(self, steps: list[int], *, doctor: int = 0, damaged: bool = False) -> None:
        """Compare what `ls` lists and how `doctor` and `verify` end."""
        listed = json.loads(invoke("ls", self.run, "--json").stdout)["checkpoints"]
        assert [found["step"] for found in listed] == steps
        assert invoke("doctor", self.run, "--mib", 0).exit_code == doctor
        assert invoke("verify", self.run, "--all").exit_code == (int(damaged) if steps else 3)

    def is_queued_again(self, **options: Any) -> EndedJob:
        """Run the job once more: it ends as one that nothing has happened to."""
        again = self.job(**options)
        assert (again.code, again.done) == (0, [float(STEPS)]), again
        return again

    def file_of(self, step: int) -> Path:
        """The data of a step."""
        (name,) = asyncckpt.describe(self.run, step).files
        return self.run / name

    def damage(self, step: int) -> None:
        flip_byte(self.file_of(step))
