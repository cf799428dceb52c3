"""Pins: a pinned step stays, whatever happens beside it and wherever somebody is killed."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import asyncckpt
from asyncckpt.checkpoints import collect_garbage, pin, pinned_steps, prune, remove, remove_after, unpin
from asyncckpt.commit import removal
from asyncckpt.errors import ConflictError, CorruptError, NotFoundError, UsageError
from asyncckpt.format.names import Mark, pin_name
from asyncckpt.storage.directory import Directory
from tests.chains.model import load
from tests.unit.commit.test_retention import full, keep_latest, names, retain_beside, sweep_names, two_chains
from tests.unit.commit.test_retention_of_named_steps import kill_at

WAIT_S_MAX = 60.0


def test_a_pinned_step_stays_with_what_it_builds_upon(tmp_path: Path) -> None:
    two_chains(tmp_path)
    pin(tmp_path, 2)
    pin(tmp_path, 2)
    assert asyncckpt.describe(tmp_path, 2).pinned
    assert not asyncckpt.describe(tmp_path, 3).pinned
    report = prune(tmp_path, 1)
    assert report.removed == (3,)
    assert report.kept == {
        1: ("base of 2",), 2: ("pinned",), 4: ("base of 7",), 5: ("base of 7",), 6: ("base of 7",), 7: ("latest",)
    }  # fmt: skip
    load(tmp_path, 2)
    assert unpin(tmp_path, 2)
    assert not unpin(tmp_path, 2)
    assert prune(tmp_path, 1, dry_run=True).removed == prune(tmp_path, 1).removed


def test_a_pin_survives_compaction(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    pin(tmp_path, 3)
    full(tmp_path, 3, replaces=found[3].digest)
    assert prune(tmp_path, 1).removed == (1, 2)
    assert asyncckpt.list_steps(tmp_path) == [3, 4, 5, 6, 7]
    assert names(tmp_path) == {"000000000003.full.json", "000000000003.pin", *(f"{n:012d}.json" for n in (4, 5, 6, 7))}


def test_a_pinned_step_is_removed_only_when_that_is_said(tmp_path: Path) -> None:
    two_chains(tmp_path)
    pin(tmp_path, 6)
    for act in (lambda: remove(tmp_path, [3, 6, 7]), lambda: remove_after(tmp_path, 4)):
        with pytest.raises(UsageError, match=r"step 6 of .* is pinned"):
            act()
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert remove_after(tmp_path, 4, even_pinned=True) == [5, 6, 7]
    full(tmp_path, 6)
    assert pinned_steps(tmp_path) == [], "the pin was of another checkpoint"


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    two_chains(tmp_path)
    for act in (pin, asyncckpt.describe):
        with pytest.raises(NotFoundError, match="step 9 is not in"):
            act(tmp_path, 9)
    assert not unpin(tmp_path, 9)
    assert len(names(tmp_path)) == 7


def test_a_step_that_is_being_removed_cannot_be_pinned(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    (tmp_path / "manifests" / Mark("ab" * 16, found[3].folder.name).name).touch()
    with pytest.raises(ConflictError, match=r"step 3 .* is being removed .* was killed: asyncckpt gc"):
        pin(tmp_path, 3)
    collect_garbage(tmp_path)  # It takes LOCK.
    pin(tmp_path, 3)
    assert pinned_steps(tmp_path) == [3]


def test_a_damaged_step_cannot_be_pinned(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    found[7].manifest.write_bytes(b"{}")
    with pytest.raises(CorruptError):
        pin(tmp_path, 7)
    assert pinned_steps(tmp_path) == []


def test_pinned_at_any_moment_of_a_retention_it_stays_or_is_told(tmp_path: Path) -> None:
    """Whoever pins has no lock: what it has pinned stays, and otherwise it gets an error."""
    two_chains(tmp_path / "model")
    outcomes = set()
    for at in itertools.count(1):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "model", root)
        told: list[bool] = []

        def pin_one(root: Path = root, told: list[bool] = told) -> None:
            try:
                pin(root, 2)
            except (ConflictError, NotFoundError):
                told.append(True)

        is_reached = retain_beside(root, pin_one, at=at)
        steps = asyncckpt.list_steps(root)
        is_kept = is_reached and (not told or 2 in steps)
        assert pinned_steps(root) == ([2] if is_kept else [])
        assert steps == ([1, 2, 4, 5, 6, 7] if is_kept else [4, 5, 6, 7])
        for step in steps:
            load(root, step)
        outcomes.add(bool(told))
        if not is_reached:
            break
    assert outcomes == {True, False}


def pin_beside(root: Path, other: Callable[[], None], *, begins: int, meets: int, ends: int) -> tuple[bool, list[str]]:
    """Retain, and pin step 1 from its operation `begins` to `ends`; behind `meets` operations of that, another acts.

    Returns whether the pin was acknowledged, and its operations before the other one acted.
    """
    met, may_end, made = threading.Event(), threading.Event(), list[str]()
    count, is_acknowledged = 0, False

    def slow() -> None:
        nonlocal is_acknowledged
        with contextlib.suppress(ConflictError, NotFoundError):
            pin(root, 1)
            is_acknowledged = True
        met.set()

    pinning = threading.Thread(target=slow)

    def watched(name: str, plain: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **options: object) -> object:
            nonlocal count
            if threading.current_thread() is pinning and len(made) <= meets:
                made.append(name)
                if len(made) > meets:
                    other()
                    met.set()
                    may_end.wait(WAIT_S_MAX)
            elif threading.current_thread() is retaining:
                count += 1
                if count == begins:
                    pinning.start()
                    assert met.wait(WAIT_S_MAX)
                if count == ends:
                    may_end.set()
                    pinning.join(WAIT_S_MAX)
            return plain(*arguments, **options)

        return run

    retaining = threading.Thread(target=keep_latest, args=[root, 1])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("names", "create_file", "read_file", "remove_file", "sync", "move"):
            patch.setattr(Directory, name, watched(name, getattr(Directory, name)))
        retaining.start()
        retaining.join(WAIT_S_MAX)
        may_end.set()
        if pinning.ident is not None:
            pinning.join(WAIT_S_MAX)
        assert not retaining.is_alive()
        assert not pinning.is_alive()
    return is_acknowledged, made[:meets]


@pytest.mark.parametrize("other", [pin, unpin])
def test_a_pin_that_was_acknowledged_holds_whoever_else_pins_or_unpins(
    tmp_path: Path, other: Callable[[Path, int], object]
) -> None:
    """Three at once: a retention, a slow one who pins, and in the middle of that one another who pins or unpins."""
    full(tmp_path / "model", 1)
    full(tmp_path / "model", 2)
    outcomes = set()
    # From each operation of the retention that matters, behind each of the pin, for some operations.
    for begins, meets, lasts in itertools.product(range(1, 11), range(7), (0, 1, 2, 4, 8)):
        root = tmp_path / "disturbed"
        shutil.copytree(tmp_path / "model", root)
        acknowledged: list[bool] = []

        def act(root: Path = root, acknowledged: list[bool] = acknowledged) -> None:
            with contextlib.suppress(ConflictError, NotFoundError):
                other(root, 1)
                acknowledged.append(True)

        is_acknowledged, made = pin_beside(root, act, begins=begins, meets=meets, ends=begins + lasts)
        is_undone = other is unpin and "create_file" in made
        if (is_acknowledged and not is_undone) or (acknowledged and other is pin):
            assert pinned_steps(root) == [1], (begins, meets, lasts)
        outcomes.add((is_acknowledged, bool(acknowledged)))
        shutil.rmtree(root)
    assert outcomes >= {(True, True), (False, True)}


@pytest.mark.parametrize(
    "act",
    [lambda root: pin(root, 2), lambda root: unpin(root, 6), lambda root: remove_after(root, 4, even_pinned=True)],
)
def test_killed_anywhere(tmp_path: Path, act: Callable[[Path], object]) -> None:
    """What is pinned before and not unpinned stays pinned, and a step that is saved anew is not."""
    two_chains(tmp_path / "model")
    pin(tmp_path / "model", 6)
    pin(tmp_path / "model", 3)
    for at in itertools.count(1):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "model", root)
        is_killed = kill_at(at, lambda root=root: act(root))
        steps = asyncckpt.list_steps(root)
        assert {3} <= {*pinned_steps(root)} <= {2, 3, 6}
        for step in steps:
            load(root, step)
        sweep_names(root)
        sweep_names(root)
        pinned = {int(name[:12]) for name in names(root) if name.endswith(".pin")}
        assert pinned == {*pinned_steps(root)}
        if not is_killed:
            break
    assert at >= 2


def test_the_pin_of_a_step_that_is_gone_is_swept(tmp_path: Path) -> None:
    two_chains(tmp_path)
    (tmp_path / "manifests" / pin_name(9)).touch()
    (tmp_path / "manifests" / pin_name(7)).touch()
    assert pinned_steps(tmp_path) == [7]
    assert collect_garbage(tmp_path).files_count == 1
    assert pinned_steps(tmp_path) == [7]
    assert pin_name(9) not in names(tmp_path)


def test_pinning_needs_no_lock_and_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_chains(tmp_path)
    synced: list[str] = []
    sync = Directory.sync
    monkeypatch.setattr(Directory, "sync", lambda self: synced.append(self.path.name) or sync(self))
    pin(tmp_path, 1)
    unpin(tmp_path, 1)
    assert synced == ["manifests", "manifests"]
    assert not (tmp_path / "LOCK").exists()
    assert removal.under_way == set()
