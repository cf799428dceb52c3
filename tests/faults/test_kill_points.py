"""kill -9 behind every file operation of a save, and at random moments: the old checkpoint or the new one."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from child_runs import check_after_crashes, check_after_random_kills, save_for_ever, save_once
from fork_lanes import ForkLanes, Lane
from op_log import DiskOp, read_log
from scenarios import CHECKPOINT, NEW_STEP, SCENARIOS, Scenario
from shim import CHANGING_KINDS, NOTHING, Action, DiskFault, OpKind
from templates import Templates

from asyncckpt.native import implementation
from tests.shares import share_of

# After other kinds the disk is as it was before them.
KILLED_AFTER = CHANGING_KINDS
# The next process checks this many crashes, for starting it costs more than a check.
CRASHES_PER_CHECK = 16
RANDOM_KILLS_COUNT = int(os.environ.get("ASYNCCKPT_RANDOM_KILLS", "200" if implementation == "native" else "50"))
RANDOM_SEED = int(os.environ.get("ASYNCCKPT_FAULT_SEED", "20250118"))
RANDOM_KILL_SECONDS_MAX = 0.08


# The twin makes the same operations from Python; these are the ways in which it can write.
KILLED = list(SCENARIOS) if implementation == "native" else ["async", "blocking", "left-open", "delta"]


@pytest.mark.parametrize("name", KILLED)
def test_kill_at_every_operation_leaves_old_or_new(
    name: str, lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    kill_at_every_operation(SCENARIOS[name], lanes, templates, run_folders)


@pytest.mark.any_core
def test_kill_at_every_operation_leaves_old_or_new_on_disk(
    lanes: ForkLanes, templates: Templates, tmp_path: Path
) -> None:
    folders = (tmp_path / str(number) for number in range(10_000))
    kill_at_every_operation(SCENARIOS["retention"], lanes, templates, folders, every=5)


@pytest.mark.any_core
@pytest.mark.parametrize("damage", ["an acknowledged manifest is gone", "a byte of the newest data has changed"])
def test_check_finds_a_third_answer(
    damage: str, lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    """Otherwise the kills would show nothing: what no crash may leave is found, and without it nothing is."""
    scenario = SCENARIOS["async"]
    folders = {what: next(run_folders) for what in ("sound", damage)}
    for folder in folders.values():
        template = templates.of(scenario)
        lanes.run(partial(save_for_check, scenario, folder, template))
    newest = max((folders[damage] / CHECKPOINT / "manifests").iterdir())
    if damage == "an acknowledged manifest is gone":
        newest.unlink()
    else:
        data = max(
            (folders[damage] / CHECKPOINT / "data").rglob("*.safetensors"), key=lambda file: file.stat().st_mtime
        )
        with data.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            [last] = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
    crashes = [(what, folder, NEW_STEP) for what, folder in folders.items()]
    wrong = lanes.run(lambda lane: lane.messages(check_after_crashes, scenario, crashes))
    assert [text.partition(":")[0] for text in wrong] == [damage]


def save_for_check(scenario: Scenario, folder: Path, template: Path, lane: Lane) -> None:
    assert max(lane.messages(save_once, scenario, folder, template, NOTHING)) == NEW_STEP


def kill_at_every_operation(
    scenario: Scenario, lanes: ForkLanes, templates: Templates, folders: Iterator[Path], *, every: int = 1
) -> None:
    template = templates.of(scenario)
    trial = next(folders)
    lanes.run(lambda lane: lane.messages(save_once, scenario, trial, template, NOTHING))
    # Nothing on disk changes at a read, so a kill there is the same as one at the operation before.
    log = read_log(Path(f"{trial}.log"))
    disturbed = log[scenario.begin_of_disturbed(log) :]
    operations = [operation for operation in disturbed if operation.kind not in (OpKind.READ, OpKind.MARK)]
    # What is there before one of the others is what the one before it left.
    before = [(operation, Action.KILL_BEFORE) for operation in operations[:1]]
    after = [(operation, Action.KILL_AFTER) for operation in operations if operation.kind in KILLED_AFTER]
    taken = share_of([*before, *after], scenario.name, every=every, by=lambda kill: kill[0].kind)
    kills = iter(taken)
    works = []
    while some := list(islice(kills, CRASHES_PER_CHECK)):
        runs = [(operation, action, next(folders)) for operation, action in some]
        works.append((f"kills from {some[0][0]} on", partial(kill_and_check, scenario, template, runs)))
    acknowledged_count = sum(lanes.run_all(works))
    print(f"{scenario.name}: killed at {len(taken)} operations; {acknowledged_count} saves had been acknowledged")


def kill_and_check(scenario: Scenario, template: Path, runs: list[tuple[DiskOp, Action, Path]], lane: Lane) -> int:
    """Returns how many of the saves had been acknowledged."""
    crashes = []
    acknowledged_count = 0
    for operation, action, folder in runs:
        label = f"{action.name} {operation}"
        end = lane.call(save_once, scenario, folder, template, DiskFault(action, at=operation.number))
        assert end.killed_by == signal.SIGKILL, f"{label}: was not reached: {end.error}"
        crashes.append((label, folder, max(end.messages, default=None)))
        acknowledged_count += len(end.messages) > len(scenario.base)
    wrong = lane.messages(check_after_crashes, scenario, crashes)
    assert not wrong, "\n".join(wrong)
    return acknowledged_count


@pytest.mark.random
def test_kill_at_random_moments_leaves_old_or_new(lanes: ForkLanes, run_folders: Iterator[Path]) -> None:
    print(f"seed {RANDOM_SEED}, {RANDOM_KILLS_COUNT} kills")
    generator = random.Random(RANDOM_SEED)
    moments = iter([generator.uniform(0, RANDOM_KILL_SECONDS_MAX) for _ in range(RANDOM_KILLS_COUNT)])
    works = []
    while some := list(islice(moments, CRASHES_PER_CHECK)):
        runs = [(moment, next(run_folders)) for moment in some]
        works.append((f"kills from moment {some[0]:.4f} s on", partial(kill_at_moments, runs)))
    counts = lanes.run_all(works)
    found = Counter(step for steps in counts for step in steps)
    print(f"kills by the newest acknowledged step: {dict(sorted(found.items()))}")


def kill_at_moments(runs: list[tuple[float, Path]], lane: Lane) -> list[int]:
    """Returns the newest acknowledged step of every run."""
    crashes = []
    for moment, folder in runs:
        end = lane.call(save_for_ever, folder, kill_after_s=moment)
        assert end.killed_by == signal.SIGKILL, f"ended before it was killed: {end.error}"
        crashes.append((f"killed {moment:.4f} s after the begin", folder, max(end.messages, default=0)))
    wrong = lane.messages(check_after_random_kills, crashes)
    assert not wrong, "\n".join(wrong)
    return [acknowledged for _, _, acknowledged in crashes]
