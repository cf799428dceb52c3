"""How jobs end at night: by signals in all phases, by themselves, for want of memory; and what others leave behind."""

from __future__ import annotations

import json
import os
import signal

import pytest

import asyncckpt
from tests.limits.cgroups import MIB, Group
from tests.night.nights import COMMITTED, OPENED, RESTORED, Night

pytestmark = [pytest.mark.slow, pytest.mark.any_core]
SAVED = "INFO step {} of {{run}} is saved, and the process ends: SIGTERM"


def test_the_scheduler_ends_the_job_while_a_save_is_in_flight(weak_night: Night) -> None:
    """The disk takes a second for that save; it is finished first, and then the last step is saved."""
    ended = weak_night.job(calm=False, at={1: "fault", 3: "term"}, fault=[250, "SYNC"])
    assert (ended.code, ended.done) == (143, [4.0])
    weak_night.says(ended.log, OPENED, COMMITTED.format(2), COMMITTED.format(3), SAVED.format(3))
    weak_night.counts(ended, committed=2, failed=0, cancelled=0)
    weak_night.check([2, 3])
    weak_night.says(weak_night.is_queued_again().log, RESTORED.format(3), COMMITTED.format(8))


def test_the_scheduler_asks_twice(night: Night) -> None:
    ended = night.job(at={3: "term twice"})
    assert (ended.code, ended.done) == (143, [4.0])
    night.says(ended.log, OPENED, SAVED.format(3))
    night.check([2, 3])
    night.is_queued_again()


@pytest.mark.parametrize("moment", ["restore", "loading"])
def test_the_scheduler_ends_the_job_in_its_restore(night: Night, moment: str) -> None:
    """Nothing is to be saved, and no step begins."""
    night.job(steps=7)
    ended = night.job(at={moment: "term"})
    assert (ended.code, ended.done) == (143, [7.0])
    night.says(ended.log, RESTORED.format(6))
    assert not [line for line in ended.log if " is saved" in line or "Traceback" in line or " is committed" in line]
    night.check([2, 4, 6])
    night.is_queued_again()


def test_somebody_presses_ctrl_c(night: Night) -> None:
    ended = night.job(at={5: "interrupt"})
    assert ended.code == -signal.SIGINT
    night.says(ended.log, OPENED, COMMITTED.format(4), "KeyboardInterrupt")
    night.check([2, 4])
    night.is_queued_again()


@pytest.mark.parametrize(("step", "interrupted"), [(4, False), (5, True)])
def test_the_training_raises(night: Night, step: int, interrupted: bool) -> None:
    """The last completed step is saved, and names what has ended the loop unless it was saved before."""
    ended = night.job(at={step: "raise"}, every=3)
    assert (ended.code, ended.done) == (1, [float(step)])
    night.says(ended.log, OPENED, COMMITTED.format(step - 1), "RuntimeError: the loss is not finite")
    night.counts(ended, committed=1 + interrupted, failed=0)
    night.check([3, 4] if interrupted else [3])
    metadata = asyncckpt.describe(night.run, step - 1).metadata
    assert metadata.get("asyncckpt.interrupted") == ("RuntimeError" if interrupted else None)
    again = night.is_queued_again()
    assert any("RuntimeError" in line and "Warning" in line for line in again.log) == interrupted, again.log
    night.says(again.log, RESTORED.format(step - 1), COMMITTED.format(8))


def test_the_machine_ends_the_job_in_the_middle_of_a_save(weak_night: Night) -> None:
    """What is left lies there until the next save, and is no checkpoint for anybody."""
    ended = weak_night.job(at={5: "fault"}, fault=["KILL", "RENAME"])
    assert ended.code == -signal.SIGKILL
    assert len(list(weak_night.run.glob("data/*"))) == 3
    assert list(weak_night.run.glob("manifests/.m-*"))
    assert list(weak_night.run.glob("data/000000000006-*"))
    weak_night.check([2, 4])
    weak_night.says(weak_night.is_queued_again().log, RESTORED.format(4), COMMITTED.format(6))
    assert len(list(weak_night.run.glob("data/*"))) == 3
    assert not list(weak_night.run.glob("manifests/.m-*"))
    weak_night.check([4, 6, 8])


def test_a_worker_outlives_its_job(night: Night) -> None:
    """It has inherited what the job had open, and yet not the lock of the directory."""
    ended = night.start(at={5: "orphan"})
    night.wait_for("orphan")
    assert ended.wait(60.0) == -signal.SIGKILL
    again = night.is_queued_again()
    night.says(again.log, OPENED, COMMITTED.format(8))
    night.go_on("orphan")
    night.check([4, 6, 8])


def test_the_lock_of_a_dead_process_is_there(night: Night) -> None:
    """As after a crash of the machine, with the number of a process that is another one's today."""
    night.job(steps=7)
    (night.run / "LOCK").write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "yesterday"}))
    again = night.is_queued_again()
    night.says(again.log, OPENED, RESTORED.format(6), COMMITTED.format(8))
    night.check([4, 6, 8])


def test_the_clock_goes_forward(night: Night) -> None:
    ended = night.job(at={5: "forward"})
    assert (ended.code, ended.done) == (0, [9.0])
    night.check([4, 6, 8])
    night.says(night.is_queued_again().log, RESTORED.format(8))  # Whose clock is a day behind what it finds.


@pytest.fixture(scope="module")
def needed_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What a job uses that does not leak."""
    with Group.made(f"asyncckpt-night-{os.getpid()}") as group:
        assert Night(tmp_path_factory.mktemp("needs")).job(under=group.command()).code == 0
        return group.peak_bytes


@pytest.mark.parametrize("mib", [8, 32, 64, 128, 256])
def test_the_job_uses_more_memory_than_it_has(night: Night, needed_bytes: int, mib: int) -> None:
    """It leaks, and is killed where its cgroup ends: so many MiB above what it needs without the leak."""
    limit = needed_bytes + mib * MIB
    with Group.made(f"asyncckpt-night-{mib}") as group:
        ended = night.job(under=group.command(limit=limit), at={5: "hog"})
        assert group.peak_bytes <= limit
    assert ended.code == -signal.SIGKILL
    night.says(ended.log, OPENED, COMMITTED.format(2), COMMITTED.format(4))
    night.check([2, 4])
    night.says(night.is_queued_again().log, RESTORED.format(4), COMMITTED.format(8))
