"""The last step is saved, whatever ends a run: the end of the loop, exceptions, sys.exit, SIGTERM, Ctrl-C, notebooks.

What cannot be saved: the end by SIGKILL, which leaves what had committed before.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.end_to_end.ending_runs import PLACES, Ending
from tests.shares import share_of

REPOSITORY = Path(__file__).resolve().parents[2]
HALF_WAY = "asyncckpt.half_way"
STATUS = {"end": 0, "break": 0, "raise": 1, "exit": 7, "SIGINT": -2, "SIGTERM": 143, "SIGKILL": -9}
RANDOM_ENDINGS = 200


class RunsServer:
    """The process that forks the runs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.ending_runs"],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, ending: Ending) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        Path(ending.folder).mkdir(exist_ok=True)
        self._process.stdin.write(ending.encode() + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def server() -> Iterator[RunsServer]:
    made = RunsServer()
    yield made
    made.close()


def check(ending: Ending, status: int) -> None:
    """The newest checkpoint is that of the last step that had ended, and holds what was there at the end."""
    said = (Path(ending.folder) / "output").read_text()
    is_known = ending.use == "cells" and ending.how in ("raise", "SIGINT")  # The notebook goes on.
    assert status == (0 if is_known else STATUS[ending.how]), said
    done = [int(line) for line in ending.log.read_text().split()]
    steps = asyncckpt.list_steps(ending.ckpt)
    step = steps[-1]
    # A signal from outside may come between the end of a step and the call that notes it.
    assert step in ({done[-1], done[-1] - 1} if ending.late_s is not None else {done[-1]}), (steps, done, said)
    is_half_way = asyncckpt.describe(ending.ckpt, step).metadata.get(HALF_WAY, False)
    was_due = step > 0 and step % ending.every == 0  # Then it is whole, unless an earlier save was in its way.
    if ending.late_s is None and ending.how in ("raise", "exit", "SIGINT") and (is_half_way or not was_due):
        assert is_half_way == (ending.place in ("between", "behind")), said
    state = asyncckpt.load(ending.ckpt, tables=True)
    a, b, ids = float(state["a"][0]), float(state["b"][0]), state["t"]["id"].tolist()
    if is_half_way:
        assert step + 1 <= b <= a <= step + 2
    else:
        assert (a, b, sorted(ids)) == (step + 1, step + 1, list(range(step + 1)))
    assert "Traceback" not in said or ending.how in ("raise", "SIGINT"), said


SAMPLES = [
    {"use": "with", "how": "end", "every": 3},
    {"use": "with", "how": "raise", "place": "between", "every": 2},
    {"use": "with", "how": "SIGTERM", "place": "between"},
    {"use": "with", "how": "SIGTERM", "place": "after", "step": 9},
    {"use": "with", "how": "SIGTERM", "place": "between", "times": 2},
    {"use": "with", "how": "SIGINT", "place": "behind", "every": 1},
    {"use": "bare", "how": "break", "every": 1},
    {"use": "bare", "how": "raise", "place": "before"},
    {"use": "bare", "how": "exit", "place": "behind"},
    # The first save of all is made while the interpreter ends, which ends as without it.
    {"use": "bare", "how": "SIGINT", "place": "between", "step": 1, "every": 1000},
    {"use": "bare", "how": "SIGTERM", "place": "before"},
    {"use": "bare", "how": "SIGTERM", "place": "after", "step": 9},
    {"use": "cells", "how": "raise", "place": "between"},
    {"use": "periodic", "how": "end", "every": 1},
    {"use": "periodic", "how": "raise", "place": "before", "every": 3},
    {"use": "with", "how": "SIGTERM", "late_s": 0.004, "steps": 100_000},
    {"use": "cells", "how": "SIGINT", "late_s": 0.007, "steps": 100_000, "every": 2},
]


@pytest.mark.parametrize(
    "sample", share_of(SAMPLES, "endings"), ids=lambda sample: "-".join(str(value) for value in sample.values())
)
def test_the_last_step_is_saved(tmp_path: Path, server: RunsServer, sample: dict[str, object]) -> None:
    ending = Ending(folder=str(tmp_path), **sample)  # type: ignore[arg-type]
    check(ending, server.run(ending))


@pytest.mark.slow
@pytest.mark.random
@pytest.mark.timeout(1800)
def test_the_last_step_is_saved_by_any_of_many_endings(tmp_path: Path, server: RunsServer, base_seed: int) -> None:
    """And a run that was not ended half-way goes on from there, to the same end."""
    for number in range(RANDOM_ENDINGS):
        chosen = random.Random(base_seed + number)
        use = chosen.choice(["with", "with", "bare", "cells", "periodic"])
        hows = ["end", "break", "raise", "exit", "SIGINT", *(["SIGTERM"] * 3 if use != "periodic" else [])]
        ending = Ending(
            folder=str(tmp_path / f"{number}"),
            use=use,
            how=chosen.choice(hows),
            step=chosen.randrange(1, 12),
            place=chosen.choice(PLACES),
            every=chosen.choice([1, 2, 3, 7, 1000]),
            steps=12,
        )
        if ending.how == "SIGTERM":
            ending = replace(ending, times=chosen.choice([1, 2, 3]))
        if ending.how in ("SIGTERM", "SIGINT") and chosen.random() < 0.5:
            ending = replace(ending, late_s=chosen.random() * 0.05, steps=100_000)
        check(ending, server.run(ending))
        last = asyncckpt.list_steps(ending.ckpt)[-1]
        if use == "periodic" or asyncckpt.describe(ending.ckpt).metadata.get(HALF_WAY):
            continue
        goes_on = replace(ending, how="end", late_s=None, steps=last + 4)
        check(goes_on, server.run(goes_on))


def test_a_process_that_is_killed_leaves_what_had_committed(tmp_path: Path, server: RunsServer) -> None:
    ending = Ending(folder=str(tmp_path), how="SIGKILL", step=8, place="between", every=3)
    assert server.run(ending) == STATUS["SIGKILL"]
    for step in asyncckpt.list_steps(ending.ckpt):
        assert step in (3, 6)
        assert asyncckpt.load(ending.ckpt, step)["a"].tolist() == [step + 1] * 3


def test_the_check_finds_a_last_step_that_is_lost(tmp_path: Path, server: RunsServer) -> None:
    ending = Ending(folder=str(tmp_path), use="lossy", every=4)
    status = server.run(ending)
    with pytest.raises(AssertionError, match="9"):
        check(ending, status)


# The begin of a program, which is as from Python 3.12 on: handlers of the exit cannot start threads.
NO_THREADS_AT_THE_EXIT = """
import sys, threading
import torch
import asyncckpt

start = threading.Thread.start

def refusing(thread):
    if not threading.main_thread().is_alive():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    start(thread)

threading.Thread.start = refusing
"""


def test_what_is_submitted_when_no_thread_can_be_started_any_more_runs_in_place(tmp_path: Path) -> None:
    program = f"""{NO_THREADS_AT_THE_EXIT}
x = torch.zeros(3)
ckpt = asyncckpt.Checkpointer(sys.argv[1], every=1000, x=x)
for step in range(5):
    x += 1
    ckpt.step(step)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert asyncckpt.load(tmp_path)["x"].tolist() == [5.0] * 3


def run_program(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})


TWO = """
import sys
import torch
import asyncckpt

class Failing:
    fails = False

    def state_dict(self):
        if self.fails:
            raise RuntimeError("the device is gone")
        return {"a": 1}

    def load_state_dict(self, state):
        pass

x, failing = torch.zeros(2), Failing()
first = asyncckpt.Checkpointer(sys.argv[1] + "/first", every=1000, x=x)
second = asyncckpt.Checkpointer(sys.argv[1] + "/second", every=1000, x=x, failing=failing)
for step in range(5):
    x[0] = step
    if step == 4 and ENDS == "raise":
        raise ValueError("in the middle of step 4")
    x[1] = step
    first.step(step)
    second.step(step)
failing.fails = ENDS == "fail"
print("ended")
"""


def test_one_that_cannot_be_saved_at_the_exit_keeps_no_other_from_it(tmp_path: Path) -> None:
    done = run_program(f"ENDS = 'fail'\n{TWO}", tmp_path)
    assert (done.returncode, done.stdout) == (0, "ended\n")
    assert "the last step was not saved in" in done.stderr
    assert "the device is gone" in done.stderr
    assert "Traceback" not in done.stderr
    assert asyncckpt.load(tmp_path / "first")["x"].tolist() == [4, 4]


def test_a_program_that_an_exception_has_ended_says_so_in_its_last_checkpoint(tmp_path: Path) -> None:
    """Without an optimizer nothing but that tells that the state may be half a step off."""
    assert run_program(f"ENDS = 'raise'\n{TWO}", tmp_path).returncode == 1
    for name in ("first", "second"):
        assert asyncckpt.load(tmp_path / name)["x"].tolist() == [4, 3]
        metadata = asyncckpt.describe(tmp_path / name, 3).metadata
        assert metadata == {"asyncckpt.interrupted": "ValueError", "asyncckpt.half_way": True}


def test_an_exception_of_an_earlier_cell_ends_no_later_loop(tmp_path: Path) -> None:
    x = torch.zeros(2)
    sys.last_value = ValueError("an earlier cell")  # As notebooks set it.
    try:
        ckpt = asyncckpt.Checkpointer(tmp_path, every=1000, x=x)
        ckpt.step(0)
        ckpt.close()
        ckpt = asyncckpt.Checkpointer(tmp_path, every=1000, x=x)
        ckpt.step(1)
        sys.last_value = KeyboardInterrupt()
        ckpt = asyncckpt.Checkpointer(tmp_path, every=1000, x=x)  # The cell is run again.
        ckpt.close()
    finally:
        del sys.last_value
    found = [asyncckpt.describe(tmp_path, step).metadata for step in (0, 1)]
    assert found == [{}, {"asyncckpt.interrupted": "KeyboardInterrupt", "asyncckpt.half_way": True}]
