"""A process that uploads is killed at any request: the store shows the old checkpoints, or those and the new one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.checkpoints import list_steps
from asyncckpt.errors import CorruptError, NotFoundError
from tests.cloud.fault_proxy import FaultProxy, Mishap, Request
from tests.cloud.forked import Forks, Work, save_steps, state

SEED = 19
KILLS_COUNT = 8
LANES_COUNT = 25
STEPS = (0, 1, 2)  # Of which the first is uploaded before.
REQUESTS_MAX = 24  # Of two steps; a kill at a later one finds the process gone.


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    command = [sys.executable, "-m", "tests.cloud.forked"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Forks(process)
        finally:
            process.kill()


class Killer:
    """Kills a process at its request of a number: before the server sees it, or when the server has done it."""

    def __init__(self, *, number: int, is_done: bool) -> None:
        self.pid = 0
        self.knows_pid = threading.Event()
        self._left = number
        self._is_done = is_done

    def __call__(self, request: Request) -> Mishap | None:
        self._left -= 1
        if self._left > 0:
            return None
        if self._left == 0 and self._is_done:
            return Mishap(silent_after=True, when_done=self.kill)
        self.kill()
        return Mishap(silent=True)

    def kill(self) -> None:
        assert self.knows_pid.wait(60)
        os.kill(self.pid, signal.SIGKILL)


def run_until_killed(
    forks: Forks,
    proxy: FaultProxy,
    path: Path | str,
    url: str,
    killer: Killer,
    *,
    last: int = STEPS[-1],
    plant: bool = False,
    work: Work = "save",
) -> tuple[list[int], int]:
    """Return the steps that the child has said, and how it ended."""
    proxy.fault = killer
    said, status = [], 0
    for word, number in forks.run(path, url, first=1, last=last, plant=plant, work=work):
        if word == "pid":
            killer.pid = number
            killer.knows_pid.set()
        elif word == "step":
            said.append(number)
        else:
            status = number
    proxy.fault = lambda request: None
    return said, status


def steps_there(url: str) -> list[int]:
    """Return the steps of a store, each of which is whole and holds what was saved."""
    try:
        steps = list_steps(url)
    except NotFoundError:
        return []
    for step in steps:
        tensors = state(step)
        asyncckpt.Loader(url, tensors=tensors, step=step).load()
        assert all(torch.equal(tensor, state(step)[name]) for name, tensor in tensors.items())
    return steps


# With the slow ones, 200 kills; a test has five minutes.
@pytest.mark.parametrize("lane", [0, *(pytest.param(lane, marks=pytest.mark.slow) for lane in range(1, LANES_COUNT))])
def test_a_kill_leaves_old_or_new(forks: Forks, proxy: FaultProxy, url: str, tmp_path: Path, lane: int) -> None:
    rng = random.Random(SEED + lane)
    killed_count = 0
    for run in range(KILLS_COUNT):
        path, place = tmp_path / f"run{run}", f"{url}/run{run}"
        save_steps(str(path), place, 0, 0)
        killer = Killer(number=rng.randint(1, REQUESTS_MAX), is_done=rng.random() < 0.5)
        said, status = run_until_killed(forks, proxy, path, place, killer)
        killed_count += status == signal.SIGKILL
        assert status in (0, signal.SIGKILL)

        found = steps_there(place)
        assert found in ([0], [0, 1], [0, 1, 2])
        assert {0, *said} <= {*found}

        local = list_steps(path)
        with asyncckpt.Saver(path=path, tensors=state(0), upload=place) as saver:
            saver.wait_idle()
        assert steps_there(place) == [*range(local[-1] + 1)]
        assert not list((path / "manifests").glob(".u-*"))
    assert killed_count > KILLS_COUNT // 3


def test_a_manifest_that_comes_before_its_files_is_found(
    forks: Forks, proxy: FaultProxy, url: str, tmp_path: Path
) -> None:
    """The control."""
    save_steps(str(tmp_path / "ckpt"), url, 0, 0)
    killer = Killer(number=4, is_done=False)  # Behind two probes and the manifest.
    assert run_until_killed(forks, proxy, tmp_path / "ckpt", url, killer, plant=True) == ([], signal.SIGKILL)
    with pytest.raises(CorruptError, match="missing"):
        steps_there(url)
