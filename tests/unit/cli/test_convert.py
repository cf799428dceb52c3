"""The commands that convert: what they say, what they would do, and how they end."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.cli import convert
from asyncckpt.cli.findings import ExitCode
from tests.formats.states import same
from tests.program import invoke
from tests.recis.handmade import Handmade, dense_values, user_rows


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Handmade.of({"user": user_rows(300)}, dense_values(), shards=2).write(tmp_path / "ckpt_40")


def test_there_and_back(source: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    said = "step 40: 1 table of 300 rows, 5 tensors, 2 shards, "
    assert invoke("import", "recis", source, run, "--dry-run").stdout.startswith("would import " + said)
    assert not run.exists()
    assert invoke("import", "recis", source, run).stdout.startswith("imported " + said)
    assert asyncckpt.list_steps(run) == [40]
    more = ("--optimizer", "sparse_adam", "--shards", 1)
    answer = json.loads(invoke("export", "recis", run, out, *more, "--dry-run", "--json").stdout)
    assert (answer["dry_run"], answer["step"], answer["tables"], answer["shards"]) == (True, 40, {"user": 300}, 1)
    assert not out.exists()
    assert json.loads(invoke("export", "recis", run, out, *more, "--json").stdout)["tables"] == {"user": 300}
    assert invoke("import", "recis", out, run, "--step", 41, "--no-verify").exit_code == ExitCode.OK
    assert [line.split()[0] for line in invoke("ls", run).stdout.splitlines()[1:]] == ["40", "41"]


def test_an_import_of_recis_does_not_go_into_its_own_source(source: Path) -> None:
    for target in (source, source / "run"):
        for more in (["--dry-run"], []):
            done = invoke("import", "recis", source, target, *more)
            assert (done.exit_code, "into its own source" in done.stderr) == (ExitCode.USAGE, True)
    assert not (source / "run").exists()


STATE: dict[str, Any] = {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3)}, "epoch": 3}


@pytest.mark.parametrize(
    ("kind", "name", "said", "back"),
    [
        ("torch", "state.pt", "2 tensors, 1 plain value, ", STATE),
        ("dcp", "dcp", "2 tensors, 1 plain value, 1 shard, ", STATE),
        ("hf", "hf", "2 tensors, 1 shard, ", {f"model.{name}": tensor for name, tensor in STATE["model"].items()}),
    ],
)
def test_other_formats_there_and_back(kind: str, name: str, said: str, back: dict[str, Any], tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2)
    asyncckpt.save(tmp_path / "run", STATE, step=4, hashtables={"user": table})
    out, again = tmp_path / name, tmp_path / "again"
    facts = json.loads(invoke("export", kind, tmp_path / "run", out, "--dry-run", "--json").stdout)
    assert (facts["dry_run"], facts["step"], facts["tensors"], facts["bytes"]) == (True, 4, 2, 36)
    assert facts["left_out_tables"] == ["user"]
    assert not out.exists()
    done = invoke("export", kind, tmp_path / "run", out)
    assert done.stdout.startswith(f"exported step 4: {said}")
    assert done.stdout.splitlines()[-1] == "left out: 1 table: user"
    assert done.stderr == ""
    assert invoke("export", kind, tmp_path / "run", out).exit_code == ExitCode.HELD
    assert invoke("import", kind, out, again, "--dry-run").stdout.startswith(f"would import: {said}")
    assert not again.exists()
    assert invoke("import", kind, out, again, "--step", 9).stdout.startswith(f"imported step 9: {said}")
    assert invoke("import", kind, out, again, "--step", 9, "--dry-run").exit_code == ExitCode.HELD
    facts = json.loads(invoke("import", kind, out, again, "--json", "--no-verify", "--parallel", 2).stdout)
    assert (facts["dry_run"], facts["step"], facts["tensors"]) == (False, 10, 2)
    for step in (9, 10):
        assert same(dict(sorted(asyncckpt.load(again, step).items())), dict(sorted(back.items())))


def test_shards_have_a_size(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", STATE)
    done = invoke("export", "hf", tmp_path / "run", tmp_path / "out", "--shard-size", "30B")
    assert "2 shards" in done.stdout
    assert len(list((tmp_path / "out").iterdir())) == 3
    for wrong in ("0", "5TB", "many", "-1"):
        assert invoke("export", "hf", tmp_path / "run", tmp_path / "new", f"--shard-size={wrong}").exit_code == 2
    for text, size in (("7", 7), ("2kB", 2000), ("5GB", 5 * 10**9), ("1 GiB", 1 << 30)):
        assert convert._size(text) == size


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf", "recis"])
def test_options_of_other_formats_are_refused(kind: str, tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", STATE)
    options = {"column": "a=b", "parallel": 2, "shards": 2, "optimizer": "sparse_adam", "shard_size": "1GB"}
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        done = invoke("export", kind, tmp_path / "run", tmp_path / "out", option, value, "--dry-run")
        refused = name not in convert.FORMATS[kind].to_export
        assert (done.exit_code == ExitCode.USAGE and f"{option} does not apply to {kind}" in done.stderr) == refused
    assert invoke("import", kind, tmp_path / "run", tmp_path / "new", "--shards", 2).exit_code == ExitCode.USAGE


def test_columns_are_named(source: Path, tmp_path: Path) -> None:
    done = invoke("import", "recis", source, tmp_path / "run", "--column", "sparse_adam_exp_avg=mean")
    assert done.exit_code == ExitCode.OK
    blocks = json.loads(invoke("show", tmp_path / "run", "--json").stdout)["blocks"]
    assert {"user@mean", "user@exp_avg_sq", "user@last_seen"} < {block["name"] for block in blocks}


def test_what_is_refused_ends_with_its_code(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert invoke("import", "recis", source, run).exit_code == ExitCode.OK
    asyncckpt.save(tmp_path / "odd", {"x": torch.ones(1, dtype=torch.complex64)})
    (source / "index").write_text("{")
    cases = [
        (ExitCode.DAMAGED, "strict JSON", ("import", "recis", source, tmp_path / "new")),
        (ExitCode.NOT_FOUND, "does not exist", ("import", "recis", tmp_path / "none", tmp_path / "new")),
        (ExitCode.NOT_FOUND, "step 7 is not in", ("export", "recis", run, tmp_path / "new", "--step", 7)),
        (ExitCode.USAGE, "is not known", ("export", "recis", run, tmp_path / "new")),
        (ExitCode.USAGE, "optimizer must be", ("export", "recis", run, tmp_path / "new", "--optimizer", "adam")),
        (ExitCode.USAGE, "SLOT=COLUMN", ("import", "recis", source, run, "--column", "a")),
        (ExitCode.USAGE, "invalid choice", ("import", "other", source, run)),
        (ExitCode.UNREADABLE, "complex64", ("export", "recis", tmp_path / "odd", tmp_path / "new")),
        (ExitCode.HELD, "already exists", ("export", "recis", run, source, "--optimizer", "sparse_adam")),
    ]
    for code, words, arguments in cases:
        for more in ((), ("--dry-run",)):
            result = invoke(*arguments, *more)
            assert result.exit_code == code, result.output
            assert words in result.stderr
            assert result.stdout == ""
            assert not (tmp_path / "new").exists()


def test_plain_values_are_left_out_and_named(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {"x": torch.ones(1), "epoch": 3, "names": ["a", "b"]})
    lines = invoke("export", "recis", tmp_path / "run", tmp_path / "out").stdout.splitlines()
    assert lines[1] == "left out: 3 values: epoch, names.0, names.1"


def test_of_many_that_are_left_out_whole_names_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    names = [f"number{index:03}" for index in range(100)]
    state = {"x": torch.ones(1), "n" * 300: 1}
    asyncckpt.save(tmp_path / "run", {"x": torch.ones(1), **dict.fromkeys(names, 1)}, step=1)
    asyncckpt.save(tmp_path / "run", {**state, "more": 1}, step=2)
    first = invoke("export", "hf", tmp_path / "run", tmp_path / "out", "--step", 1).stdout.splitlines()[-1]
    assert first == f"left out: 100 values: {', '.join(names[:18])} and 82 more (--json)"
    second = invoke("export", "hf", tmp_path / "run", tmp_path / "again", "--step", 2).stdout.splitlines()[-1]
    assert second == f"left out: 2 values: {'n' * 300} and 1 more (--json)"


def test_a_terminal_is_told_how_far_it_is(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.cli.convert.TICK_S", 0.0)

    class Terminal:
        def __init__(self) -> None:
            self.text, self.seen = "", threading.Event()

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.text += text
            if "2 KiB" in self.text:
                self.seen.set()
            return len(text)

        def flush(self) -> None:
            """Nothing is held back."""

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with convert._shown("importing") as progress:
        progress.advance(2048)
        assert terminal.seen.wait(60)
    assert terminal.text.endswith("\r\x1b[K")
