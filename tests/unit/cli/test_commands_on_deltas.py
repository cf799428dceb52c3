"""The command line over checkpoints that build upon each other: what it shows of them, compacting, following."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.cli.findings import ExitCode
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.owner_lock import _lock_file
from tests.program import answer_of
from tests.program import invoke as run


@pytest.fixture
def deltas(tmp_path: Path) -> Path:
    """Step 10 is full, 20 and 30 build upon it; 20 has 5 rows and 3 removed ids, 30 nothing of the table."""
    table = asyncckpt.HashTable("user", 4)
    table.lookup(torch.arange(50))
    policy = asyncckpt.DeltaPolicy(bytes_share_max=100.0)
    with asyncckpt.Saver(
        path=tmp_path / "run", hashtables={"user": table}, tensors={"x": torch.ones(2)}, deltas=policy
    ) as saver:
        saver.save(10)
        table.lookup(torch.arange(5))
        table.remove(torch.arange(10, 13))
        saver.save_async(20).result(60)
        saver.save_async(30, metadata={"loss": float("inf")}).result(60)
    return tmp_path / "run"


def test_ls_shows_what_builds_upon_what(deltas: Path) -> None:
    result = run("ls", deltas)
    assert result.exit_code == ExitCode.OK
    head, *lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert head[:4] == ["step", "created", "kind", "base"]
    assert [(line[0], *line[2:4]) for line in lines] == [
        ("10", "full", "-"),
        ("20", "delta", "10"),
        ("30", "delta", "20"),
    ]
    first, second, third = answer_of(run("ls", deltas, "--json"))["checkpoints"]
    assert (first["kind"], first["parents"]) == ("full", [])
    assert (second["kind"], second["parents"]) == ("delta", [10])
    assert third["parents"] == [20, 10]
    assert second["table_infos"] == {"user": {"rows": 5, "whole": False, "removed": 3, "filters": []}}


def test_show_tells_the_chain_and_what_a_delta_holds(deltas: Path) -> None:
    text = run("show", deltas, 30).stdout
    assert "20 -> 10 (full)" in text
    text = run("show", deltas, 20).stdout
    (line,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["user"]]
    assert line == ["user", "5", "3", "changes"]
    assert "user@#removed" in text
    assert "base" not in run("show", deltas, 10).stdout


def test_long_chains_are_shown_by_their_ends(tmp_path: Path) -> None:
    policy = asyncckpt.DeltaPolicy(deltas_max=100, bytes_share_max=100.0)
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(2)}, deltas=policy) as saver:
        for step in range(31):
            saver.save(step)
    assert "29 -> 28 ->" in run("show", tmp_path).stdout
    assert "-> ... 15 more ... -> 0 (full)" in " ".join(run("show", tmp_path).stdout.split())


def test_verify_reads_the_whole_chain(deltas: Path) -> None:
    (entry,) = answer_of(run("verify", deltas, "--json"))["checkpoints"]
    assert entry["steps"] == [30, 20, 10]


def test_compact_folds_the_newest_step(deltas: Path) -> None:
    result = run("compact", deltas)
    assert result.exit_code == ExitCode.OK
    assert "step 30 is now a full checkpoint" in result.stdout
    assert "compacted" in run("show", deltas).stdout
    assert answer_of(run("show", deltas, "--json"))["compacted"] is True
    again = run("compact", deltas)
    assert again.exit_code == ExitCode.OK
    assert "step 30 is a full checkpoint already" in again.stdout
    answer = answer_of(run("compact", deltas, 20, "--json"))
    assert (answer["step"], answer["compacted"]) == (20, True)
    assert answer["bytes_written"] > 0
    assert answer_of(run("compact", deltas, 20, "--json"))["compacted"] is False
    assert run("verify", deltas, "--all").exit_code == ExitCode.OK


def test_compact_does_not_write_beside_a_training_process(deltas: Path) -> None:
    with Directory.open(deltas) as root:
        lock = _lock_file(root, LOCK_NAME)  # As another process would: by an open file of its own.
    try:
        result = run("compact", deltas)
    finally:
        os.close(lock)
    assert result.exit_code == ExitCode.HELD
    assert "Saver.compact()" in result.stderr


def test_follow_prints_a_line_for_each_step(deltas: Path, tmp_path: Path) -> None:
    result = run("follow", deltas, "--until", 30)
    assert result.exit_code == ExitCode.OK
    assert result.stdout.splitlines() == [
        "step 10  full  user all 50 rows",
        "step 20  delta on 10  user 5 rows, 3 removed",
        "step 30  delta on 20  user 0 rows",
    ]
    lines = run("follow", deltas, "--until", 30, "--after", 10, "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "step": 20,
            "kind": "delta",
            "previous": 10,
            "tables": {"user": {"rows_count": 5, "removed_count": 3, "whole": False}},
            "metadata": {},
        },
        {
            "step": 30,
            "kind": "delta",
            "previous": 20,
            "tables": {"user": {"rows_count": 0, "removed_count": 0, "whole": False}},
            "metadata": {"loss": "inf"},
        },
    ]


def test_follow_goes_on_where_its_cursor_is(deltas: Path, tmp_path: Path) -> None:
    cursor = tmp_path / "cursor"
    first = run("follow", deltas, "--until", 20, "--cursor", cursor)
    second = run("follow", deltas, "--until", 30, "--cursor", cursor)
    assert [line.split()[1] for line in (first.stdout + second.stdout).splitlines()] == ["10", "20", "30"]
    assert run("follow", deltas, "--until", 30, "--cursor", cursor).stdout == ""


def test_follow_ends_at_a_damaged_step(deltas: Path) -> None:
    (deltas / "manifests" / f"{20:012d}.json").write_bytes(b"")
    result = run("follow", deltas)
    assert result.exit_code == ExitCode.DAMAGED
    assert result.stdout.splitlines() == ["step 10  full  user all 50 rows"]
    assert "is empty" in result.stderr


def test_ctrl_c_is_the_way_to_end_a_follow(deltas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncckpt.cli.screen.print_update", interrupted)
    assert run("follow", deltas).exit_code == ExitCode.OK
