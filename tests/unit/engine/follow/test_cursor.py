"""The cursor file: replaced as a whole, believed only when it is what was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import asyncckpt
from asyncckpt import system
from asyncckpt.engine.follow.cursor import CursorFile, SeenStep

SEEN = SeenStep(step=120, digests=("a" * 32, "b" * 32))


def test_it_holds_what_was_written_last(tmp_path: Path) -> None:
    cursor = CursorFile(tmp_path / "cursor")
    assert cursor.read() is None
    cursor.write(SeenStep(step=7, digests=()))
    cursor.write(SEEN)
    assert CursorFile(tmp_path / "cursor").read() == SEEN
    assert os.listdir(tmp_path) == ["cursor"]


def test_what_a_dead_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".cursor.new").write_bytes(b"half of i")
    cursor = CursorFile(tmp_path / "cursor")
    cursor.write(SEEN)
    assert cursor.read() == SEEN
    assert os.listdir(tmp_path) == ["cursor"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_write_that_fails_leaves_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    cursor = CursorFile(tmp_path / "cursor")
    cursor.write(SEEN)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(system if call == "fsync" else os, call, fail)
    with pytest.raises(asyncckpt.IOFailedError, match="cannot be written"):
        cursor.write(SeenStep(step=121, digests=()))
    monkeypatch.undo()
    assert cursor.read() == SEEN
    assert os.listdir(tmp_path) == ["cursor"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"120",
        b"not json",
        b'{"format":"asyncckpt-cursor","version":1,"step":-1,"digests":[]}',
        b'{"format":"asyncckpt-cursor","version":1,"step":"1","digests":[]}',
        b'{"format":"asyncckpt-cursor","version":1,"step":1,"digests":[1]}',
        b'{"format":"asyncckpt-cursor","version":1,"step":1,"step":2,"digests":[]}',
        b'{"format":"asyncckpt-cursor","version":1,"step":1}',
        b'{"format":"another","version":1,"step":1,"digests":[]}',
        b" " * 5000,
    ],
)
def test_anything_else_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "cursor").write_bytes(raw)
    with pytest.raises(asyncckpt.CorruptError, match="cursor"):
        CursorFile(tmp_path / "cursor").read()


def test_a_newer_one_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "cursor").write_bytes(b'{"format":"asyncckpt-cursor","version":2}')
    with pytest.raises(asyncckpt.IncompatibleError):
        CursorFile(tmp_path / "cursor").read()


def test_a_place_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.UsageError):
        CursorFile(tmp_path)
    with pytest.raises(asyncckpt.NotFoundError):
        CursorFile(tmp_path / "missing" / "cursor").read()
