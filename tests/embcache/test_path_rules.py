"""Every rule for a path: what it refuses, what it lets pass, and how it is relaxed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from asyncckpt.embcache import PathRules, Saver, path_rules
from asyncckpt.embcache.path_rules import FORBIDDEN_PREFIXES, SENSITIVE_WORDS, STRICT, file_system_of, make_folders
from tests.embcache.models import CachedNet

UsageError = asyncckpt.UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that every rule lets pass."""
    place = tmp_path / "runs"
    place.mkdir(0o750)
    return place


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def refused(path: str | Path, text: str, rules: PathRules = STRICT) -> None:
    with pytest.raises(UsageError, match=text):
        rules.check_target(path)


def test_good_path_passes_before_and_after_it_is_made(folder: Path) -> None:
    path = folder / "a" / "b"
    assert STRICT.check_target(path) == path
    assert not path.exists()
    assert not path.parent.exists()
    make_folders(path)
    assert STRICT.check_target(path) == path
    assert STRICT.check_source(str(path)) == path


def test_relative_path_is_made_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert STRICT.check_target("a/b") == folder / "a" / "b"


@pytest.mark.parametrize("path", ["", 3, None, b"runs", "~/runs", "s3://bucket/runs", "a\0b"])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(UsageError):
        STRICT.check_target(path)  # type: ignore[arg-type]


# -- length ------------------------------------------------------------------------------------------------------------


def long_path(folder: Path, length: int) -> str:
    text = str(folder)
    while len(text) + 201 < length:
        text += "/" + "d" * 200
    return text + "/" + "e" * (length - len(text) - 1)


def test_length_of_1024_passes_and_1025_is_refused(folder: Path) -> None:
    assert len(str(STRICT.check_target(long_path(folder, 1024)))) == 1024
    refused(long_path(folder, 1025), "path is too long, found 1025")
    replace(STRICT, length_max=None).check_target(long_path(folder, 1025))


def test_length_is_that_of_the_absolute_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    rules = replace(STRICT, relative_length_max=None)
    refused("/".join(["d" * 200] * 5), "path is too long", rules)


def test_200_bytes_of_a_relative_path_pass_and_201_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    STRICT.check_target("r" * 200)
    refused("r" * 201, "relative path is too long, found 201, expected at most 200 bytes")
    refused("./" + "ü" * 100, "relative path is too long, found 202")
    STRICT.check_target(folder / ("r" * 201))
    replace(STRICT, relative_length_max=None).check_target("r" * 201)


def test_500_parts_pass_and_501_are_refused(folder: Path) -> None:
    rules = replace(STRICT, length_max=None)
    longest = folder.joinpath(*["p"] * (500 - (len(folder.parts) - 1)))
    assert rules.check_target(longest) == longest
    refused(longest / "p", "too many parts, found 501, expected at most 500", rules)
    with pytest.raises(UsageError, match="too many parts"):
        rules.check_source(longest / "p")
    replace(rules, parts_max=None).check_target(longest / "p")


def test_length_counts_bytes(folder: Path) -> None:
    refused(folder / "ü" / "/".join(["ü" * 100] * 5), "path is too long")


def test_one_name_of_255_passes_and_256_is_refused(folder: Path) -> None:
    STRICT.check_target(folder / ("n" * 255))
    refused(folder / ("n" * 256), "path is too long")


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_symbolic_link_anywhere_is_refused(folder: Path, below: str) -> None:
    real = folder / "real"
    (real / "a").mkdir(0o750, parents=True)
    real.chmod(0o750)
    (real / "a").chmod(0o750)
    link = folder / "link"
    link.symlink_to(real)
    refused(link / below, "symbolic link")
    with pytest.raises(UsageError, match="symbolic link"):
        STRICT.check_source(link / "a")
    assert replace(STRICT, symlinks_allowed=True).check_target(link / below) == link / below


def test_dangling_link_is_refused(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "nowhere")
    refused(folder / "link", "symbolic link")
    refused(folder / "link", "not a folder", replace(STRICT, symlinks_allowed=True))


@pytest.mark.parametrize("name", ["manifests", "data", "rank00000-of-00001"])
def test_link_in_place_of_an_own_folder_is_refused(folder: Path, name: str) -> None:
    (folder / "elsewhere").mkdir(0o750)
    path = folder / "run"
    path.mkdir(0o750)
    (path / name).symlink_to(folder / "elsewhere")
    with Saver(rank=0) as saver, pytest.raises(UsageError, match="symbolic link"):
        saver.save(CachedNet(), path)
    assert list((folder / "elsewhere").iterdir()) == []
    with Saver(rank=0) as saver, pytest.raises(UsageError, match="symbolic link"):
        saver.load(CachedNet(), path)


# -- special places and words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", FORBIDDEN_PREFIXES)
def test_special_places_are_refused_by_whole_parts(prefix: str) -> None:
    rules = replace(STRICT, permission_max=None, owner_checked=False, symlinks_allowed=True, remote_file_systems=())
    refused(prefix, "is a special one", rules)
    refused(f"{prefix}/runs", "is a special one", rules)
    refused(f"{prefix}/share/runs", "is a special one", rules)
    refused(f"/usr/../{prefix}/./runs", "is a special one", rules)
    assert str(rules.check_target(f"{prefix}etera/runs")) == f"{prefix}etera/runs"


def test_special_place_behind_a_link_is_refused(folder: Path) -> None:
    (folder / "link").symlink_to("/etc")
    rules = replace(STRICT, permission_max=None, owner_checked=False, symlinks_allowed=True)
    refused(folder / "link" / "runs", "below '/etc'", rules)
    replace(rules, forbidden_prefixes=()).check_target(folder / "link" / "runs")


@pytest.mark.parametrize("word", SENSITIVE_WORDS)
def test_sensitive_words_are_refused(folder: Path, word: str) -> None:
    for spelling in (word, word.upper(), word.title()):
        refused(folder / spelling, "sensitive word")
        refused(folder / f"my_{spelling}s" / "run", "sensitive word")
        refused(folder / f"1{spelling}.d" / "run", "sensitive word")
        refused(f"{folder}/{spelling}/../run", "sensitive word")
        replace(STRICT, sensitive_words=()).check_target(folder / spelling)


@pytest.mark.parametrize(
    "name", ["my_keys", "PASSWORD", "private_key", "APIKeys", "apiKey2", "KeyStore", "mypasswords", "KEYS"]
)
def test_words_are_found_within_names(folder: Path, name: str) -> None:
    refused(folder / name, "sensitive word")


@pytest.mark.parametrize("name", ["monkey", "keypoints", "Turkey", "mickeys", "KEYNOTE", "pass_word"])
def test_other_words_that_hold_a_short_one_pass(folder: Path, name: str) -> None:
    STRICT.check_target(folder / name)


def test_words_are_the_users_to_choose(folder: Path) -> None:
    rules = replace(STRICT, sensitive_words=("secret",))
    refused(folder / "top_Secret", "found 'secret'", rules)
    rules.check_target(folder / "Key")


# -- permission and owner ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o750, 0o700, 0o740, 0o2750])
def test_permissions_within_750_pass(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    STRICT.check_target(folder / "run")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, 0o707, 0o751, 0o752, 0o760, 0o1777])
def test_permissions_beyond_750_are_refused(folder: Path, mode: int) -> None:
    """By bits: as a number, 0707 is below 0750."""
    folder.chmod(mode)
    for path in (folder / "run", folder / "run" / "below", folder):
        refused(path, "permission of folder .* is too wide")
    with pytest.raises(UsageError, match="too wide"):
        STRICT.check_source(folder)
    replace(STRICT, permission_max=None).check_target(folder)
    replace(STRICT, permission_max=0o1777).check_target(folder)


def test_folder_above_an_existing_one_counts_too(folder: Path) -> None:
    run = folder / "run"
    run.mkdir(0o750)
    folder.chmod(0o755)
    refused(run, "permission of folder .*runs' is too wide")


def test_owner_must_be_the_user_or_the_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    STRICT.check_target(folder / "run")  # The group is still ours.
    monkeypatch.setattr(os, "getegid", lambda: 54321)
    refused(folder / "run", "belongs to another user.*user 54321")
    with pytest.raises(UsageError, match="belongs to another user"):
        STRICT.check_source(folder)
    replace(STRICT, owner_checked=False).check_target(folder / "run")


def test_target_must_be_writable_but_a_source_need_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def access(path: object, mode: int, **_: object) -> bool:
        asked.append((path, mode))
        return False

    monkeypatch.setattr(os, "access", access)
    refused(folder / "a" / "b", "is not writable")
    assert asked == [(folder, os.W_OK | os.X_OK)]
    STRICT.check_source(folder)


# -- what is there -----------------------------------------------------------------------------------------------------


def test_file_in_the_place_of_a_folder_is_refused(folder: Path) -> None:
    (folder / "file").write_text("")
    refused(folder / "file", "not a folder")
    refused(folder / "file" / "run", "below what is not a folder")


def test_source_must_be_there(folder: Path) -> None:
    (folder / "file").write_text("")
    for path in (folder / "nothing", folder / "file"):
        with pytest.raises(UsageError, match="not a folder"):
            STRICT.check_source(path)


# -- file systems ------------------------------------------------------------------------------------------------------


def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: tuple[str, str]) -> None:
    """Let the mounts be these: (mount point, type)."""
    texts = [
        f"{40 + number} 1 0:{number} / {point} rw,relatime shared:1 - {kind} source rw\n"
        for number, (point, kind) in enumerate(lines)
    ]
    (tmp_path / "mountinfo").write_text("".join(texts))
    monkeypatch.setattr(path_rules, "MOUNTS_FILE", str(tmp_path / "mountinfo"))


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse", "fuse.sshfs", "fuseblk", "ceph", "9p"])
def test_remote_file_systems_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounts(tmp_path, monkeypatch, ("/", "ext4"), (str(folder), kind))
    refused(folder / "run", f"not on a local file system, found '{kind}'")
    with pytest.raises(UsageError, match="not on a local file system"):
        STRICT.check_source(folder)
    replace(STRICT, remote_file_systems=()).check_target(folder / "run")
    replace(STRICT, remote_file_systems=("afs",)).check_target(folder / "run")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs"])
def test_local_file_systems_pass(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    mounts(tmp_path, monkeypatch, ("/", "nfs"), (str(folder), kind), (str(folder) + "x", "nfs"))
    STRICT.check_target(folder / "run")


def test_nearest_and_last_mount_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts(
        tmp_path, monkeypatch,
        ("/", "ext4"), ("/a/b", "xfs"), ("/a", "nfs"), ("/a/b", "tmpfs"), ("/with\\040blank", "cifs"),
    )  # fmt: skip
    found = {path: file_system_of(Path(path)) for path in ("/", "/a", "/a/b/c", "/a/bc", "/with blank/x", "/with")}
    assert found == {
        "/": "ext4", "/a": "nfs", "/a/b/c": "tmpfs", "/a/bc": "nfs", "/with blank/x": "cifs", "/with": "ext4",
    }  # fmt: skip


def test_mounts_that_cannot_be_read_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_rules, "MOUNTS_FILE", str(folder / "nothing"))
    with pytest.raises(asyncckpt.IOFailedError, match="remote_file_systems="):
        STRICT.check_target(folder / "run")
    replace(STRICT, remote_file_systems=()).check_target(folder / "run")


@pytest.mark.parametrize(
    "options",
    [
        {"sensitive_words": "Key"}, {"sensitive_words": ("",)}, {"forbidden_prefixes": ["/etc"]},
        {"remote_file_systems": (3,)}, {"length_max": "1024"}, {"permission_max": -1}, {"length_max": True},
    ],
)  # fmt: skip
def test_wrong_rules_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        PathRules(**options)


# -- the Saver uses them -----------------------------------------------------------------------------------------------


def test_saver_checks_before_it_makes_anything(folder: Path) -> None:
    net = CachedNet()
    with Saver(rank=0) as saver:
        for path, text in ((folder / "Key", "sensitive word"), ("/etc/runs", "is a special one")):
            with pytest.raises(UsageError, match=text):
                saver.save(net, path)
            with pytest.raises(UsageError, match=text):
                saver.save_async(net, path)
            with pytest.raises(UsageError, match=text):
                saver.load(net, path)
    assert list(folder.iterdir()) == []


def test_rules_are_the_savers(folder: Path) -> None:
    net = CachedNet().trained(range(2))
    with Saver(rank=0, path_rules=replace(STRICT, sensitive_words=())) as saver:
        assert saver.save(net, folder / "Key").step == 0
        assert saver.load(CachedNet(), folder / "Key").step == 0
    with pytest.raises(UsageError, match="path_rules"):
        Saver(rank=0, path_rules=None)  # type: ignore[arg-type]
