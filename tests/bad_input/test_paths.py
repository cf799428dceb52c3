"""Cases 51 to 64 but for 54: paths that lead elsewhere, that are none, and what may lie beside the files."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import Crafted, picture
from sentinels import Targets, refused, save_one, save_small, small_tensors

import asyncckpt

CorruptError, NotFoundError = asyncckpt.CorruptError, asyncckpt.NotFoundError
UsageError = asyncckpt.UsageError


# -- 51: paths inside a manifest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda path: "../" + path,
        lambda path: "/" + path,
        lambda path: "/etc/passwd",
        lambda path: "data/../" + path,
        lambda path: path.replace("data/", "data/../../x/"),
        lambda path: path.replace("/", "//", 1),
        lambda path: "./" + path,
        lambda path: path.replace("/", "\\"),
        lambda path: "C:" + path,
        lambda path: "C:\\" + path,
        lambda path: path + "\0",
        lambda path: path + "\n",
        lambda path: path + "/",
        lambda path: path.replace("data/", "manifests/"),
        lambda path: path.replace("r00000-000", "r00000-000/../r00000-000"),
        lambda path: path.replace("r00000", "r0000\u0660"),  # Another digit nought.
        lambda path: path.upper(),
        lambda path: path.replace(".safetensors", ".pt"),
        lambda path: "data/LOCK",
        lambda path: "LOCK",
        lambda path: "..",
        lambda path: "",
        lambda path: "file://" + path,
        lambda path: path + "x" * 10_000,
    ],
)
def test_case_051_path_out_of_the_checkpoint(small: Crafted, change: Callable[[str], str]) -> None:
    path = change(small.document()["files"][0]["path"])
    small.edit(lambda document: document["files"][0].update(path=path))
    refused(small, CorruptError, "000000000007.json", "outside its checkpoint", "data/<step>-<attempt>")


# -- 52: not a regular file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_case_052_shard_is_a_symbolic_link(small: Crafted, tmp_path: Path, inside: bool) -> None:
    path = small.shard_path()
    moved = (path.parent if inside else tmp_path) / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    refused(small, CorruptError, path.name, "not a regular file")


def test_case_052_manifest_is_a_symbolic_link(small: Crafted, tmp_path: Path) -> None:
    small.manifest_path.rename(tmp_path / "moved")
    small.manifest_path.symlink_to(tmp_path / "moved")
    refused(small, CorruptError, small.manifest_path.name, "not a regular file")


@pytest.mark.parametrize("name", ["data", "manifests", "attempt"])
def test_case_052_folder_is_a_symbolic_link(small: Crafted, tmp_path: Path, name: str) -> None:
    path = small.shard_path().parent if name == "attempt" else small.root / name
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    refused(small, CorruptError, path.name, "not a folder of its own")


def test_case_052_hard_links_are_regular_files(small: Crafted, tmp_path: Path) -> None:
    """A tree copied by `cp -l` is a copy."""
    copy = tmp_path / "copy"
    shutil.copytree(small.root, copy, copy_function=os.link)
    targets = Targets()
    targets.load(copy)
    assert targets.loaded


@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder"])
@pytest.mark.parametrize("which", ["shard", "manifest"])
def test_case_052_special_file_in_place_of_one_of_ours(small: Crafted, kind: str, which: str) -> None:
    path = small.shard_path() if which == "shard" else small.manifest_path
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)  # Opening it to read would wait for a writer for ever.
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        bind_socket(path)
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero has no end.
        except PermissionError as error:
            pytest.skip(f"making a device needs root: {error}")
    refused(small, CorruptError, path.name, "not a regular file")


def bind_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")  # A socket's own path may have 107 bytes only.
    finally:
        os.close(folder)


# -- 53 and 54: the root -----------------------------------------------------------------------------------------------


def test_case_053_root_is_a_symbolic_link(small: Crafted, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(small.root)
    targets = Targets()
    targets.load(link)
    assert targets.loaded
    save_one(link, 8)
    assert asyncckpt.list_steps(small.root) == [7, 8]


def test_case_053_root_is_a_symbolic_link_to_nothing(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="symbolic link to nothing"):
        asyncckpt.Saver(path=link)
    refused_as_missing(link)
    assert not (tmp_path / "nothing").exists()


def test_case_053_root_is_a_symbolic_link_to_itself(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    for make in (lambda: asyncckpt.Saver(path=link), lambda: asyncckpt.Loader(link).load()):
        with pytest.raises(asyncckpt.CheckpointError, match="link"):
            make()


def refused_as_missing(path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        asyncckpt.Loader(path).load()


# -- 55 to 57: what is no path -----------------------------------------------------------------------------------------

NO_PATHS = {
    "": "empty",
    "a\0b": "NUL",
    None: "not a path",
    5: "not a path",
    b"bytes": "not a path.*bytes",
    "~/checkpoints": "os.path.expanduser",
    "~": "expanduser",
    "file:///tmp/x": "URL",
    "s3://bucket": "URL",
    "s3://key:secret@bucket/x": "URL",
    "\ud800": "encoding of file names",
}


@pytest.mark.parametrize("path", NO_PATHS, ids=repr)
def test_case_055_no_path(path: Any) -> None:
    for make in (lambda: asyncckpt.Saver(path=path), lambda: asyncckpt.Loader(path), lambda: asyncckpt.verify(path)):
        with pytest.raises(UsageError, match=NO_PATHS[path]):
            make()


def test_case_055_a_url_is_no_path_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Path takes one of its slashes away, and what is left would be a folder of this machine."""
    monkeypatch.chdir(tmp_path)
    for call in (lambda path: asyncckpt.Saver(path=path, tensors={"w": torch.ones(3)}), asyncckpt.load):
        with pytest.raises(UsageError, match=r"as a str, not as a Path.*docs/object-stores.md"):
            call(Path("s3://bucket/x"))
    assert [*tmp_path.iterdir()] == []


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"x"


def test_case_055_path_like(tmp_path: Path) -> None:
    save_one(tmp_path / "root")
    assert asyncckpt.list_steps(tmp_path / "root") == [0]
    with pytest.raises(UsageError, match="path is bytes"):
        asyncckpt.Saver(path=BytesPath())  # type: ignore[arg-type]


def test_case_055_relative_path_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with asyncckpt.Saver(path="root", tensors={"w": torch.ones(3)}) as saver:
        monkeypatch.chdir("/")
        saver.save(0)
    assert asyncckpt.list_steps(tmp_path / "root") == [0]


@pytest.mark.parametrize("name", ["é" * 128, "x" * 256])
def test_case_056_component_too_long(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"too long.*255 bytes"):
        asyncckpt.Saver(path=tmp_path / name)


@pytest.mark.parametrize("name", ["é" * 127, "x" * 255])
def test_case_056_longest_component(tmp_path: Path, name: str) -> None:
    save_one(tmp_path / name)
    assert asyncckpt.list_steps(tmp_path / name) == [0]


def test_case_056_path_too_long(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too long"):
        asyncckpt.Saver(path=tmp_path.joinpath(*["x" * 200] * 21))


def test_case_057_parent_is_missing(tmp_path: Path) -> None:
    refused_as_missing(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    save_one(tmp_path / "a" / "b" / "c")
    assert asyncckpt.list_steps(tmp_path / "a" / "b" / "c") == [0]


def test_case_057_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that says "." does not want its folders among its sources."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for path in (".", tmp_path):
        with pytest.raises(UsageError, match="current folder"):
            asyncckpt.Saver(path=path)
    assert [item.name for item in tmp_path.iterdir()] == ["train.py"]
    (tmp_path / "train.py").unlink()
    save_one(tmp_path)
    (tmp_path / "notes").write_text("")
    monkeypatch.chdir(tmp_path)
    save_one(Path("."), 1)
    assert asyncckpt.list_steps(".") == [0, 1]


def test_case_057_root_or_parent_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with pytest.raises(UsageError, match="not a folder"):
        asyncckpt.Saver(path=file)
    with pytest.raises(UsageError, match=r"path is not in a folder, found '.*file'"):
        asyncckpt.Saver(path=file / "root")
    with pytest.raises(UsageError, match="not a folder"):
        asyncckpt.Loader(file).load()
    assert file.read_bytes() == b"x"


@pytest.mark.parametrize("name", ["manifests", "data", "LOCK"])
def test_case_057_foreign_thing_in_the_place_of_ours(tmp_path: Path, name: str) -> None:
    foreign = tmp_path / name
    foreign.mkdir() if name == "LOCK" else foreign.write_bytes(b"mine")
    before = picture(tmp_path)[name]
    with pytest.raises(asyncckpt.CheckpointError, match=name if name != "LOCK" else "lock file"):
        asyncckpt.Saver(path=tmp_path)
    assert picture(tmp_path)[name] == before
    found = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in found if path.startswith(str(tmp_path))], "a refused Saver keeps no descriptor"


def test_case_062_own_names_are_the_same_in_either_case(small: Crafted) -> None:
    names = [path.name for path in small.root.rglob("*")]
    assert len({name.lower() for name in names}) == len(names)
    assert [name for name in names if name != name.lower()] == ["LOCK"]


FOREIGN = (
    "README",
    ".nfs000000000001",
    "lost+found/x",
    "manifests/000000000009.json~",
    "manifests/000000000009.json.swp",
    "manifests/9.json",
    "manifests/0000000000009.json",
    "manifests/00000000000\u0669.json",
    "manifests/.nfs000000000002",
    "manifests/.m-short",
    "manifests/lost+found/x",
    "data/.nfs000000000003",
    "data/000000000009/x",
    "data/000000000009-ABCDEF/x",
    "data/notes.txt",
)


def test_case_063_foreign_files_are_left_alone(small: Crafted) -> None:
    for name in FOREIGN:
        (small.root / name).parent.mkdir(exist_ok=True)
        (small.root / name).write_bytes(b"mine")
    targets = Targets()
    targets.load(small.root)
    assert targets.loaded
    for step in range(8, 12):
        save_one(small.root, step, keep=2)
    assert asyncckpt.list_steps(small.root) == [7, 10, 11]  # 7 was verified by the load.
    assert [name for name in FOREIGN if not (small.root / name).is_file()] == []


def test_case_064_copied_tree_is_valid(small: Crafted, tmp_path: Path) -> None:
    """Validity depends on no time, inode, attribute or absolute path."""
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(small.root, copy, copy_function=shutil.copyfile)
    (copy / "LOCK").unlink()
    for index, path in enumerate(sorted(copy.rglob("*"))):
        os.utime(path, (index, index))
    shutil.rmtree(small.root)
    targets = Targets()
    targets.load(copy)
    assert targets.loaded
    save_one(copy, 8)
    assert asyncckpt.list_steps(copy) == [7, 8]


def test_case_064_one_checkpoint_copied_out_of_many(small: Crafted, tmp_path: Path) -> None:
    save_small(small.root, step=8)
    copy = tmp_path / "copy"
    (copy / "manifests").mkdir(parents=True)
    (copy / "data").mkdir()
    shutil.copyfile(small.manifest_path, copy / "manifests" / small.manifest_path.name)
    shutil.copytree(small.shard_path().parent, copy / "data" / small.shard_path().parent.name)
    targets = Targets()
    assert targets.load(copy).step == 7
    assert targets.loaded
    assert torch.equal(targets.tensors["w"], small_tensors()["w"])


def test_case_055_relative_path_where_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No FileNotFoundError, which a loop may take for an empty directory; what is named in full is found."""
    save_one(tmp_path / "root")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (asyncckpt.load, asyncckpt.list_steps, lambda path: asyncckpt.Checkpointer(path, every=1, v=[])):
        with pytest.raises(UsageError, match=r"current folder .* the path in full"):
            call("root")
    assert asyncckpt.list_steps(tmp_path / "root") == [0]


def test_case_055_checkpointer_of_no_path() -> None:
    with pytest.raises(UsageError, match="path is not a path"):
        asyncckpt.Checkpointer(5, every=1, v=[])  # type: ignore[arg-type]
