"""Cut the power after every operation of a save, on a disk that keeps only what was synced (weak_disk.py).

And the other way round: leave out each kind of sync in turn; the check must find out, or it proves nothing.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from child_runs import check_disks, save_again, save_and_resolve, save_once
from fork_lanes import ForkLanes, Lane
from op_log import DiskOp, read_log
from scenarios import AFTER_STEP, CHECKPOINT, NEW_STEP, SCENARIOS, Scenario
from shim import CHANGING_KINDS, NOTHING, Action, DiskFault, OpKind
from templates import Templates
from weak_disk import NEVER_READ, CutDisk, WeakDisk

from asyncckpt.native import implementation
from tests.shares import share_of

SEED = int(os.environ.get("ASYNCCKPT_FAULT_SEED", "20250119"))
STATES_MAX = int(os.environ.get("ASYNCCKPT_POWER_CUT_STATES", "256"))  # At one operation.
# After a second save most of these have been seen after the first one. What one operation leaves alone comes always.
STATES_OF_SECOND_SAVES_MAX = min(8, STATES_MAX)
DISKS_PER_CHECK = 64
# A second save passes through the same states as the first one, but for what it builds on: names, and their removal.
TELLING_KINDS = frozenset({OpKind.MKDIR, OpKind.RENAME, OpKind.UNLINK, OpKind.RMDIR, OpKind.MARK})
# The twin makes the same operations from Python; these are the ways in which it can write.
CUT = list(SCENARIOS) if implementation == "native" else ["async", "blocking", "left-open", "delta"]


def disks_after(
    log: list[DiskOp],
    scenario: Scenario,
    watched: Path,
    template: Path,
    *,
    begin: int = 0,
    kinds: Collection[OpKind] = CHANGING_KINDS | {OpKind.MARK},
    states_max: int = STATES_MAX,
    takes_share: bool = False,
) -> Iterator[CutDisk]:
    """Every different disk that a power cut may leave after operations of these kinds, from log line `begin` on.

    takes_share: after those among them that are this run's share.
    """
    generator = random.Random(SEED)
    begin = max(begin, scenario.begin_of_disturbed(log))
    disk = WeakDisk(watched, template)
    acknowledged = max(scenario.before, default=None)
    seen = set()
    numbers = [n for n, operation in enumerate(log) if n >= begin and operation.kind in kinds]
    cut_at = {*(share_of(numbers, scenario.name, by=lambda n: log[n].kind) if takes_share else numbers)}
    for index, operation in enumerate(log):
        disk.do(operation)
        if operation.kind is OpKind.MARK:
            acknowledged = operation.number
        if index not in cut_at:
            continue
        for tree in disk.power_cuts(states_max=states_max, generator=generator):
            key = (acknowledged, hash(tuple(tree.items())))
            if key not in seen:
                seen.add(key)
                candidates = [*scenario.standing, NEW_STEP, AFTER_STEP]
                yield CutDisk(f"power cut after {operation}", tree, acknowledged, candidates)


def check_all(disks: Iterator[CutDisk], lanes: ForkLanes, folders: Iterator[Path]) -> tuple[int, list[str]]:
    """How many disks there were, and what is wrong with some."""
    works = []
    count = 0
    while some := list(islice(disks, DISKS_PER_CHECK)):
        count += len(some)
        works.append((some[0].label, partial(check_some, some, next(folders))))
    return count, [wrong for found in lanes.run_all(works) for wrong in found]


def check_some(disks: list[CutDisk], folder: Path, lane: Lane) -> list[str]:
    return list(lane.messages(check_disks, folder, disks))


def logged_save(
    scenario: Scenario, fault: DiskFault, lanes: ForkLanes, template: Path, folder: Path
) -> tuple[list[DiskOp], Path]:
    lanes.run(lambda lane: lane.call(save_once, scenario, folder, template, fault))
    return read_log(Path(f"{folder}.log")), folder


@pytest.mark.parametrize("name", SCENARIOS)
def test_replayed_log_is_what_is_on_disk(
    name: str, lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    """No operation of a save escapes the shim, and the weak disk follows every one rightly."""
    scenario = SCENARIOS[name]
    template = templates.of(scenario)
    log, watched = logged_save(scenario, NOTHING, lanes, template, next(run_folders))
    disk = WeakDisk(watched, template)
    for operation in log:
        disk.do(operation)
    found = {str(path.relative_to(watched)): path for path in watched.rglob("*")}
    expected = {name: None if path.is_dir() else path.read_bytes() for name, path in found.items()}
    lock = f"{CHECKPOINT}/{NEVER_READ}"
    assert disk.in_memory() | {lock: b""} == expected | {lock: b""}


@pytest.mark.random
@pytest.mark.parametrize("name", CUT)
def test_power_cut_leaves_every_acknowledged_checkpoint(
    name: str, lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    print(f"seed {SEED}")
    scenario = SCENARIOS[name]
    template = templates.of(scenario)
    log, watched = logged_save(scenario, NOTHING, lanes, template, next(run_folders))
    disks = disks_after(log, scenario, watched, template, takes_share=True)
    count, wrong = check_all(disks, lanes, run_folders)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:3])
    print(f"{name}: {count} different disks after power cuts")


# Of retention a save removes much, which makes many states.
RETENTION_IN_FULL = pytest.param("retention", STATES_MAX, marks=pytest.mark.slow)
SECOND_SAVES = [("first", STATES_MAX), ("retention", STATES_OF_SECOND_SAVES_MAX), RETENTION_IN_FULL]


def check_second_saves(
    name: str,
    chosen: Callable[[list[DiskOp]], list[DiskOp]],
    again: Callable[..., list[CutDisk]],
    states_max: int,
    lanes: ForkLanes,
    templates: Templates,
    run_folders: Iterator[Path],
) -> None:
    """Disturb a save at each operation that is chosen, save `again`, and cut the power at all places behind it."""
    print(f"seed {SEED}")
    scenario = SCENARIOS[name]
    template = templates.of(scenario)
    log, _ = logged_save(scenario, NOTHING, lanes, template, next(run_folders))
    places = chosen(log[scenario.begin_of_disturbed(log) :])
    works = [(str(place), partial(again, scenario, place, template, next(run_folders), states_max)) for place in places]
    disks = (disk for disks in lanes.run_all(works) for disk in disks)
    count, wrong = check_all(disks, lanes, run_folders)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:3])
    print(f"{name}: disturbed {len(places)} times, {count} different disks after power cuts")


@pytest.mark.any_core
@pytest.mark.parametrize(("name", "states_max"), [*SECOND_SAVES, ("compaction", STATES_MAX)])
def test_power_cut_after_a_kill_and_another_save_leaves_every_acknowledged_checkpoint(
    name: str, states_max: int, lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    """What the killed process had not synced, the next one must sync before it relies on it."""

    def kills(disturbed: list[DiskOp]) -> list[DiskOp]:
        found = [o for o in disturbed if o.kind in CHANGING_KINDS and o.kind is not OpKind.SYNC]
        return share_of([o for o in found if not is_in_attempt(o)], name, by=lambda kill: kill.kind)

    check_second_saves(name, kills, killed_and_saved_again, states_max, lanes, templates, run_folders)


def killed_and_saved_again(
    scenario: Scenario, kill: DiskOp, template: Path, folder: Path, states_max: int, lane: Lane
) -> list[CutDisk]:
    lane.call(save_once, scenario, folder, template, DiskFault(Action.KILL_AFTER, at=kill.number))
    killed_at = len(read_log(Path(f"{folder}.log")))
    lane.messages(save_again, scenario, folder)
    log = read_log(Path(f"{folder}.log"))
    disks = disks_after(log, scenario, folder, template, begin=killed_at, kinds=TELLING_KINDS, states_max=states_max)
    return [replace(disk, label=f"killed after {kill}, {disk.label}") for disk in disks]


@pytest.mark.any_core
@pytest.mark.parametrize(
    ("name", "states_max"), [*SECOND_SAVES, pytest.param("compaction", STATES_MAX, marks=pytest.mark.slow)]
)
def test_power_cut_after_a_failed_sync_leaves_every_acknowledged_checkpoint(
    name: str, states_max: int, lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    """A save that is acknowledged needed no sync that failed; nor does the next one, of another process."""

    def syncs(disturbed: list[DiskOp]) -> list[DiskOp]:
        return share_of((operation for operation in disturbed if operation.kind is OpKind.SYNC), name)

    check_second_saves(name, syncs, failed_and_saved_again, states_max, lanes, templates, run_folders)


def failed_and_saved_again(
    scenario: Scenario, sync: DiskOp, template: Path, folder: Path, states_max: int, lane: Lane
) -> list[CutDisk]:
    lane.messages(save_and_resolve, scenario, folder, template, DiskFault(Action.FAIL, at=sync.number, error=errno.EIO))
    failed_at = next(i for i, o in enumerate(read_log(Path(f"{folder}.log"))) if o.kind is OpKind.SYNC and o.error)
    lane.messages(save_again, scenario, folder)
    log = read_log(Path(f"{folder}.log"))
    disks = disks_after(log, scenario, folder, template, begin=failed_at, kinds=TELLING_KINDS, states_max=states_max)
    return [replace(disk, label=f"{sync} failed, {disk.label}") for disk in disks]


def is_in_attempt(operation: DiskOp) -> bool:
    return "/data/" in operation.path


LEFT_OUT: dict[str, tuple[str, Callable[[DiskOp], bool]]] = {
    "the folder around": ("first", lambda sync: "checkpoint" not in sync.path),
    "the root": ("first", lambda sync: sync.name == "checkpoint"),
    "data/": ("first", lambda sync: sync.name == "data"),
    "the attempt's folder": ("first", lambda sync: sync.name.startswith(f"{NEW_STEP:012d}-")),
    "shard files": ("first", lambda sync: sync.name.endswith(".safetensors")),
    "the manifest": ("first", lambda sync: sync.name.startswith(".m-")),
    "manifests/": ("first", lambda sync: sync.name == "manifests"),
}


@pytest.mark.any_core
@pytest.mark.parametrize("what", LEFT_OUT)
def test_check_finds_a_sync_left_out(
    what: str, lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    name, is_left_out = LEFT_OUT[what]
    scenario = SCENARIOS[name]
    template = templates.of(scenario)
    log, watched = logged_save(scenario, NOTHING, lanes, template, next(run_folders))
    shorter = [operation for operation in log if operation.kind is not OpKind.SYNC or not is_left_out(operation)]
    assert len(shorter) < len(log), "the save has no such sync"
    _, wrong = check_all(disks_after(shorter, scenario, watched, template), lanes, run_folders)
    assert wrong, f"nobody misses the sync of {what}"


@pytest.mark.any_core
def test_check_finds_a_sync_left_out_between_removing_manifests_and_data(
    lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    scenario = SCENARIOS["retention"]
    template = templates.of(scenario)
    log, watched = logged_save(scenario, NOTHING, lanes, template, next(run_folders))
    removed_at = max(i for i, o in enumerate(log) if o.kind is OpKind.UNLINK and o.name.endswith(".json"))
    sync_at = next(i for i, o in enumerate(log) if i > removed_at and o.kind is OpKind.SYNC and o.name == "manifests")
    del log[sync_at]
    _, wrong = check_all(disks_after(log, scenario, watched, template), lanes, run_folders)
    assert wrong, "nobody misses the sync of manifests/"
