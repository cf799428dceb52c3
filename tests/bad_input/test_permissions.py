"""Cases 57 to 63, where the system says no: owners, modes, file systems; by ways that hold for root too."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from crafted import Crafted
from sentinels import Targets, save_one

import asyncckpt
from tests.read_only import NOBODY, as_nobody, read_only_mount, run_tool

IOFailedError = asyncckpt.IOFailedError
CHILD = """
import json, sys, torch, asyncckpt
try:
    {body}
except asyncckpt.CheckpointError as error:
    print(json.dumps([type(error).__name__, str(error)]))
else:
    print(json.dumps(["", ""]))
"""


@contextmanager
def immutable(*paths: Path) -> Iterator[None]:
    """Nothing can be made in these folders meanwhile, not even by root."""
    done: list[Path] = []
    try:
        for path in paths:
            run_tool("chattr", "+i", path)
            done.append(path)
        yield
    finally:
        for path in done:
            subprocess.run(["chattr", "-i", path], check=True)


@pytest.fixture
def visible(saved_once: Path) -> Iterator[Crafted]:
    """A small sound checkpoint where every user may look; pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        found = Crafted(root=Path(shutil.copytree(saved_once, f"{folder}/root")), step=7)
        for path in [found.root, *found.root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield found


def error_of_nobody(body: str, path: Path) -> tuple[str, str]:
    """Class and message of what a line of Python ends with for another user."""
    command = [*as_nobody(), sys.executable, "-c", CHILD.format(body=body), str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=120)
    assert run.returncode == 0, run.stderr
    name, message = json.loads(run.stdout.splitlines()[-1])
    return name, message


def test_case_057_root_cannot_be_made(tmp_path: Path) -> None:
    with immutable(tmp_path), pytest.raises(IOFailedError, match="cannot be made: Operation not permitted"):
        asyncckpt.Saver(path=tmp_path / "root")


def test_case_057_root_is_not_writable(tmp_path: Path) -> None:
    """Said when the Saver is made, and not after an hour of training."""
    with immutable(tmp_path), pytest.raises(IOFailedError, match=r"'manifests'.*cannot be made"):
        asyncckpt.Saver(path=tmp_path)


@pytest.mark.parametrize("name", ["manifests", "data"])
def test_case_057_folder_of_ours_is_not_writable(small: Crafted, name: str) -> None:
    with immutable(small.root / name), pytest.raises(IOFailedError, match=f"{name}.*is not writable.*check owner"):
        asyncckpt.Saver(path=small.root)
    save_one(small.root, 8)  # The refused one holds no lock.


def test_case_057_not_writable_for_this_user(visible: Crafted) -> None:
    name, message = error_of_nobody("asyncckpt.Saver(path=sys.argv[1])", visible.root)
    assert (name, "not writable" in message) == ("IOFailedError", True), message


@pytest.mark.parametrize("which", ["root", "manifest"])
def test_case_057_not_readable_for_this_user(visible: Crafted, which: str) -> None:
    path = visible.root if which == "root" else visible.manifest_path
    path.chmod(0o600)
    name, message = error_of_nobody("asyncckpt.Loader(sys.argv[1]).load()", visible.root)
    assert name == "IOFailedError", message
    assert path.name in message
    assert "Permission denied (check owner and permission)" in message


def test_case_058_world_writable_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    with pytest.warns(UserWarning, match="writable for everybody"):
        save_one(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="writable for everybody"):
            asyncckpt.Saver(path=root)  # The strict way: warnings are errors.
        root.chmod(0o1777)
        save_one(root, 1)


def test_case_058_root_of_another_owner(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    try:
        os.chown(root, NOBODY, NOBODY)
    except PermissionError as error:
        pytest.skip(f"giving a folder away needs root: {error}")
    with pytest.warns(UserWarning, match=f"belongs to user {NOBODY}"):
        save_one(root)


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o000, 0o640, 0o750), (0o027, 0o640, 0o750), (0o077, 0o600, 0o700)]
)
def test_case_059_modes_honour_the_umask(tmp_path: Path, umask: int, file: int, folder: int) -> None:
    old = os.umask(umask)
    try:
        save_one(tmp_path / "root")
    finally:
        os.umask(old)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "root", *(tmp_path / "root").rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_file()} == {file}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {folder}


def test_case_060_read_only_file_system(small: Crafted) -> None:
    with read_only_mount(small.root):
        targets = Targets()
        targets.load(small.root)
        assert targets.loaded
        assert asyncckpt.verify(small.root).step == 7
        assert asyncckpt.describe(small.root).step == 7
        with pytest.raises(IOFailedError, match=r"Read-only file system|not writable"):
            asyncckpt.Saver(path=small.root)


def test_case_060_immutable_tree(small: Crafted) -> None:
    with immutable(small.root, small.root / "manifests", small.root / "data", small.shard_path().parent):
        targets = Targets()
        targets.load(small.root)
        assert targets.loaded


def test_case_061_another_user_reads_what_the_modes_let_him(visible: Crafted) -> None:
    assert error_of_nobody("asyncckpt.verify(sys.argv[1])", visible.root) == ("", "")


def test_case_061_group_of_a_setgid_folder_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    try:
        os.chown(root, -1, NOBODY)
    except PermissionError as error:
        pytest.skip(f"giving a folder to another group needs root: {error}")
    root.chmod(0o2770)
    save_one(root)
    assert {path.stat().st_gid for path in root.rglob("*")} == {NOBODY}
    assert all(path.stat().st_mode & stat.S_ISGID for path in root.rglob("*") if path.is_dir())


@pytest.mark.parametrize("name", ["folder", "symbolic link", "immutable folder"])
def test_case_063_leftover_that_cannot_be_swept_stops_no_save(small: Crafted, name: str, tmp_path: Path) -> None:
    leftover = small.root / "data" / f"000000000003-{'0' * 32}"
    if name == "symbolic link":
        leftover.symlink_to(tmp_path)
        save_one(small.root, 8)
        assert tmp_path.exists()
    elif name == "folder":
        (leftover / "inner").mkdir(parents=True)
        save_one(small.root, 8)
    else:
        leftover.mkdir()
        with immutable(leftover):
            save_one(small.root, 8)
    assert asyncckpt.list_steps(small.root) == [7, 8]
