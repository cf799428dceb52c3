"""The commands that change a directory: what they say they did, would do, or refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.cli.findings import ExitCode
from tests.program import invoke


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1, 2 and 4 are full, 3 is a delta upon 2."""
    policy = asyncckpt.DeltaPolicy(bytes_share_max=100.0)
    with asyncckpt.Saver(path=tmp_path / "run", tensors={"x": torch.ones(2)}, deltas=policy) as saver:
        for step, kind in ((1, "full"), (2, "full"), (3, "delta"), (4, "full")):
            saver.save_async(step, kind=kind, metadata={"loss": 1.0 * step}).result(60)
    return tmp_path / "run"


def test_rm_removes_what_is_named(run: Path) -> None:
    assert invoke("rm", run, 1, 4, "--dry-run").stdout == "would remove 2 checkpoints: 1, 4\n"
    assert asyncckpt.list_steps(run) == [1, 2, 3, 4]
    assert invoke("rm", run, 1, 4).stdout == "removed 2 checkpoints: 1, 4\n"
    assert asyncckpt.list_steps(run) == [2, 3]
    answer = json.loads(invoke("rm", run, "--after", 2, "--json").stdout)
    assert answer == {"path": str(run), "dry_run": False, "removed": [3]}


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_rm_refuses_what_others_need(run: Path, more: tuple[str, ...]) -> None:
    invoke("pin", run, 1)
    for step, code, why in ((2, 2, "is the base of step"), (1, 2, "is pinned"), (9, 3, "step 9 is not in")):
        result = invoke("rm", run, step, *more)
        assert (result.exit_code, result.stdout) == (code, "")
        assert why in result.stderr
        assert result.stderr.count("\n") == 1
    assert asyncckpt.list_steps(run) == [1, 2, 3, 4]
    assert invoke("rm", run, 1, "--even-pinned").exit_code == ExitCode.OK


def test_rm_takes_steps_or_after(run: Path) -> None:
    assert invoke("rm", run).exit_code == ExitCode.USAGE
    assert invoke("rm", run, 1, "--after", 2).exit_code == ExitCode.USAGE


def test_prune_says_why_the_rest_stays(run: Path) -> None:
    more = ("--latest", 1, "--best", 1, "--metric", "loss", "--mode", "min")
    answer = json.loads(invoke("prune", run, *more, "--dry-run", "--json").stdout)
    assert (answer["dry_run"], answer["removed"]) == (True, [2, 3])
    assert answer["kept"].keys() == {"1", "4"}
    assert answer["bytes"] > 0
    assert "removed 2 checkpoints: 2, 3, " in invoke("prune", run, *more).stdout
    assert asyncckpt.list_steps(run) == [1, 4]
    assert invoke("prune", run, "--latest", 1, "--best", 1).exit_code == ExitCode.USAGE
    assert invoke("prune", run, "--latest", 0).exit_code == ExitCode.USAGE


def test_pins_are_seen_and_taken_back(run: Path) -> None:
    assert invoke("pin", run, 3).stdout == "step 3 is pinned\n"
    lines = [line.split() for line in invoke("ls", run).stdout.splitlines()[1:]]
    assert [line[-1] for line in lines] == ["committed", "committed", "pinned", "committed"]
    assert "retention keeps it" in invoke("show", run, 3).stdout
    assert json.loads(invoke("show", run, 3, "--json").stdout)["pinned"] is True
    assert invoke("unpin", run, 3).stdout == "step 3 is no longer pinned\n"
    assert "nothing to do" in invoke("unpin", run, 3).stdout
    assert invoke("pin", run, 9).exit_code == ExitCode.NOT_FOUND


def test_gc_removes_what_a_crash_has_left(run: Path) -> None:
    stray = run / "data" / f"{5:012d}-{'0' * 32}"
    stray.mkdir()
    (stray / "r00000-000.safetensors").write_bytes(b"12345")
    assert invoke("gc", run).stdout == "removed leftovers: 1 folder, 1 file, 5 B\n"
    assert not stray.exists()
    assert json.loads(invoke("gc", run, "--json").stdout)["folders_count"] == 0


def test_of_many_checkpoints_the_first_and_the_last_are_named(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(2)}, durability="none") as saver:
        assert repr(saver) == f"Saver('{tmp_path}', 0 tables, open)"
        for step in range(1, 31):
            saver.save(step)
    said = invoke("prune", tmp_path, "--latest", 2, "--dry-run").stdout.splitlines()[0]
    assert said.startswith("would remove 28 checkpoints: 1, 2, 3, ... 22 more ..., 26, 27, 28, ")
    assert len(json.loads(invoke("prune", tmp_path, "--latest", 2, "--dry-run", "--json").stdout)["removed"]) == 28
