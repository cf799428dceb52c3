"""Retention of chains: what a kept checkpoint builds upon stays, and nothing else; at no moment is a chain broken."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt import KeepPolicy
from asyncckpt.commit import removal, retention
from asyncckpt.commit.discover import KnownHeads, being_removed
from asyncckpt.commit.removal import sweep
from asyncckpt.commit.retention import retain
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.store_root import StoreRoot
from asyncckpt.errors import IOFailedError
from asyncckpt.format.head import ParentFacts
from asyncckpt.format.names import Mark
from asyncckpt.storage.directory import Directory
from tests.chains.model import layer_of, load, row
from tests.chains.written import Written, write


def full(root: Path, step: int, *, replaces: str | None = None) -> Written:
    return write(root, step, {"user": layer_of({0: row(step)})}, replaces=replaces)


def delta(root: Path, step: int, chain: tuple[ParentFacts, ...]) -> Written:
    return write(root, step, {"user": layer_of({step: row(step)})}, parents=chain)


def keep_latest(root: Path, count: int, *protected: int) -> list[int]:
    with CheckpointRoot.for_reading(root) as opened:
        policy = KeepPolicy(latest=count)
        return list(retain(opened, KnownHeads(opened), policy, protected=lambda: protected).removed)


def before_the_first_file(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let others do something right before the next file is created."""
    create = Directory.create_file

    def create_behind(self: Directory, name: str, **options: bool) -> tuple[int, bool]:
        monkeypatch.setattr(Directory, "create_file", create)
        act()
        return create(self, name, **options)

    monkeypatch.setattr(Directory, "create_file", create_behind)


def folders(root: Path) -> set[str]:
    return {path.name for path in (root / "data").iterdir()}


def names(root: Path) -> set[str]:
    return {path.name for path in (root / "manifests").iterdir()}


def two_chains(root: Path) -> dict[int, Written]:
    """1 (full) <- 2 <- 3, and 4 (full) <- 5 <- 6 <- 7."""
    found: dict[int, Written] = {}
    for step in range(1, 8):
        found[step] = full(root, step) if step in (1, 4) else delta(root, step, found[step - 1].chain)
    return found


def test_a_kept_delta_keeps_what_it_builds_upon(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    assert keep_latest(tmp_path, 1) == [1, 2, 3]
    assert asyncckpt.list_steps(tmp_path) == [4, 5, 6, 7]
    assert folders(tmp_path) == {found[step].folder.name for step in (4, 5, 6, 7)}
    for step in (4, 5, 6, 7):
        load(tmp_path, step)


def test_a_protected_step_keeps_its_chain_and_nothing_above(tmp_path: Path) -> None:
    two_chains(tmp_path)
    assert keep_latest(tmp_path, 1, 2, 99) == [3]
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 4, 5, 6, 7]


def test_full_checkpoints_free_the_chains_before_them(tmp_path: Path) -> None:
    two_chains(tmp_path)
    full(tmp_path, 8)
    assert keep_latest(tmp_path, 1) == [1, 2, 3, 4, 5, 6, 7]
    assert len(folders(tmp_path)) == 1


def test_nothing_to_do(tmp_path: Path) -> None:
    two_chains(tmp_path)
    assert keep_latest(tmp_path, 7) == []
    assert keep_latest(tmp_path, 4) == [1, 2, 3]
    assert keep_latest(tmp_path, 3) == []


def test_compaction_frees_what_lies_below(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    compacted = full(tmp_path, 6, replaces=found[6].digest)
    assert keep_latest(tmp_path, 2) == [1, 2, 3, 4, 5]
    assert names(tmp_path) == {"000000000006.full.json", "000000000007.json"}
    assert folders(tmp_path) == {compacted.folder.name, found[7].folder.name}
    assert load(tmp_path, 7) == {0: row(6), 7: row(7)}


def test_compacted_step_loses_its_own_manifest_although_it_is_kept(tmp_path: Path) -> None:
    """Not more checkpoints than may be, but one has two manifests."""
    found = two_chains(tmp_path)
    compacted = full(tmp_path, 7, replaces=found[7].digest)
    assert keep_latest(tmp_path, 10) == []
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert "000000000007.json" not in names(tmp_path)
    assert folders(tmp_path) == {found[step].folder.name for step in range(1, 7)} | {compacted.folder.name}
    assert load(tmp_path, 7) == {0: row(7)}


def test_a_compacted_step_without_its_folder_hides_nothing(tmp_path: Path) -> None:
    """It was swept away by a second writer before it was published: what it was to stand for is all there is."""
    found = two_chains(tmp_path)
    before = {step: load(tmp_path, step) for step in (5, 6, 7)}
    shutil.rmtree(full(tmp_path, 6, replaces=found[6].digest).folder)
    assert {step: load(tmp_path, step) for step in (5, 6, 7)} == before
    assert keep_latest(tmp_path, 2) == [1, 2, 3]
    assert names(tmp_path) == {f"{step:012d}.json" for step in (4, 5, 6, 7)}
    assert {step: load(tmp_path, step) for step in (5, 6, 7)} == before


def test_old_compacted_step_goes_with_both_manifests(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    full(tmp_path, 3, replaces=found[3].digest)
    assert keep_latest(tmp_path, 1) == [1, 2, 3]
    assert asyncckpt.list_steps(tmp_path) == [4, 5, 6, 7]
    assert len(folders(tmp_path)) == 4


def test_no_delta_is_ever_without_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed behind any removal, with all or none of what was not yet synced done: every step listed can be loaded."""
    found = two_chains(tmp_path)
    full(tmp_path, 6, replaces=found[6].digest)
    full(tmp_path, 8)
    done: list[str | None] = []  # Names of manifests that went, None for a sync.
    plain = {name: getattr(Directory, name) for name in ("move", "remove_file", "sync")}

    def noted(operation: str) -> Callable[..., object]:
        def run(self: Directory, *names: str, **options: object) -> object:
            done.append(names[0] if names else None)
            result: object = plain[operation](self, *names, **options)
            for step in asyncckpt.list_steps(tmp_path):
                load(tmp_path, step)
            return result

        return run

    for operation in plain:
        monkeypatch.setattr(Directory, operation, noted(operation))
    assert keep_latest(tmp_path, 1) == [1, 2, 3, 4, 5, 6, 7]
    wanted = ["7", "6", "6.full", "5", "4", "3", "2", "1"]
    manifests = [f"{name[0]:0>12}{name[1:]}.json" for name in wanted]
    assert [name for name in done if name in manifests] == manifests
    for at, name in enumerate(done):
        assert name not in manifests or done[at + 1] is None, "a removal is durable before the parents go"


def leave_marks(root: Path, *left: Written, is_decided: bool) -> str:
    """What a crash leaves; the id of the removal."""
    number = uuid.uuid4().hex
    for made in left:
        (root / "manifests" / Mark(number, made.folder.name, is_decided=is_decided).name).touch()
    return number


@pytest.mark.parametrize("is_decided", [False, True])
def test_marks_that_a_crash_has_left_are_forgotten_by_who_takes_the_lock(is_decided: bool, tmp_path: Path) -> None:
    """Decided ones, too, which an earlier version has left; what they name stays."""
    leave_marks(tmp_path, *two_chains(tmp_path).values(), is_decided=is_decided)
    assert sweep_names(tmp_path) == []
    for _ in range(2):
        for step in range(1, 8):
            load(tmp_path, step)
        asyncckpt.Saver(path=tmp_path, tensors={"n": 1}).close()
        assert names(tmp_path) == {f"{step:012d}.json" for step in range(1, 8)}


def test_of_a_step_that_was_saved_anew_only_the_old_attempt_goes(tmp_path: Path) -> None:
    old = full(tmp_path, 1)
    old.manifest.unlink()
    anew = full(tmp_path, 1)
    assert sweep_names(tmp_path) == [old.folder.name]
    assert (names(tmp_path), folders(tmp_path)) == ({anew.manifest.name}, {anew.folder.name})
    load(tmp_path, 1)


def test_marks_of_a_removal_of_this_process_stay(tmp_path: Path) -> None:
    number = leave_marks(tmp_path, *two_chains(tmp_path).values(), is_decided=False)
    removal.under_way.add(number)
    try:
        before = names(tmp_path)
        asyncckpt.Saver(path=tmp_path, tensors={"n": 1}).close()
        assert sweep_names(tmp_path) == []
        assert names(tmp_path) == before
    finally:
        removal.under_way.clear()


def test_a_mark_that_is_renamed_while_it_is_looked_for_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a store. A listing may have been where the new name is before, and where the old one was after."""
    made = full(tmp_path, 1)
    leave_marks(tmp_path, made, is_decided=True)
    plain, looks = Directory.names, iter(range(1))

    def names_without(self: Directory) -> list[str]:
        return [] if next(looks, None) is not None else plain(self)

    monkeypatch.setattr(Directory, "names", names_without)
    monkeypatch.setattr(CheckpointRoot, "looks_for_marks", StoreRoot.looks_for_marks)
    with CheckpointRoot.for_reading(tmp_path) as root:
        assert being_removed(root) == {made.folder.name}


def test_no_delta_is_left_without_its_parents_whoever_else_sweeps(tmp_path: Path) -> None:
    """Another process, whose lock does not work, sweeps at any moment of a retention."""
    is_done = True
    for at in range(1, 1000):
        if not is_done:
            break
        root = tmp_path / str(at)
        two_chains(root)
        is_done = retain_beside(root, lambda root=root: sweep_names(root), at=at)
        for step in asyncckpt.list_steps(root):
            load(root, step)
        assert {4, 5, 6, 7} <= set(asyncckpt.list_steps(root))
    assert at > 20


def retain_beside(root: Path, act: Callable[[], object], *, at: int) -> bool:
    """Retain, and act as another process before the operation of this number. Return whether there are so many."""
    count = 0

    def watched(plain: Callable[..., object]) -> Callable[..., object]:
        def run(self: Directory, *arguments: str, **options: object) -> object:
            nonlocal count
            count += 1
            if count == at:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(removal, "under_way", set())
                    act()
            return plain(self, *arguments, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for operation in ("move", "create_file", "remove_file", "sync", "names", "remove_folder"):
            patch.setattr(Directory, operation, watched(getattr(Directory, operation)))
        with contextlib.suppress(asyncckpt.CheckpointError):  # What it is about was taken from it.
            keep_latest(root, 1)
    return count >= at


def test_a_sweep_looks_no_closer_the_more_checkpoints_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    stat = Directory.entry_status
    monkeypatch.setattr(Directory, "entry_status", lambda self, name: looks.append(name) or stat(self, name))
    two_chains(tmp_path)
    looks.clear()
    with CheckpointRoot.for_reading(tmp_path) as root:
        sweep(root, KnownHeads(root))
    assert looks == []


@pytest.mark.parametrize("seed", range(5))
def test_random_retention_leaves_what_loads(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    found: dict[int, Written] = {}
    expected: dict[int, object] = {}
    for step in range(1, 25):
        newest = found.get(step - 1)
        if newest is None or choose.random() < 0.2:
            found[step] = full(tmp_path, step)
        else:
            found[step] = delta(tmp_path, step, newest.chain)
        expected[step] = load(tmp_path, step)
        if choose.random() < 0.2:
            old = choose.choice(asyncckpt.list_steps(tmp_path))
            if found[old].head.kind == "delta" and found[old].manifest.exists():
                rows = load(tmp_path, old)
                if f"{old:012d}.full.json" not in names(tmp_path):
                    write(tmp_path, old, {"user": layer_of(rows)}, replaces=found[old].digest)
        if choose.random() < 0.3:
            keep_latest(tmp_path, choose.randrange(1, 6), choose.randrange(1, 25))
            left = asyncckpt.list_steps(tmp_path)
            assert step in left
            for one in left:
                assert load(tmp_path, one) == expected[one], (seed, step, one)
    assert sweep_names(tmp_path) == []


def sweep_names(root: Path, *keep: str) -> list[str]:
    with CheckpointRoot.for_reading(root) as opened:
        return sweep(opened, KnownHeads(opened), keep_attempts=keep)


def test_sweep_knows_both_manifests_of_a_step(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    compacted = full(tmp_path, 3, replaces=found[3].digest)
    stray = full(tmp_path / "elsewhere", 3)
    target = tmp_path / "data" / stray.folder.name
    stray.folder.rename(target)
    assert sweep_names(tmp_path, stray.head.attempt) == []
    assert sweep_names(tmp_path) == [stray.folder.name]
    found[3].manifest.unlink()
    assert sweep_names(tmp_path) == [found[3].folder.name]
    assert compacted.folder.name in folders(tmp_path)
    assert load(tmp_path, 3) == {0: row(3)}


def test_a_step_whose_manifest_cannot_be_read_any_more_keeps_no_other(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    going = [found[step].folder.name for step in (1, 2, 3)]

    def damage() -> bool:
        return bool(found[3].manifest.write_bytes(b"{}"))

    refused = pytest.raises(IOFailedError, match=f"1 folders cannot be removed, .*{found[3].folder.name}")
    with CheckpointRoot.for_reading(tmp_path) as root, refused:
        removal.remove(root, KnownHeads(root), going, damage)
    assert names(tmp_path) == {f"{step:012d}.json" for step in (3, 4, 5, 6, 7)}
    assert asyncckpt.list_steps(tmp_path) == [3, 4, 5, 6, 7]
    assert found[3].folder.exists()


@pytest.mark.parametrize(("count", "stuck", "batch"), [(8, 6, 2), (4, 0, 1000)])
def test_a_folder_that_cannot_be_removed_keeps_no_other_one_and_no_later_batch(
    count: int, stuck: int, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH_STEPS_MAX", batch)
    found = {step: full(tmp_path, step) for step in range(count)}
    (found[stuck].folder / "lost+found").mkdir()
    with pytest.raises(IOFailedError, match="1 folders cannot be removed"):
        keep_latest(tmp_path, 1)
    assert asyncckpt.list_steps(tmp_path) == [count - 1]
    assert folders(tmp_path) == {found[step].folder.name for step in (stuck, count - 1)}


def test_a_manifest_that_cannot_be_removed_keeps_what_it_builds_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its batch and in later ones; what is above it goes."""
    monkeypatch.setattr(retention, "BATCH_STEPS_MAX", 2)
    found = two_chains(tmp_path)
    stuck, remove_file = found[2].manifest.name, Directory.remove_file

    def fail(self: Directory, name: str, **options: object) -> None:
        if name == stuck:
            raise IOFailedError(f"cannot remove {name!r}", errno=errno.EIO)
        remove_file(self, name, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Directory, "remove_file", fail)
    for newest in (8, 9):
        full(tmp_path, newest)
        with pytest.raises(IOFailedError, match="1 folders cannot be removed"):
            keep_latest(tmp_path, 1)
        assert asyncckpt.list_steps(tmp_path) == [1, 2, newest]
        assert load(tmp_path, 2) == {0: row(1), 2: row(2)}
    monkeypatch.undo()
    last = full(tmp_path, 10)
    keep_latest(tmp_path, 1)
    assert asyncckpt.list_steps(tmp_path) == [10]
    assert folders(tmp_path) == {last.folder.name}


def test_a_save_at_each_look_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come while it looks only let more go."""
    create, looks = Directory.create_file, itertools.count(100)

    def publish_first(self: Directory, name: str, **options: bool) -> tuple[int, bool]:
        full(tmp_path, next(looks))
        return create(self, name, **options)

    for step in range(20):
        full(tmp_path, step)
    monkeypatch.setattr(Directory, "create_file", publish_first)
    assert keep_latest(tmp_path, 2) == [*range(18)]
    monkeypatch.undo()
    assert asyncckpt.list_steps(tmp_path) == [18, 19, *range(100, 118)]


def test_known_heads_hold_no_values_but_numbers_of_metadata(tmp_path: Path) -> None:
    """A Saver keeps the head of every checkpoint, and values may be megabytes."""
    state = {"step": torch.zeros(1), "loader": b""}
    with asyncckpt.Saver(path=tmp_path, tensors=state, keep=9) as saver:
        heads = saver._target.commits.heads
        for step in range(3):
            state["loader"] = os.urandom(1 << 10)
            saver.save(step, metadata={"note": "x" * 1000, "loss": 3})
        assert len(heads._heads) == 3
        assert all(
            sealed.head.values == () and sealed.head.metadata == {"loss": 3} for _, sealed in heads._heads.values()
        )
        with CheckpointRoot.for_reading(tmp_path) as root:
            read = [KnownHeads(root).of(f"{step:012d}.json") for step in range(3)]
        assert read == [sealed for _, sealed in heads._heads.values()]
