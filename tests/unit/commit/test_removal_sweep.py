"""Sweeping: leftovers go, one that cannot go keeps no other, and what a crashed sweep left aside finds its end."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncckpt import CorruptError, IOFailedError, Saver
from asyncckpt.checkpoints import collect_garbage
from asyncckpt.commit.attempt import claims
from asyncckpt.commit.discover import KnownHeads
from asyncckpt.commit.removal import sweep
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.format.names import Attempt, Mark, pin_name, upload_mark_name
from asyncckpt.storage.directory import Directory
from tests.chains.model import layer_of
from tests.chains.written import Written, write
from tests.unit.commit.test_retention import folders, full, two_chains


@pytest.fixture
def saved(tmp_path: Path) -> Written:
    return write(tmp_path / "root", 5, {"user": layer_of({})})


def leave(root: Path, step: int, *, folder: bool = False) -> str:
    """A folder of a save that failed, with a shard file; with another folder in it, too."""
    name = Attempt.new(step).directory
    (root / "data" / name).mkdir()
    (root / "data" / name / "r00000-000.safetensors").write_bytes(b"x" * 1000)
    if folder:
        (root / "data" / name / "lost+found").mkdir()
    return name


def swept(root: Path) -> list[str]:
    with CheckpointRoot.for_reading(root) as opened:
        return sweep(opened, KnownHeads(opened))


def marks(root: Path) -> list[str]:
    return [path.name for path in (root / "manifests").iterdir() if path.name.startswith((".r-", ".d-"))]


def test_one_that_cannot_be_removed_does_not_keep_the_others(saved: Written) -> None:
    stuck = leave(saved.root, 0, folder=True)
    others = [leave(saved.root, step) for step in (1, 5, 9)]
    with pytest.raises(IOFailedError, match=f"1 folders cannot be removed, .*{stuck}"):
        swept(saved.root)
    assert not folders(saved.root) & set(others)
    assert folders(saved.root) == {saved.folder.name, stuck}
    assert [path.name for path in (saved.root / "data" / stuck).iterdir()] == ["lost+found"]
    with pytest.raises(IOFailedError, match="1 folders cannot be removed"):
        swept(saved.root)
    assert marks(saved.root) == [], "nothing is being removed any more"
    (saved.root / "data" / stuck / "lost+found").rmdir()
    assert swept(saved.root) == [stuck]
    assert folders(saved.root) == {saved.folder.name}
    assert marks(saved.root) == []


STUCK = {
    "temporary": lambda number: f"manifests/.m-{number:032x}",
    "pin": lambda number: f"manifests/{pin_name(90 + number)}",
    "upload mark": lambda number: f"manifests/{upload_mark_name(Attempt.new(7))}",
    "folder": lambda number: f"data/{Attempt.new(8).directory}",
}


@pytest.mark.parametrize("seed", range(8))
def test_no_kind_of_leftover_that_cannot_be_removed_keeps_others(
    saved: Written, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """It is a folder or is busy, and is named at the end; the next sweep goes on."""
    print(f"seed {seed}")
    chosen, busy, stuck, others = random.Random(seed), set[str](), list[Path](), list[Path]()
    kinds = (
        chosen.sample(sorted(STUCK), chosen.randrange(1, len(STUCK) + 1))
        if seed >= len(STUCK)
        else [sorted(STUCK)[seed]]
    )
    for number, (kind, make) in enumerate(STUCK.items()):
        for is_stuck in [False, kind in kinds]:
            path = saved.root / make(2 * number + is_stuck)
            (stuck if is_stuck else others).append(path)
            if kind == "folder":
                path.mkdir()
                (path / "within").mkdir() if is_stuck else (path / "within").touch()
            elif is_stuck and chosen.random() < 0.5:
                path.mkdir()
            else:
                path.touch()
                busy.update({path.name} if is_stuck else ())
    plain = Directory.remove_file

    def remove_file(folder: Directory, name: str, **options: Any) -> bool:
        if name in busy:
            raise IOFailedError(f"file {name!r} cannot be removed: busy", errno=errno.EBUSY)
        return plain(folder, name, **options)

    monkeypatch.setattr(Directory, "remove_file", remove_file)
    for sweeping in (swept, collect_garbage):
        with pytest.raises(IOFailedError) as told:
            sweeping(saved.root)
        assert all(path.name in str(told.value) for path in stuck)
        assert [path.exists() for path in (*stuck, *others)] == [True] * len(stuck) + [False] * len(others)
        for path in others:
            path.mkdir() if path.parent.name == "data" else path.touch()
    monkeypatch.undo()
    for path in stuck:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    collect_garbage(saved.root)
    assert folders(saved.root) == {saved.folder.name}


def test_a_save_goes_on_beside_what_cannot_be_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Saver(path=tmp_path, tensors={"n": 1}) as saver:
        saver.save(1)
        stuck, other = leave(tmp_path, 0, folder=True), leave(tmp_path, 9)
        saver.save(2)
    assert other not in folders(tmp_path)
    assert stuck in caplog.text
    assert len([record for record in caplog.records if "were kept" in record.message]) == 1


@pytest.mark.parametrize("is_decided", [False, True])
def test_what_a_crashed_sweep_left_is_removed(saved: Written, is_decided: bool) -> None:
    """Also by a version that decided on disks, too."""
    stray = leave(saved.root, 7)
    (saved.root / "manifests" / Mark("ab" * 16, stray, is_decided=is_decided).name).touch()
    assert collect_garbage(saved.root).folders_count == 1
    assert folders(saved.root) == {saved.folder.name}
    assert marks(saved.root) == []


def test_a_mark_that_cannot_be_removed_keeps_nobody_from_saving(
    saved: Written, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = saved.root / "manifests" / Mark("ab" * 16, Attempt.new(7).directory).name
    stuck.mkdir()
    with Saver(path=saved.root, tensors={"n": 1}) as saver:
        saver.save(8)
    assert stuck.name in caplog.text


@pytest.mark.parametrize("is_seen", [True, False])
def test_what_is_published_while_it_is_swept_goes_with_its_folder_or_stays(
    saved: Written, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    """Published before the second look it stays; after it, it sees the mark, and is not acknowledged."""
    hidden = saved.manifest.rename(saved.root / "hidden")
    operation = "create_file" if is_seen else "version"
    plain = getattr(Directory, operation)

    def publish_before(self: Directory, *names: str) -> object:
        hidden.rename(saved.manifest)
        monkeypatch.undo()
        return plain(self, *names)

    monkeypatch.setattr(Directory, operation, publish_before)
    assert swept(saved.root) == ([] if is_seen else [saved.folder.name])
    assert saved.manifest.exists() == saved.folder.exists() == is_seen
    assert marks(saved.root) == []


def test_garbage_is_counted(saved: Written) -> None:
    left = [leave(saved.root, step) for step in (1, 5)]
    temporary = saved.root / "manifests" / f".m-{'ab' * 16}"
    temporary.write_bytes(b"x" * 30)
    with CheckpointRoot.for_reading(saved.root) as root, claims.save(root, 9) as claim:
        running = root.data.make_folder(claim.attempt.directory)
        running.close()
        report = collect_garbage(saved.root)
    assert (report.folders_count, report.files_count, report.bytes) == (2, 3, 2030)
    assert folders(saved.root) == {saved.folder.name, claim.attempt.directory}
    assert not temporary.exists()
    assert collect_garbage(saved.root).folders_count == 1, "the save has ended without it"
    assert (collect_garbage(saved.root).files_count, collect_garbage(saved.root).bytes) == (0, 0)
    assert not folders(saved.root) & set(left)


def test_garbage_beside_a_manifest_that_cannot_be_read_stays(saved: Written) -> None:
    stray = leave(saved.root, 5)
    saved.manifest.write_bytes(b"{}")
    with pytest.raises(CorruptError):
        collect_garbage(saved.root)
    assert stray in folders(saved.root)


def test_sweep_leaves_the_folders_of_a_step_whose_manifest_cannot_be_read(tmp_path: Path) -> None:
    found = two_chains(tmp_path)
    compacted = full(tmp_path, 3, replaces=found[3].digest)
    compacted.manifest.write_bytes(b"{}")
    assert swept(tmp_path) == []
    assert len(folders(tmp_path)) == 8
    found[7].manifest.unlink()
    assert swept(tmp_path) == [found[7].folder.name]
    with pytest.raises(CorruptError):
        collect_garbage(tmp_path)
    assert len(folders(tmp_path)) == 7


@pytest.mark.parametrize("when", ["next removal", "close"])
def test_marks_that_could_not_be_removed_go_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """They stayed until another process opened the directory, and kept `pin` from these steps."""

    def fail(self: Directory, name: str, *_: Any) -> Any:
        raise IOFailedError(f"{name!r} cannot be removed", errno=errno.EIO)

    with Saver(path=tmp_path / "root", tensors={"x": 1}, keep=1) as saver:
        saver.save(1)
        saver.wait_idle()
        with monkeypatch.context() as patched:
            patched.setattr(Directory, "remove_file", fail)
            saver.save(2)
            saver.wait_idle()
            assert marks(tmp_path / "root")
        if when == "next removal":
            saver.save(3)
            saver.wait_idle()
            assert not marks(tmp_path / "root")
    assert not marks(tmp_path / "root")
