"""One damaged checkpoint stays with what it may need, counts for no rule, and stops nobody else from going."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import asyncckpt
from asyncckpt import KeepPolicy
from asyncckpt.checkpoints import pin
from asyncckpt.commit.discover import KnownHeads
from asyncckpt.commit.retention import retain
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import CheckpointError, IOFailedError
from asyncckpt.model.result import PruneReport
from asyncckpt.storage.directory import Directory
from tests.chains.model import load
from tests.chains.written import Written
from tests.program import invoke
from tests.unit.commit.test_retention import before_the_first_file, delta, full, two_chains

STATE = {"n": 1}


def lose_file(made: Written) -> None:
    next(made.folder.iterdir()).unlink()


def lose_folder(made: Written) -> None:
    lose_file(made)
    made.folder.rmdir()


def cut_file(made: Written) -> None:
    shard = next(made.folder.iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])


def cut_manifest(made: Written) -> None:
    made.manifest.write_bytes(made.manifest.read_bytes()[:-9])


def empty_manifest(made: Written) -> None:
    made.manifest.write_bytes(b"")


def foreign_manifest(made: Written) -> None:
    made.manifest.write_bytes(b'{"steps": [1, 2]}\n')


def link_manifest(made: Written) -> None:
    made.manifest.unlink()
    made.manifest.symlink_to("elsewhere")


def folder_as_manifest(made: Written) -> None:
    made.manifest.unlink()
    made.manifest.mkdir()


def refuse_manifest(made: Written) -> None:
    """See `refusing`: to the owner of all files modes mean nothing."""


OF_FILES = [lose_file, lose_folder, cut_file]
OF_MANIFESTS = [cut_manifest, empty_manifest, foreign_manifest, link_manifest, folder_as_manifest, refuse_manifest]
Damage = Callable[[Written], None]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Damage, Written], None]:
    """Damage a checkpoint."""
    plain = Directory.read_file

    def act(damage: Damage, made: Written) -> None:
        def read(self: Directory, name: str, *, bytes_max: int) -> bytes:
            if name == made.manifest.name:
                raise IOFailedError(f"file {name!r} cannot be read: Permission denied", errno=13)
            return plain(self, name, bytes_max=bytes_max)

        if damage is refuse_manifest:
            monkeypatch.setattr(Directory, "read_file", read)
        damage(made)

    return act


def retained(root: Path, keep: int | KeepPolicy, *, dry_run: bool = False) -> PruneReport:
    """What was loaded here is not protected."""
    policy = KeepPolicy.of(keep)
    assert policy is not None
    with CheckpointRoot.for_reading(root) as opened:
        return retain(opened, KnownHeads(opened), policy, dry_run=dry_run)


def loadable(root: Path) -> list[int]:
    found = []
    for step in asyncckpt.list_steps(root):
        try:
            load(root, step)
        except CheckpointError:
            continue
        found.append(step)
    return found


@pytest.mark.parametrize("damage", [*OF_FILES, *OF_MANIFESTS])
def test_an_old_damaged_step_stays_and_all_newer_ones_come_and_go(
    tmp_path: Path, refusing: Callable[[Damage, Written], None], damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    found = {step: full(tmp_path, step) for step in range(4)}
    pin(tmp_path, 2)
    refusing(damage, found[2])
    left = [2] if damage in OF_FILES else [0, 1, 2]
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=2) as saver:
        for step in range(10, 16):
            saver.save(step)
            saver.wait_idle()
            assert asyncckpt.list_steps(tmp_path) == [*left, *([3, 10] if step == 10 else [step - 1, step])]
    assert caplog.text.count("step 2, which cannot be used") == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("damage", OF_MANIFESTS)
def test_what_an_unreadable_delta_may_need_stays(
    tmp_path: Path, refusing: Callable[[Damage, Written], None], damage: Damage
) -> None:
    found = two_chains(tmp_path)
    refusing(damage, found[3])
    report = retained(tmp_path, 1)
    assert report == PruneReport(
        removed=(),
        kept={
            **{step: ("perhaps base of 3",) for step in (1, 2)},
            3: ("damaged",),
            **{step: ("base of 7",) for step in (4, 5, 6)},
            7: ("latest",),
        },
        bytes=0,
        damaged=report.damaged,
    )
    assert report.damaged.keys() == {3}
    full(tmp_path, 8)
    assert retained(tmp_path, 1).removed == (4, 5, 6, 7)


@pytest.mark.parametrize("damage", [*OF_FILES, *OF_MANIFESTS])
@pytest.mark.parametrize("step", [4, 5, 6, 7])
def test_a_sound_one_stays_in_place_of_a_damaged_one(
    tmp_path: Path, refusing: Callable[[Damage, Written], None], damage: Damage, step: int
) -> None:
    """An older checkpoint may be the only one that loads."""
    found = two_chains(tmp_path)
    refusing(damage, found[step])
    before = loadable(tmp_path)
    report = retained(tmp_path, 1)
    assert "latest" in report.kept[before[-1]]
    assert {4, 5, 6, 7} <= {*asyncckpt.list_steps(tmp_path)}, "what the newest names"
    left = loadable(tmp_path)
    assert left[-1] == before[-1]
    assert report.removed == ((1, 2, 3) if step > 4 and damage in OF_FILES else ())
    full(tmp_path, 8)
    full(tmp_path, 9)
    report = retained(tmp_path, 1)
    assert asyncckpt.list_steps(tmp_path) == ([9] if damage in OF_FILES else [*range(1, step + 1), 9])


def test_each_rule_keeps_a_sound_step_in_place_of_a_damaged_one(tmp_path: Path) -> None:
    for step in range(30):
        made = full(tmp_path, step)
        if step % 10 < 2:
            lose_file(made)
    report = retained(tmp_path, KeepPolicy(latest=1, every_steps=10))
    assert asyncckpt.list_steps(tmp_path) == [0, 1, 2, 10, 11, 12, 20, 21, 22, 29]
    assert report.kept[0] == ("damaged",)
    assert report.kept[2] == ("every_steps",)


def test_a_delta_upon_a_step_that_was_rewritten_keeps_what_it_names(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    found[6].manifest.unlink()
    full(tmp_path, 6)
    assert retained(tmp_path, 1).kept == {
        **{step: ("base of 7",) for step in (4, 5)},
        6: ("latest",),
        7: ("damaged",),
    }
    load(tmp_path, 6)


def test_a_compacted_step_whose_own_manifest_is_damaged(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    full(tmp_path, 6, replaces=found[6].digest)
    cut_manifest(found[6])
    report = retained(tmp_path, 1)
    assert (report.removed, report.damaged.keys()) == ((), {6})
    full(tmp_path, 8)
    assert retained(tmp_path, 1).removed == (7,)
    load(tmp_path, 6)


def test_all_are_damaged(tmp_path: Path) -> None:
    for step in range(4):
        lose_file(full(tmp_path, step))
    assert retained(tmp_path, 1).removed == ()
    assert retained(tmp_path, 1, dry_run=True).damaged.keys() == {1, 2, 3}, "the last one is all there is"


def test_a_delta_that_is_published_meanwhile_keeps_what_it_builds_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process, whose lock does not work."""
    found = two_chains(tmp_path)
    full(tmp_path, 8)
    before_the_first_file(monkeypatch, lambda: delta(tmp_path, 9, found[7].chain))
    assert retained(tmp_path, 1).removed == (1, 2, 3, 8)
    load(tmp_path, 9)


def test_the_command_says_what_is_damaged(tmp_path: Path) -> None:
    for step in range(3):
        made = full(tmp_path, step)
    lose_file(made)
    result = invoke("prune", tmp_path, "--latest", 1)
    assert result.exit_code == 1
    assert result.stdout.startswith("removed 1 checkpoint: 0, ")
    assert "step 2 cannot be used, and counts for no rule: shard file" in result.stdout
    assert os.listdir(tmp_path / "manifests") != []
