"""Checkpoints that somebody names are removed, all or none, and never one that a delta which stays builds upon."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from asyncckpt import KeepPolicy
from asyncckpt.checkpoints import collect_garbage, pin, prune, remove, remove_after
from asyncckpt.commit import removal
from asyncckpt.commit.attempt import claims
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import ConflictError, CorruptError, NotFoundError, UsageError
from asyncckpt.storage.directory import Directory
from tests.chains.model import load
from tests.unit.commit.test_retention import before_the_first_file, delta, folders, full, names, two_chains

CHANGES = ("move", "create_file", "remove_file", "sync", "remove_folder")


class Killed(BaseException):
    """The process ends here."""


def kill_at(number: int, act: Callable[[], object]) -> bool:
    """Act, and end before the change of this number, and before all later ones. Return whether there are so many."""
    count = itertools.count(1)

    def mortal(plain: Callable[..., object]) -> Callable[..., object]:
        def run(self: Directory, *arguments: Any, **options: Any) -> object:
            if next(count) >= number:
                raise Killed
            return plain(self, *arguments, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for change in CHANGES:
            patch.setattr(Directory, change, mortal(getattr(Directory, change)))
        try:
            act()
        except Killed:
            removal.under_way.clear()
            return True
    return False


def test_what_is_named_goes(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    assert remove(tmp_path, [7, 3, 6]) == [3, 6, 7]
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 4, 5]
    assert folders(tmp_path) == {found[step].folder.name for step in (1, 2, 4, 5)}
    assert remove(tmp_path, 5) == [5]
    assert remove(tmp_path, []) == []
    assert remove(tmp_path, iter([1, 2])) == [1, 2]
    assert load(tmp_path)


def test_a_base_of_what_stays_does_not_go(tmp_path: Path) -> None:
    two_chains(tmp_path)
    before = names(tmp_path)
    with pytest.raises(UsageError, match=r"step 5 of .* is the base of step 6, 7, which would stay .*compact step 6"):
        remove(tmp_path, [3, 4, 5])
    with pytest.raises(UsageError, match=r"step 1 of .* the base of step 2, 3"):
        remove(tmp_path, [1, 4, 5, 6, 7])
    assert names(tmp_path) == before
    assert remove(tmp_path, [4, 5, 6, 7, 1, 2, 3]) == [1, 2, 3, 4, 5, 6, 7]
    assert folders(tmp_path) == set()


def test_a_compacted_step_frees_what_it_was_built_upon(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    full(tmp_path, 6, replaces=found[6].digest)
    assert remove(tmp_path, [4, 5]) == [4, 5]
    assert load(tmp_path, 7).keys() == {0, 7}
    with pytest.raises(UsageError, match="step 6"):
        remove(tmp_path, 6)
    assert remove(tmp_path, [6, 7]) == [6, 7]
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 3]
    assert len(folders(tmp_path)) == 3


def test_of_a_broken_chain_all_that_it_names_is_needed(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    found[6].manifest.unlink()
    with pytest.raises(UsageError, match=r"step 5 .*the base of step 7"):
        remove(tmp_path, 5)
    assert remove(tmp_path, [5, 7]) == [5, 7]


@pytest.mark.parametrize("act", [lambda root: remove(root, [3, 9]), lambda root: remove_after(root, 9)])
def test_a_step_that_is_not_there(tmp_path: Path, act: Callable[[Path], object]) -> None:
    two_chains(tmp_path)
    with pytest.raises(NotFoundError, match="step 9 is not in"):
        act(tmp_path)
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("steps", [-1, "12", [1, None], True, 1.0, None])
def test_wrong_steps(tmp_path: Path, steps: Any) -> None:
    two_chains(tmp_path)
    with pytest.raises(UsageError, match="step must be"):
        remove(tmp_path, steps)


def test_what_is_newer_goes(tmp_path: Path) -> None:
    two_chains(tmp_path)
    assert remove_after(tmp_path, 5) == [6, 7]
    assert remove_after(tmp_path, 5) == []
    assert remove_after(tmp_path, 2) == [3, 4, 5]
    assert load(tmp_path)
    assert asyncckpt.list_steps(tmp_path) == [1, 2]


def test_what_a_save_of_this_process_needs_stays(tmp_path: Path) -> None:
    two_chains(tmp_path)
    with CheckpointRoot.for_reading(tmp_path) as root, claims.save(root, 8) as claim:
        with pytest.raises(ConflictError, match=r"step 8 .* is in use"):
            remove_after(tmp_path, 2)
        claim.parents[:] = [7]
        with pytest.raises(ConflictError, match=r"step 7 .* is in use"):
            remove(tmp_path, [7])
        assert remove(tmp_path, 3) == [3]
    assert remove_after(tmp_path, 2) == [4, 5, 6, 7]


def test_killed_anywhere_it_leaves_one_history(tmp_path: Path) -> None:
    """What is left, also by the sweep of the next writer, is the history up to some step; and it can be done again."""
    two_chains(tmp_path / "model")
    left = set()
    for at in itertools.count(1):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "model", root)
        is_killed = kill_at(at, lambda root=root: remove_after(root, 2))
        for finish in (lambda: None, lambda root=root: collect_garbage(root)):
            finish()
            steps = asyncckpt.list_steps(root)
            assert steps == [1, 2, 3, 4, 5, 6, 7][: max(2, len(steps))]
            for step in steps:
                load(root, step)
        left.add(len(steps))
        assert len(folders(root)) == len(steps)
        assert names(root) == {f"{step:012d}.json" for step in steps}
        remove_after(root, 2)
        assert asyncckpt.list_steps(root) == [1, 2]
        if not is_killed:
            break
    assert at > 20
    assert left == {2, 3, 4, 5, 6, 7}


def test_what_comes_meanwhile_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delta upon what is about to go is published without a lock, before that is decided."""
    found = two_chains(tmp_path)
    before_the_first_file(monkeypatch, lambda: delta(tmp_path, 8, found[7].chain))
    with pytest.raises(UsageError, match=r"step 7 .* the base of step 8"):
        remove(tmp_path, 7)
    load(tmp_path, 8)


def test_a_damaged_checkpoint_can_be_removed(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    found[5].manifest.write_bytes(found[5].manifest.read_bytes()[:-9])
    next(found[7].folder.iterdir()).unlink()
    with pytest.raises(CorruptError, match="step 5 stays, and its base is unknown"):
        remove(tmp_path, 3)
    assert remove(tmp_path, [5, 6, 7]) == [5, 6, 7]
    assert folders(tmp_path) == {found[step].folder.name for step in (1, 2, 3, 4)}
    assert names(tmp_path) == {f"{step:012d}.json" for step in (1, 2, 3, 4)}


def test_killed_anywhere_retention_leaves_what_it_keeps(tmp_path: Path) -> None:
    two_chains(tmp_path / "model")
    pin(tmp_path / "model", 2)
    for at in itertools.count(1):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "model", root)
        is_killed = kill_at(at, lambda root=root: prune(root, KeepPolicy(every_steps=5)))
        collect_garbage(root)
        assert {1, 2, 4, 5, 6, 7} <= {*asyncckpt.list_steps(root)}
        prune(root, KeepPolicy(every_steps=5))
        for step in asyncckpt.list_steps(root):
            load(root, step)
        assert names(root) == {"000000000002.pin", *(f"{step:012d}.json" for step in (1, 2, 4, 5, 6, 7))}
        if not is_killed:
            break
    assert at > 5
