"""What doctor finds, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from asyncckpt.cli.findings import ExitCode
from asyncckpt.storage import disk_probe
from tests.program import invoke


def answer_of(path: Path, *, code: ExitCode = ExitCode.OK) -> Any:
    result = invoke("doctor", path, "--mib", 16, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_it_says_what_to_expect(tmp_path: Path) -> None:
    answer = answer_of(tmp_path)
    assert answer["problems"] == []
    assert answer["disk"]["renames"] is answer["disk"]["locks"] is True
    assert answer["disk"]["bytes_per_s"] > 0
    assert answer["memory"]["staging_bytes"] > 0
    assert answer["core"]["implementation"] in ("native", "twin")
    assert any("durable" in line for line in answer["expect"])
    assert list(tmp_path.iterdir()) == []
    text = invoke("doctor", tmp_path, "--mib", 0).stdout
    for word in ("directory", "disk", "memory", "core", "CUDA", "versions", "what to expect"):
        assert word in text


@pytest.mark.parametrize("mib", [0, 15])
def test_a_speed_that_was_not_to_be_measured_is_not_laid_to_the_disk(tmp_path: Path, mib: int) -> None:
    text = invoke("doctor", tmp_path, "--mib", mib).stdout
    assert "No speed was measured: that takes --mib 16 or more." in text
    assert "nearly full" not in text


def test_a_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    answer = answer_of(tmp_path / "a" / "b")
    assert answer["disk"]["folder"] == str(tmp_path)
    assert "does not exist" in answer["directory"]["state"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say that a file is locked")
def test_it_names_who_holds_the_directory(tmp_path: Path) -> None:
    saver = f"import asyncckpt, sys; s = asyncckpt.Saver(path={str(tmp_path)!r})"
    program = f"{saver}; print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        before = (tmp_path / "LOCK").read_bytes()
        assert f"process {child.pid} " in answer_of(tmp_path, code=ExitCode.FAILED)["directory"]["held_by"]
        assert (tmp_path / "LOCK").read_bytes() == before
        child.communicate("")
    assert answer_of(tmp_path)["directory"]["held_by"] is None


KINDS = ["LOCK is a folder", "LOCK is a link", "manifests is a link"]


@pytest.mark.parametrize("kind", KINDS + (["LOCK is a FIFO"] if hasattr(os, "mkfifo") else []))
def test_a_directory_that_a_saver_refuses_is_a_problem(tmp_path: Path, kind: str) -> None:
    """It said that all is well, and waited for ever to open a FIFO."""
    for name in ("manifests", "data", "elsewhere"):
        (tmp_path / name).mkdir()
    name, _, what = kind.partition(" is a ")
    if what == "link":
        if name == "manifests":
            (tmp_path / name).rmdir()
        (tmp_path / name).symlink_to("elsewhere")
    else:
        (os.mkdir if what == "folder" else os.mkfifo)(tmp_path / name)
    problems = answer_of(tmp_path, code=ExitCode.FAILED)["problems"]
    assert len(problems) == 1
    assert name in problems[0]


def test_a_disk_that_refuses_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = invoke("doctor", tmp_path, "--mib", 0)
    assert result.exit_code == ExitCode.FAILED
    assert "No space left" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_writes_or_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "_write", lambda *_: (False, 1e9))
    monkeypatch.setattr(disk_probe, "_locks", lambda _: False)
    answer = answer_of(tmp_path)
    assert any("page cache" in line for line in answer["expect"])
    assert any("Locks" in line for line in answer["expect"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_it_finds_nothing_left(tmp_path: Path, number: int) -> None:
    program = f"""
import os, sys
from asyncckpt.storage import disk_probe
write = disk_probe._write
def and_a_signal(*arguments):
    os.kill(os.getpid(), {int(number)})
    return write(*arguments)
disk_probe._write = and_a_signal
sys.argv = ["asyncckpt", "doctor", {str(tmp_path)!r}]
from asyncckpt.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert done.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_left_as_they_are(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"x": 1})
    before = sorted((str(path), path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    assert answer_of(tmp_path)["directory"]["checkpoints_count"] == 1
    assert sorted((str(path), path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
