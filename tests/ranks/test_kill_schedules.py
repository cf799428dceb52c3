"""A rank dies, or stands still, at every point of a save: the others hear of it, and the newest commit is whole.

What may be there afterwards follows from what the ranks were told: all of step 2 once one rank was told that it has
committed, all of step 1 once one was told that it has not, either of the two in full otherwise.
"""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.forked import await_end, await_stopped, end, start
from tests.ranks.kill_points import OF_COORDINATOR, OF_PARTICIPANT
from tests.ranks.schedule_rank import Strikes, run_rank
from tests.ranks.training import differences, image, load_whole, run_alone

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(300)]

RUN_S_MAX = 90.0
AT_ONCE = 8
# A death at these points comes too late to stop the commit.
TOO_LATE = {False: {"prepared"}, True: {"renamed", "durable", "told"}}

GROUPS = {
    "participant of two": [Strikes(2, 1, point) for point in OF_PARTICIPANT],
    "coordinator of two": [Strikes(2, 0, point) for point in OF_COORDINATOR],
    "four": [
        *(Strikes(4, victim, point) for victim, point in ((1, "capture"), (2, "write"), (3, "prepared"))),
        *(Strikes(4, 0, point) for point in ("plan", "written", "manifest written", "renamed")),
    ],
    "stopped": [
        *(Strikes(2, 1, point, "stop") for point in ("plan", "write", "before prepared", "prepared")),
        *(Strikes(2, 0, point, "stop") for point in ("filter", "manifest written", "renamed")),
    ],
    "over files": [
        *(Strikes(2, 1, point, over="file") for point in ("capture", "written", "prepared")),
        *(Strikes(2, 0, point, over="file") for point in ("write", "manifest written", "durable")),
    ],
}


def test_there_are_as_many_schedules_as_promised() -> None:
    assert sum(map(len, GROUPS.values())) >= 40


@pytest.mark.parametrize("group", GROUPS)
def test_survivors_are_told_and_the_newest_commit_is_whole(tmp_path: Path, group: str) -> None:
    folders = [tmp_path / str(number) for number in range(len(GROUPS[group]))]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        runs = list(threads.map(run, GROUPS[group], folders))
    problems = []
    for schedule, folder, (told, complaints) in zip(GROUPS[group], folders, runs, strict=True):
        complaints = complaints or [*judge_told(schedule, told), *judge_directory(schedule, told, folder)]
        if complaints:
            problems.append("\n".join([f"{schedule.name}: {told}", *complaints, *outputs(folder)]))
    assert not problems, "\n\n".join(problems)


def run(schedule: Strikes, folder: Path) -> tuple[dict[int, Any], list[str]]:
    """Run all ranks to their end; what each was told, and what is wrong with how they ended."""
    folder.mkdir()
    ranks = [
        start(run_rank, (schedule, rank, folder), folder / f"output-{rank}") for rank in range(schedule.ranks_count)
    ]
    victim = ranks[schedule.victim]
    try:
        survivors = [process for process in ranks if process is not victim]
        if schedule.strike == "stop" and not await_stopped(victim, RUN_S_MAX):
            return {}, [f"the victim did not stop itself, but ended with {victim.exitcode}"]
        codes = await_end(survivors, RUN_S_MAX)
        if schedule.strike == "stop":
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGCONT)
        (victims_code,) = await_end([victim], RUN_S_MAX)
    finally:
        for process in ranks:
            end(process)
    told = {
        rank: json.loads(path.read_text())
        for rank in range(schedule.ranks_count)
        if (path := folder / f"outcome-{rank}").exists()
    }
    expected = -signal.SIGKILL if schedule.strike == "kill" else 0
    complaints = [f"survivors ended with {codes}"] if any(codes) or None in codes else []
    return told, complaints + ([f"the victim ended with {victims_code}"] if victims_code != expected else [])


def judge_told(schedule: Strikes, told: dict[int, Any]) -> list[str]:
    """Survivors were all told, the truth about who is at fault, and never the opposite of each other."""
    survivors = {rank: how for rank, how in told.items() if rank != schedule.victim}
    complaints = []
    if len(survivors) != schedule.ranks_count - 1:
        complaints.append("not all survivors were told")
    if any(how["outcome"] not in ("committed", "peer", "doubt") for how in survivors.values()):
        complaints.append("a survivor raised another error")
    if any(how["rank"] != schedule.victim for how in survivors.values() if how["outcome"] != "committed"):
        complaints.append("another rank than the victim is blamed")
    if {"committed", "peer"} <= {how["outcome"] for how in told.values()}:
        complaints.append("two outcomes")
    if schedule.strike == "kill":
        is_too_late = schedule.point in TOO_LATE[schedule.victim == 0]
        wanted = {"committed"} if is_too_late else {"peer", "doubt"}
        if not {how["outcome"] for how in survivors.values()} <= wanted:
            complaints.append(f"survivors were not told one of {sorted(wanted)}")
        if any(how.get("resolved") for how in survivors.values()):
            complaints.append("a save that nobody can have committed is resolved as committed")
    return complaints


def judge_directory(schedule: Strikes, told: dict[int, Any], folder: Path) -> list[str]:
    """The newest commit is one that what was told allows, and holds exactly what was trained."""
    step, found = load_whole(folder / "checkpoints")
    outcomes = {how["outcome"] for how in told.values()}
    allowed = {2} if "committed" in outcomes else {1} if "peer" in outcomes else {1, 2}
    if schedule.strike == "kill":
        allowed = {2 if schedule.point in TOO_LATE[schedule.victim == 0] else 1}
    complaints = [f"step {step} is the newest, expected {sorted(allowed)}"] if step not in allowed else []
    return complaints + differences(found, image(*run_alone(step, schedule.ranks_count)))


def outputs(folder: Path) -> list[str]:
    return [f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in sorted(folder.glob("output-*"))]
