"""Others at work in the directory of a save, as where locks do not work: what is acknowledged can be read.

At every operation of the storage in turn somebody strikes: a cleaner that deletes below data/, or a second writer of
ours that knows nothing of the first one, sweeps, and is itself stopped at every one of its operations until the first
one has ended. LOCK is removed each time.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import asyncckpt
import asyncckpt.engine.save.run_save
from asyncckpt.commit import removal, transaction
from asyncckpt.commit.chain import KnownChain
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.dcp import StorageWriter
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.owner_lock import _lock_file
from tests.end_to_end.turns import Turns
from tests.pairs.gate import before_each_operation
from tests.shares import EVERY
from tests.worlds.saves import save_one

WAIT_S_MAX = 60.0


class Strike:
    """Does something once, when operation `at` of the writer comes."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.count = 0
        self._at = at
        self._act = act
        self._is_acting = False

    def __call__(self) -> None:
        if self._is_acting:
            return
        self.count += 1
        if self.count == self._at:
            self._is_acting = True
            try:
                self._act()
            finally:
                self._is_acting = False


def lose_lock(path: Path) -> None:
    (path / "LOCK").unlink(missing_ok=True)


STATE = {"x": torch.arange(3.0), "y": torch.ones(5)}


def save(path: Path) -> None:
    save_one(path, 7, staged=True, tensors=STATE)


def save_by_dcp(path: Path) -> None:
    dcp.save(dict(STATE), storage_writer=StorageWriter(path, step=7))


def save_two(path: Path) -> None:
    """A delta with the full checkpoint below it, in one process."""
    table = asyncckpt.HashTable("t", 2)
    with asyncckpt.Saver(path=path, hashtables={"t": table}) as saver:
        saver.save_async(3).result(WAIT_S_MAX)
        table.insert(torch.tensor([6]), torch.ones(1, 2))
        saver.save_async(7, kind="delta").result(WAIT_S_MAX)


class SaveDelta:
    """Of a full checkpoint that is not the newest one: the first that retention removes."""

    def __init__(self, path: Path) -> None:
        self.saver = asyncckpt.Saver(path=path, hashtables={"t": asyncckpt.HashTable("t", 2)})
        self.saver.save(3)
        save_one(path, 6, tensors=STATE)

    def __call__(self, _: Path) -> None:
        with self.saver as saver:
            saver.save_async(7, kind="delta").result(WAIT_S_MAX)


def compact(path: Path) -> None:
    asyncckpt.compact(path, 7)


# Each makes step 7.
WRITERS = {"Saver": save, "delta": save_two, "DCP": save_by_dcp, "compaction": compact}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is there before: an old checkpoint, what a crash left; for compaction a chain that ends with step 7."""
    made = {}
    for name in WRITERS:
        path = made[name] = tmp_path_factory.mktemp("templates") / name
        table = asyncckpt.HashTable("t", 2)
        with asyncckpt.Saver(path=path, hashtables={"t": table}) as saver:
            for step in (5, 7) if name == "compaction" else (5,):
                table.insert(torch.tensor([step]), torch.ones(1, 2))
                saver.save_async(step, kind="full" if step == 5 else "delta").result(WAIT_S_MAX)
        (path / "data" / f"{7:012d}-{'ab' * 16}").mkdir()
    return made


def run(write: Callable[[Path], None], path: Path) -> bool:
    """Whether it was acknowledged."""
    try:
        write(path)
    except asyncckpt.CheckpointError:
        return False
    except CheckpointException as error:
        if all(isinstance(cause, asyncckpt.CheckpointError) for cause, _ in error.failures.values()):
            return False
        raise
    return True


def fresh(template: Path, tmp_path: Path) -> Path:
    path = tmp_path / "root"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(template, path)
    return path


def delete_folders(path: Path) -> None:
    for folder in (path / "data").iterdir():
        shutil.rmtree(folder)


def delete_files(path: Path) -> None:
    for file in (path / "data").rglob("*.safetensors"):
        file.unlink()


def delete_old_folders(path: Path) -> None:
    """All but those of the newest step that has one."""
    folders = sorted((path / "data").iterdir())
    for folder in folders:
        if folder.name[:12] != folders[-1].name[:12]:
            shutil.rmtree(folder)


def replace_files(path: Path) -> None:
    """By others of the same size."""
    for file in (path / "data").rglob("*.safetensors"):
        raw = file.read_bytes()
        file.rename(file.with_name(file.name + ".old"))
        file.write_bytes(bytes(len(raw)))


@pytest.mark.parametrize(
    ("writer", "clean"),
    [
        *((writer, clean) for writer in WRITERS for clean in (delete_folders, delete_files)),
        ("delta", delete_old_folders),
        # What a delta builds upon is not read again.
        *((writer, replace_files) for writer in WRITERS if writer != "delta"),
    ],
)
def test_what_is_acknowledged_can_be_read_whatever_a_cleaner_did(
    writer: str, clean: Callable[[Path], None], templates: dict[str, Path], tmp_path: Path
) -> None:
    refused = refused_beside_a_cleaner(writer, clean, templates[writer], tmp_path, every=EVERY)
    assert refused > 5 // EVERY


def refused_beside_a_cleaner(
    writer: str, clean: Callable[[Path], None], template: Path, tmp_path: Path, *, every: int = 1
) -> int:
    """How many saves were refused; CorruptError when an acknowledged one cannot be read at that moment."""

    def act() -> None:
        lose_lock(path)
        clean(path)

    refused = 0
    for at in range(1, 1000, every):
        path = fresh(template, tmp_path)
        strike = Strike(at, act)
        with before_each_operation(strike):
            is_acknowledged = run(WRITERS[writer], path)
        if is_acknowledged:
            asyncckpt.verify(path, 7)
        refused += not is_acknowledged
        if strike.count < at:
            break
    return refused


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("writer", [writer for writer in WRITERS if writer != "delta"])
def test_what_is_acknowledged_can_be_read_whatever_a_second_writer_did(
    writer: str, every: int, templates: dict[str, Path], tmp_path: Path
) -> None:
    """Also afterwards; and what was there before stays as well."""
    prepare = lambda _: WRITERS[writer]  # noqa: E731
    assert refused_beside_a_second_writer(prepare, templates[writer], tmp_path, every=every * EVERY, stays=5) > 0


@pytest.mark.parametrize("sweeps", [True, False])
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_an_acknowledged_delta_keeps_its_parent_whatever_a_second_writer_did(
    every: int, sweeps: bool, templates: dict[str, Path], tmp_path: Path
) -> None:
    refused = refused_beside_a_second_writer(
        SaveDelta, templates["delta"], tmp_path, every=every * EVERY, keep=1, sweeps=sweeps
    )
    assert refused > 0


def test_what_is_deleted_right_before_the_rename_is_found_by_the_look_behind_it(
    templates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that look the test above fails."""
    monkeypatch.setattr(Transaction, "_check_after", lambda *_: None)
    with pytest.raises(asyncckpt.CorruptError):
        refused_beside_a_cleaner("Saver", delete_folders, templates["Saver"], tmp_path)


def test_parents_that_are_deleted_right_before_the_rename_are_missed_behind_it(
    templates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KnownChain, "_is_unchanged", lambda *_: True)
    with pytest.raises(asyncckpt.CorruptError):
        refused_beside_a_cleaner("delta", delete_old_folders, templates["delta"], tmp_path)


def test_parents_that_retention_removes_right_before_the_rename_are_missed_behind_it(
    templates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if it sweeps first: a delta whose own folder is gone is refused, whatever it builds upon."""
    monkeypatch.setattr(KnownChain, "_is_unchanged", lambda *_: True)
    with pytest.raises(asyncckpt.CorruptError, match="its parent step 3 is missing"):
        refused_beside_a_second_writer(SaveDelta, templates["delta"], tmp_path, every=9, keep=1, sweeps=False)


def test_without_its_look_for_marks_a_delta_loses_its_parent(
    templates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "being_removed", lambda _: set())
    with pytest.raises(asyncckpt.CorruptError, match="its parent step 3"):
        refused_beside_a_second_writer(SaveDelta, templates["delta"], tmp_path, every=9, keep=1)


def remove_at_once(
    remove: Callable[..., Any], root: CheckpointRoot, heads: Any, marks: Any, _: Callable[[], bool]
) -> Any:
    return remove(root, heads, marks, lambda: True)


def test_what_is_published_before_its_removal_is_announced_is_found_by_the_sweep_that_looks_again(
    templates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "_remove_on_disk", partial(remove_at_once, removal._remove_on_disk))
    with pytest.raises(asyncckpt.NotFoundError):
        refused_beside_a_second_writer(lambda _: save, templates["Saver"], tmp_path, every=3)


def refused_beside_a_second_writer(
    prepare: Callable[[Path], Callable[[Path], None]],
    template: Path,
    tmp_path: Path,
    *,
    every: int,
    keep: int = 2,
    sweeps: bool = True,
    stays: int | None = None,
) -> int:
    """How many saves were refused; CorruptError when an acknowledged one, or the step that stays, cannot be read."""
    refused = 0
    for at in range(1000):
        counts = []
        for stop in range(at % every, 1000, every):
            path = fresh(template, tmp_path)
            write = prepare(path)
            turns = Turns(path, [(0, at), (1, stop), (0, math.inf)], keep=keep, sweeps=sweeps)
            with turns.taken():
                is_acknowledged = run(write, path)
            counts.append(len(turns.made[0]))
            if is_acknowledged:
                asyncckpt.verify(path, 7)
            refused += not is_acknowledged
            if stays is not None:
                asyncckpt.verify(path, stays)
            if len(turns.made[1]) < stop:
                break
        if max(counts) < at:
            break
    return refused


def test_a_lock_that_was_removed_is_taken_again(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors=STATE) as saver:
        saver.save(1)
        lose_lock(tmp_path)
        saver.save(2)
        assert (tmp_path / "LOCK").exists()
    assert os.listdir(tmp_path / "manifests") != []


def test_a_lock_that_another_process_has_taken_ends_the_commits(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors=STATE) as saver:
        saver.save(1)
        lose_lock(tmp_path)
        with Directory.open(tmp_path) as root:
            lock = _lock_file(root, LOCK_NAME)  # As another process would: by an open file of its own.
        with pytest.raises(asyncckpt.ConflictError, match="is locked by process"):
            saver.save(2)
        os.close(lock)
        saver.save(3)
    assert asyncckpt.list_steps(tmp_path) == [1, 3]


def test_a_save_whose_files_another_process_has_swept_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files = asyncckpt.engine.save.run_save.write_files

    def write_and_be_swept(*arguments: Any) -> Any:
        written = write_files(*arguments)
        lose_lock(tmp_path)
        other = f"import asyncckpt; asyncckpt.Saver(path={str(tmp_path)!r}, tensors={{'n': 1}}).save(2)"
        subprocess.run([sys.executable, "-c", other], check=True, timeout=WAIT_S_MAX)
        return written

    monkeypatch.setattr(asyncckpt.engine.save.run_save, "write_files", write_and_be_swept)
    refused = pytest.raises(asyncckpt.ConflictError, match="was removed while step 1 was saved")
    with asyncckpt.Saver(path=tmp_path, tensors=STATE) as saver, refused:
        saver.save_async(1).result(2 * WAIT_S_MAX)
    assert asyncckpt.list_steps(tmp_path) == [2]
