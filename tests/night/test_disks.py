"""What happens to the disks of jobs at night, beside what is in test_incidents.py."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

import asyncckpt
from tests.faults.shim import SPACE_TAKING_KINDS
from tests.night.nights import COMMITTED, OPENED, RESTORED, Night
from tests.program import invoke
from tests.read_only import as_nobody, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.any_core]
SPACE = sorted(kind.name for kind in SPACE_TAKING_KINDS)


def test_the_quota_is_used_up(weak_night: Night) -> None:
    ended = weak_night.job(at={5: "fault"}, fault=["EDQUOT", *SPACE])
    weak_night.says(ended.log, OPENED, COMMITTED.format(4))
    weak_night.says_of_error(
        ended, "IOFailedError", "{run}/data/000000000006-", "Disk quota exceeded", "`asyncckpt prune`"
    )
    weak_night.counts(ended, committed=2)
    if ended.counts:
        assert ended.counts["save failed"] >= 1
    weak_night.check([2, 4])
    weak_night.says(weak_night.is_queued_again().log, RESTORED.format(4), COMMITTED.format(8))


@pytest.mark.parametrize("kind", ["WRITE", "SYNC", "RENAME"])
def test_the_disk_fails(weak_night: Night, kind: str) -> None:
    ended = weak_night.job(at={5: "fault"}, fault=["EIO", kind])
    weak_night.says(ended.log, OPENED, COMMITTED.format(4))
    weak_night.says_of_error(ended, "IOFailedError", "{run}", "Input/output error", "(dmesg)")
    weak_night.counts(ended, committed=2)
    weak_night.check([2, 4])
    weak_night.says(weak_night.is_queued_again().log, RESTORED.format(4), COMMITTED.format(8))


def test_the_disk_cannot_be_read(weak_night: Night) -> None:
    """Which is no damage: nothing is passed by, and nothing is put aside."""
    weak_night.job(steps=7)
    ended = weak_night.job(fallback=True, at={"restore": "fault"}, fault=["EIO", "READ"])
    weak_night.says_of_error(ended, "IOFailedError", "{run}", "Input/output error", "(dmesg)")
    assert not [line for line in ended.log if "passed by" in line]
    weak_night.check([2, 4, 6])
    again = weak_night.is_queued_again(fallback=True)
    weak_night.says(again.log, RESTORED.format(6))
    assert not (weak_night.run / "damaged").exists()


def test_the_disk_is_slow(weak_night: Night) -> None:
    """Training goes on: what cannot be saved in time is skipped, and the last step is saved all the same."""
    ended = weak_night.job(every=1, calm=False, at={1: "fault"}, fault=[400, "SYNC"])
    assert (ended.code, ended.done) == (0, [9.0])
    weak_night.says(
        ended.log,
        OPENED,
        "saves of {run} in a row were skipped, the last because of the save of step",
        COMMITTED.format(8),
    )
    if ended.counts:
        assert ended.counts["save skipped"] >= 3
        assert ended.counts["save failed"] == 0
    assert asyncckpt.list_steps(weak_night.run)[-1] == 8
    weak_night.says(weak_night.is_queued_again().log, RESTORED.format(8))


def test_no_inode_is_left(night: Night) -> None:
    """There is space, and yet no file can be made: the error must not send anybody looking for MiB."""
    with small_disk(night.run.parent, mib=64, inodes=16):
        ended = night.job()
        night.says(ended.log, OPENED, COMMITTED.format(2))
        night.says_of_error(ended, "IOFailedError", "{run}", "No space left on device", "df -i")
        steps = asyncckpt.list_steps(night.run)
        assert steps
        assert invoke("prune", night.run, "--latest", 1).exit_code == 0
        night.is_queued_again(keep=1)


def test_a_full_disk_is_freed_while_the_job_goes_on(night: Night) -> None:
    """A program that logs the error of a save and goes on has its next checkpoint as soon as there is space."""
    with small_disk(night.run.parent, mib=16):
        process = night.start(on_error="warn", at={3: "wait", 7: "wait again"})
        night.wait_for()
        fill(night.run.parent / "ballast")
        night.go_on()
        night.wait_for("wait again")
        assert asyncckpt.list_steps(night.run) == [2]
        (night.run.parent / "ballast").unlink()
        night.go_on("wait again")
        ended = night.ended(process)
        assert (ended.code, ended.done) == (0, [9.0])
        night.says(ended.log, COMMITTED.format(2), "No space left on device", COMMITTED.format(8))
        night.counts(ended, committed=2, failed=2)
        night.check([2, 8])
        night.says(night.is_queued_again().log, RESTORED.format(8))


def fill(path: Path) -> None:
    """Take what space there is."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


@pytest.mark.parametrize("when", ["from the start", "of manifests"])
def test_the_directory_is_of_another_user(when: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # Those of pytest are closed to others.
        night = Night(Path(folder))
        os.chmod(folder, 0o755 if when == "from the start" else 0o777)
        if when == "of manifests":
            night.job(steps=7)
            (night.run / "manifests").chmod(0o700)
        ended = night.job(under=as_nobody())
        night.says_of_error(ended, "IOFailedError", "{run}", "Permission denied", "owner and permission")
        if when == "from the start":
            assert not night.run.exists()
        else:
            night.check([2, 4, 6])
        night.is_queued_again()


def test_no_more_files_can_be_opened(night: Night) -> None:
    ended = night.job(under=["prlimit", "--nofile=128", "--"], at={5: "files"})
    night.says(ended.log, OPENED, COMMITTED.format(4))
    night.says_of_error(ended, "IOFailedError", "{run}", "Too many open files", "ulimit -n")
    night.check([2, 4])
    night.says(night.is_queued_again().log, RESTORED.format(4))


def test_files_may_not_be_that_large(night: Night) -> None:
    ended = night.job(under=["prlimit", "--fsize=524288", "--"])
    night.says_of_error(ended, "IOFailedError", "{run}", "File too large", "ulimit -f")
    night.check([])
    night.is_queued_again()
