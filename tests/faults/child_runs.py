"""What the children of the fork servers do. Every function here is the whole life of one process."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fork_server import Channel
from oracle import check_next_save, check_standing, check_steps, expected_digest
from sample_state import SampleState
from scenarios import AFTER_STEP, CHECKPOINT, FAR_STEPS, NEW_STEP, SCENARIOS, Scenario, make_saves_small
from shim import DiskFault, Shim
from weak_disk import CutDisk, put_on_disk

from asyncckpt import IndeterminateError, IOFailedError

STEPS_MAX = 50


def warm_up() -> None:
    """In the server, before it forks: do what every child would do first. Small tensors need no thread of torch's."""
    make_saves_small()  # Here, and not where this is imported: the test process keeps the usual sizes.
    state = SampleState()
    for step in range(AFTER_STEP + 2):
        expected_digest(step)
        state.fill(step + FAR_STEPS)


def prepare(_: Channel, scenario: Scenario, folder: Path) -> None:
    """Commit the steps that stand there before."""
    for step in scenario.before:
        state = SampleState()
        with Scenario("plain").open(folder / CHECKPOINT, state) as saver:
            scenario.save(saver, state, step)


def save_once(channel: Channel, scenario: Scenario, folder: Path, template: Path, fault: DiskFault) -> None:
    """Make the base, and save or compact NEW_STEP, in a copy of the template, with one fault, and a log of the
    operations beside the folder.

    Sends every step when it is acknowledged.
    """
    copy_template(template, folder)
    state = SampleState()
    tell = partial(_acknowledge, channel)
    with scenario.open_watched(folder, state, fault, log=_open_log(folder), tell=tell) as saver:
        scenario.disturbed(saver, state)
        _acknowledge(channel, NEW_STEP)


def save_and_resolve(channel: Channel, scenario: Scenario, folder: Path, template: Path, fault: DiskFault) -> None:
    """Like save_once, with a fault that the process survives. An open outcome is asked for, and counts if good."""
    try:
        save_once(channel, scenario, folder, template, fault)
    except IndeterminateError as error:
        if error.resolve():
            _acknowledge(channel, NEW_STEP)
    except IOFailedError:
        pass


def save_again(channel: Channel, scenario: Scenario, folder: Path) -> None:
    """As the next process after a crash: save AFTER_STEP. Its operations follow in the same log."""
    state = SampleState()
    Shim().arm(folder, log=_open_log(folder))
    with scenario.open(folder / CHECKPOINT, state) as saver:
        scenario.save(saver, state, AFTER_STEP)
        _acknowledge(channel, AFTER_STEP)


def _acknowledge(channel: Channel, step: int) -> None:
    Shim().mark(step)
    channel.send(step)


def _open_log(folder: Path) -> int:
    return os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def save_for_ever(channel: Channel, folder: Path) -> None:
    """Save step after step in all ways there are, until killed; sends 0 at first, then every acknowledged step."""
    state = SampleState()
    channel.send(0)
    ways = [SCENARIOS[name] for name in ("async", "blocking", "filtered", "retention")]
    for step in range(1, STEPS_MAX):
        way = ways[step % len(ways)]
        with way.open(folder / CHECKPOINT, state) as saver:
            way.save(saver, state, step)
            channel.send(step)


def check_after_crashes(channel: Channel, scenario: Scenario, crashes: Sequence[tuple[str, Path, int | None]]) -> None:
    """As the next process after each crash (label, folder, newest acknowledged step): what is there is right, and
    saving goes on.

    Sends what is wrong.
    """
    for label, folder, acknowledged in crashes:
        try:
            check_after_crash(scenario, folder, acknowledged=acknowledged)
        except Exception:
            channel.send(f"{label}: {traceback.format_exc()}")


def check_after_crash(scenario: Scenario, folder: Path, *, acknowledged: int | None) -> None:
    root = folder / CHECKPOINT
    steps = check_steps(root, acknowledged=acknowledged, candidates={*scenario.standing, NEW_STEP})
    check_standing(scenario, steps)
    check_next_save(root, scenario)


def check_after_random_kills(channel: Channel, crashes: Sequence[tuple[str, Path, int]]) -> None:
    """Like check_after_crashes, for save_for_ever; a crash has the newest acknowledged step, 0 for none."""
    for label, folder, acknowledged in crashes:
        root = folder / CHECKPOINT
        try:
            steps = check_steps(root, acknowledged=acknowledged or None, candidates=range(acknowledged + 2))
            check_next_save(root, SCENARIOS["async"], step=STEPS_MAX + len(steps))
        except Exception:
            channel.send(f"{label}: {traceback.format_exc()}")


def check_disks(channel: Channel, folder: Path, disks: Sequence[CutDisk]) -> None:
    """Put each disk on a real one and check it. Sends what is wrong."""
    for number, disk in enumerate(disks):
        place = folder / str(number)
        put_on_disk(disk.tree, place)
        try:
            check_steps(place / CHECKPOINT, acknowledged=disk.acknowledged, candidates=disk.candidates)
        except Exception:
            channel.send(f"{disk.label}: {traceback.format_exc()}")
        shutil.rmtree(place)


def copy_template(template: Path, folder: Path) -> None:
    shutil.copytree(template, folder, dirs_exist_ok=True)
