"""What happens to jobs at night, one test an incident. `make test-night` runs them.

For each: the exit code, the lines of the log in their order, the metrics, `ls` and `doctor`; and the job that is queued
again goes on to the same end.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

import asyncckpt
from tests.night.nights import COMMITTED, OPENED, RESTORED, Night
from tests.program import invoke
from tests.read_only import read_only_mount, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.any_core]


def test_a_quiet_night(night: Night) -> None:
    ended = night.job()
    assert (ended.code, ended.done) == (0, [9.0])
    night.says(ended.log, OPENED, COMMITTED.format(2), COMMITTED.format(8))
    assert not [line for line in ended.log if not line.startswith("INFO ")]
    if ended.counts:
        assert (ended.counts["save committed"], ended.counts["save failed"]) == (4, 0)
    night.check([4, 6, 8])
    night.says(night.is_queued_again().log, OPENED, RESTORED.format(8))


@pytest.mark.parametrize("step", [0, 3, 4, 5, 8])
def test_the_scheduler_ends_the_job(night: Night, step: int) -> None:
    ended = night.job(at={step: "term"}, calm=False)
    assert ended.code == 143
    night.says(ended.log, OPENED, f"INFO step {step} of {{run}} is saved, and the process ends: SIGTERM")
    assert asyncckpt.list_steps(night.run)[-1] == step
    assert ended.done == [float(step + 1)]
    night.is_queued_again()


@pytest.mark.parametrize("step", [0, 3, 4, 5, 8])
def test_the_machine_ends_the_job(night: Night, step: int) -> None:
    ended = night.job(at={step: "kill"}, calm=False)
    assert ended.code == -signal.SIGKILL
    newest = asyncckpt.list_steps(night.run)[-1:] or [None]
    night.is_queued_again()
    assert newest[0] is None or newest[0] < step
    night.check(asyncckpt.list_steps(night.run))


def test_the_newest_is_damaged(night: Night) -> None:
    night.job(steps=7)
    night.damage(6)
    ended = night.job()
    assert ended.code == 1
    night.says(ended.log, OPENED, "restore(fallback=True) puts it aside, and continues from step 4", "CorruptError: ")
    night.check([2, 4, 6], damaged=True)
    again = night.is_queued_again(fallback=True)
    night.says(
        again.log,
        "WARNING step 6 of {run} is damaged and passed by, step 4 is tried: ",
        "INFO step 4 of {run} is restored: ",
        "WARNING damaged steps of {run} are put aside until somebody removes them: ",
        COMMITTED.format(6),
    )
    night.check([4, 6, 8])


def test_an_older_one_is_damaged(night: Night) -> None:
    night.job(steps=7)
    night.damage(4)
    night.check([2, 4, 6], damaged=True)
    night.is_queued_again()
    assert {6, 8} <= set(asyncckpt.list_steps(night.run))


def test_two_jobs_on_one_directory(night: Night) -> None:
    first = night.start(at={3: "wait"})
    night.wait_for()
    second = night.job()
    assert second.code == 1
    night.says(
        second.log,
        "ConflictError: ",
    )
    night.go_on()
    ended = night.ended(first)
    assert (ended.code, ended.done) == (0, [9.0])
    night.check([4, 6, 8])


def test_the_disk_is_full(night: Night) -> None:
    with small_disk(night.run.parent, mib=4):
        ended = night.job(keep=3)
        assert ended.code == 1
        night.says(ended.log, OPENED, COMMITTED.format(2), "MiB wanted and ", "one checkpoint more than `keep`")
        if ended.counts:
            assert ended.counts["save failed"] >= 1
        steps = asyncckpt.list_steps(night.run)
        assert steps
        assert invoke("doctor", night.run, "--mib", 0).exit_code in (0, 5)
        assert invoke("prune", night.run, "--latest", 1).exit_code == 0  # As the hint of the error says.
        night.is_queued_again(keep=1)


def test_the_disk_is_read_only(night: Night) -> None:
    night.job(steps=7)
    with read_only_mount(night.run):
        ended = night.job()
        assert ended.code == 1
        night.says(ended.log, "Read-only file system (mount it for writing")
        night.check([2, 4, 6], doctor=5)
    night.is_queued_again()


def test_the_directory_goes_away(night: Night) -> None:
    process = night.start(at={5: "wait"})
    night.wait_for()
    night.run.rename(night.run.parent / "gone")
    night.go_on()
    ended = night.ended(process)
    assert ended.code == 1
    night.says(ended.log, OPENED, COMMITTED.format(4), f"{night.run}")
    assert invoke("ls", night.run).exit_code == 3
    night.is_queued_again()


def test_the_clock_goes_back(night: Night) -> None:
    ended = night.job(at={5: "back"})
    assert (ended.code, ended.done) == (0, [9.0])
    night.check([4, 6, 8])


def test_a_worker_is_forked(night: Night) -> None:
    ended = night.job(at={4: "fork", 6: "fork"})
    assert (ended.code, ended.done) == (0, [9.0])
    night.check([4, 6, 8])


@pytest.mark.parametrize(
    ("away", "code"), [("for a while", 0), ("for longer than the deadline", 1), ("for these credentials", 1)]
)
def test_the_store_is_away(night: Night, store: tuple[Any, str], away: str, code: int) -> None:
    from tests.cloud.fault_proxy import Mishap

    proxy, url = store
    process = night.start(upload=url, deadline=8.0, at={3: "wait"})
    night.wait_for()
    answer = (403, "ExpiredToken") if "credentials" in away else (503, "SlowDown")
    proxy.fault = lambda request: Mishap(answer=answer) if request.method == "PUT" else None
    night.go_on()
    if away == "for a while":
        time.sleep(4.0)
        proxy.fault = lambda request: None
    ended = night.ended(process)
    proxy.fault = lambda request: None
    assert ended.code == code
    assert asyncckpt.list_steps(night.run)[-1] == 8  # Training did not wait, and nothing is lost on the disk.
    if away == "for a while":
        night.says(ended.log, "is not uploaded yet, the store does not answer", "the store answers again")
    else:
        night.says(ended.log, OPENED, "is not uploaded: ")
        if ended.counts:
            assert ended.counts["upload failed"] >= 1
    night.is_queued_again(upload=url)
    assert asyncckpt.list_steps(url)[-1] == 8
