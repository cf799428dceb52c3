"""Sweeping: leftovers go, one that cannot go keeps no other, and what a crashed sweep left aside finds its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt import IOFailedError, Saver, verify
from asyncckpt.commit.discover import KnownHeads
from asyncckpt.commit.retention import sweep
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.format.names import Attempt, doomed_name, swept_name
from asyncckpt.storage.directory import Directory
from tests.chains.model import layer_of
from tests.chains.written import Written, write


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


def folders(root: Path) -> set[str]:
    return {path.name for path in (root / "data").iterdir()}


def test_one_that_cannot_be_removed_does_not_keep_the_others(saved: Written) -> None:
    stuck = leave(saved.root, 0, folder=True)
    others = [leave(saved.root, step) for step in (1, 5, 9)]
    with pytest.raises(IOFailedError, match=f"1 folders cannot be removed, .*{stuck}"):
        swept(saved.root)
    assert not folders(saved.root) & set(others)
    assert folders(saved.root) == {saved.folder.name, doomed_name(stuck)}
    assert [path.name for path in (saved.root / "data" / doomed_name(stuck)).iterdir()] == ["lost+found"]
    (saved.root / "data" / doomed_name(stuck) / "lost+found").rmdir()
    assert swept(saved.root) == [stuck]
    assert folders(saved.root) == {saved.folder.name}


def test_a_save_goes_on_beside_what_cannot_be_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Saver(path=tmp_path, tensors={}) as saver:
        saver.save(1)
        stuck, other = leave(tmp_path, 0, folder=True), leave(tmp_path, 9)
        saver.save(2)
    assert other not in folders(tmp_path)
    assert stuck in caplog.text
    assert len([record for record in caplog.records if "were kept" in record.message]) == 1


def test_what_a_crashed_sweep_left_is_removed_or_comes_back(saved: Written) -> None:
    stray = leave(saved.root, 7)
    data = saved.root / "data"
    for name in (stray, saved.folder.name):
        (data / name).rename(data / swept_name(name))
    assert swept(saved.root) == [stray]
    assert folders(saved.root) == {saved.folder.name}
    verify(saved.root, 5)


def test_what_is_being_deleted_does_not_come_back(saved: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a save that is published meanwhile finds its folder, is acknowledged, and its files go nevertheless."""
    hidden = saved.manifest.rename(saved.root / "hidden")
    plain = Directory.names

    def names_and_publish(self: Directory) -> list[str]:
        listed = plain(self)
        if saved.folder.name in self.path.name:
            monkeypatch.undo()
            hidden.rename(saved.manifest)
            swept(saved.root)
            assert not saved.folder.exists()
        return listed

    monkeypatch.setattr(Directory, "names", names_and_publish)
    assert swept(saved.root) == [saved.folder.name]
    assert saved.manifest.exists()
    assert folders(saved.root) == set()


def test_what_an_unreadable_manifest_may_name_comes_back(saved: Written) -> None:
    data = saved.root / "data"
    saved.folder.rename(data / swept_name(saved.folder.name))
    saved.manifest.write_bytes(b"{}")
    assert swept(saved.root) == []
    assert folders(saved.root) == {saved.folder.name}
