"""What people, file systems and other versions do to directories at night, beside what is in test_incidents.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bad_input.crafted import Crafted
from tests.night.nights import COMMITTED, OPENED, PASSED_BY, RESTORED, Night
from tests.program import invoke
from tests.worlds.directories import manifest_path

pytestmark = [pytest.mark.slow, pytest.mark.any_core]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 512)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    """As a file system does that loses power before it has written what it was told to sync."""
    path.write_bytes(bytes(path.stat().st_size))


def test_a_manifest_was_removed_by_hand(night: Night) -> None:
    """That is the removal of its step: the job goes on from the one before, and what is left of it goes."""
    night.job(steps=7)
    manifest_path(night.run, 6).unlink()
    night.check([2, 4])
    night.says(night.is_queued_again().log, OPENED, RESTORED.format(4), COMMITTED.format(6), COMMITTED.format(8))
    night.check([4, 6, 8])
    assert len(list(night.run.glob("data/*"))) == 3


@pytest.mark.parametrize(
    ("where", "harm"),
    [("data", Path.unlink), ("data", cut), ("data", zero), ("manifest", empty), ("manifest", zero)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_newest_is_harmed(night: Night, where: str, harm: Callable[[Path], None]) -> None:
    """Without fallback the job ends, and says what to do; with it, it goes on from the step before."""
    night.job(steps=7)
    path = night.file_of(6) if where == "data" else manifest_path(night.run, 6)
    harm(path)
    ended = night.job()
    named = path.relative_to(night.run) if where == "data" else path.name
    night.says_of_error(ended, "CorruptError", str(named))
    night.says(
        ended.log, "step 6 of '{run}' is damaged; restore(fallback=True) puts it aside, and continues from step 4"
    )
    shown = invoke("verify", night.run, "--all")
    assert shown.exit_code == 1
    assert path.name in shown.output
    again = night.is_queued_again(fallback=True)
    night.says(again.log, OPENED, PASSED_BY, RESTORED.format(4), "WARNING damaged steps of {run} are put aside")
    assert any("passed by" in line and str(named) in line for line in again.log)
    night.check([4, 6, 8])


def test_all_are_damaged(night: Night) -> None:
    """Nothing sound is there to go on from: the job must not begin from step 0 as if nothing had been."""
    night.job(steps=7)
    for step in (2, 4, 6):
        night.damage(step)
    for fallback in (False, True):
        ended = night.job(fallback=fallback)
        night.says_of_error(ended, "CorruptError", "data/00000000000")
        assert any("step 6 of " in line and str(night.run) in line for line in ended.log), ended.log
        night.check([2, 4, 6], damaged=True)


def test_a_newer_version_has_written_there(night: Night) -> None:
    """No fallback passes that by: it is not damaged."""
    night.job(steps=7)
    crafted = Crafted(night.run, 6)
    ours = crafted.raw()
    crafted.edit(lambda document: document.update(version=document["version"] + 8))
    ended = night.job(fallback=True)
    night.says_of_error(ended, "IncompatibleError", "000000000006.json", "version")
    assert not [line for line in ended.log if "passed by" in line]
    assert invoke("verify", night.run, "--all").exit_code == 4
    crafted.write_raw(ours)
    night.says(night.is_queued_again(fallback=True).log, RESTORED.format(6))


def test_other_files_lie_there(night: Night) -> None:
    """What is not ours is passed over by everything, and stays."""
    night.job(steps=7)
    others = [
        "notes.txt",
        "last.ckpt",
        ".nfs000000000001",
        "data/notes.txt",
        "manifests/latest",
        "manifests/6.json.bak",
    ]
    for name in others:
        (night.run / name).write_text("not ours")
    (night.run / "lost+found").mkdir()
    night.check([2, 4, 6])
    night.says(night.is_queued_again().log, RESTORED.format(6), COMMITTED.format(8))
    night.check([4, 6, 8])
    assert [name for name in [*others, "lost+found"] if not (night.run / name).exists()] == []


def test_the_path_is_a_file(night: Night) -> None:
    night.run.write_text("of another program")
    ended = night.job()
    night.says_of_error(ended, "UsageError", "{run}", "not a folder")
    assert night.run.read_text() == "of another program"
    night.run.unlink()
    night.is_queued_again()
