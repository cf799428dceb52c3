"""`asyncckpt import` and `export` of every format: dry runs, names, progress, verification, codes, and begun again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.cli.findings import ExitCode
from asyncckpt.formats.conversion import Conversion
from tests.program import invoke
from tests.shares import share_of

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
# Options without which a format does not say what its slots are.
EXPORT: dict[str, list[str]] = {"recis": ["--optimizer", "sparse_adam"]}
FORMATS = ("dcp", "hf", "parquet", "recis", "recsdk", "torch")
WITH_TABLES, WITH_TENSORS = ("parquet", "recis", "recsdk"), ("dcp", "hf", "recis", "torch")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    table = asyncckpt.HashTable("user", 3, optimizer_slots={"exp_avg": torch.float32})
    table.insert(torch.arange(200), torch.randn(200, 3))
    state: dict[str, Any] = {"model": {"encoder": {"w": torch.arange(600.0)}, "head": torch.ones(4)}}
    asyncckpt.save(tmp_path / "run", state, 3, hashtables={"user": table})
    return tmp_path / "run"


def exported(kind: str, run: Path) -> Path:
    done = invoke("export", kind, run, run.parent / "out", *EXPORT.get(kind, []))
    assert done.exit_code == ExitCode.OK, done.output
    return run.parent / "out"


def names_in(path: Path) -> set[str]:
    """The names of tensors and tables of the newest step."""
    blocks = json.loads(invoke("show", path, "--json").stdout)["blocks"]
    return {block["name"].partition("@")[0] for block in blocks}


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_dry_run_says_what_is_done_and_makes_nothing(kind: str, run: Path, tmp_path: Path) -> None:
    more = EXPORT.get(kind, [])
    before = everything(tmp_path)
    planned = json.loads(invoke("export", kind, run, tmp_path / "out", *more, "--dry-run", "--json").stdout)
    assert everything(tmp_path) == before
    done = json.loads(invoke("export", kind, run, tmp_path / "out", *more, "--json").stdout)
    before = everything(tmp_path)
    looked = json.loads(invoke("import", kind, tmp_path / "out", tmp_path / "new", "--dry-run", "--json").stdout)
    assert everything(tmp_path) == before
    taken = json.loads(invoke("import", kind, tmp_path / "out", tmp_path / "new", "--json").stdout)
    same = ("tensors", "values", "tables", "left_out", "left_out_tables", "left_out_tensors", "left_out_columns")
    for plan, did in ((planned, done), (looked, taken)):
        assert (plan.pop("dry_run"), did.pop("dry_run")) == (True, False)
        assert {name: plan.get(name) for name in same} == {name: did.get(name) for name in same}
    assert done["step"] == planned["step"] == 3
    assert asyncckpt.list_steps(tmp_path / "new") == [taken["step"]]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("verify", [False, True])
def test_it_is_read_once_more_and_says_how_far_it_is(kind: str, verify: bool, run: Path, tmp_path: Path) -> None:
    """What it says that it has done comes near to what it has said that there is to do."""
    from asyncckpt.cli.convert import _converter

    options = {"optimizer": "sparse_adam"} if kind == "recis" else {}
    converter, out = _converter(kind), tmp_path / "out"
    asked = Conversion.of(run, out, verify=verify)
    converter.export_with(asked, **options)
    again = Conversion.of(out, tmp_path / "new", verify=verify)
    converter.import_with(again)
    for progress in (asked.progress, again.progress):
        assert progress.bytes_expected > 0
        # A file has a header and padding as well, and these are small ones.
        assert 0.5 < progress.bytes_done / progress.bytes_expected < 4
    if verify:
        unread = Conversion.of(out, tmp_path / "other", verify=False)
        converter.import_with(unread)
        assert unread.progress.bytes_done < again.progress.bytes_done


@pytest.mark.parametrize("kind", FORMATS)
def test_names_are_changed_on_the_way_out_and_in(kind: str, run: Path, tmp_path: Path) -> None:
    there = ["--rename", "user=customer"] if kind in WITH_TABLES else []
    there += ["--rename", "model.encoder=model.tower"] if kind in WITH_TENSORS else []
    back = [word.replace("customer=", "c.").replace("user=customer", "customer=client") for word in there]
    back = [word.replace("model.encoder=model.tower", "model.tower=model.base") for word in back]
    for more in (["--dry-run"], []):
        done = invoke("export", kind, run, tmp_path / "out", *EXPORT.get(kind, []), *there, *more)
        assert done.exit_code == ExitCode.OK, done.output
    for more in (["--dry-run"], []):
        done = invoke("import", kind, tmp_path / "out", tmp_path / "new", *back, *more)
        assert done.exit_code == ExitCode.OK, done.output
    expected = {"client"} if kind in WITH_TABLES else set()
    expected |= {"model.base.w", "model.head"} if kind in WITH_TENSORS else set()
    assert names_in(tmp_path / "new") == expected
    found = asyncckpt.load(tmp_path / "new", tables=True)
    if kind in WITH_TABLES:
        order = found["client"]["id"].argsort()
        assert found["client"]["id"][order].tolist() == list(range(200))
    if kind in ("dcp", "torch"):
        assert torch.equal(found["model"]["base"]["w"], torch.arange(600.0))
    if kind in ("hf", "recis"):
        assert torch.equal(found["model.base.w"], torch.arange(600.0))


WRONG: list[tuple[list[str], str]] = [
    (["nothing=other"], "unknown names"),
    (["user=a", "user=b"], "maps one name twice"),
    (["user"], "is not OLD=NEW"),
]


@pytest.mark.parametrize("kind", FORMATS)
def test_wrong_names_are_refused(kind: str, run: Path, tmp_path: Path) -> None:
    wrong = [*WRONG]
    if kind in WITH_TENSORS:
        wrong += [(["model.encoder.w=model.head"], "cannot become"), (["model.encoder=other"], "cannot become")]
        wrong += [(["model.encoder=model.head"], "the same name")]
    out = exported(kind, run)
    for pairs, words in wrong:
        names = [word for pair in pairs for word in ("--rename", pair)]
        for more in (["--dry-run"], []):
            done = invoke("export", kind, run, tmp_path / "other", *EXPORT.get(kind, []), *names, *more)
            assert (done.exit_code, words in done.stderr) == (ExitCode.USAGE, True), done.output
            if words in [word for _, word in WRONG]:
                done = invoke("import", kind, out, tmp_path / "new", *names, *more)
                assert (done.exit_code, words in done.stderr) == (ExitCode.USAGE, True), done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("kind", FORMATS)
def test_each_ending_has_its_code(kind: str, run: Path, tmp_path: Path) -> None:
    more, out = EXPORT.get(kind, []), exported(kind, run)
    nowhere = tmp_path / "nowhere"
    made = invoke("import", kind, out, tmp_path / "new", "--step", 7)
    assert made.exit_code == ExitCode.OK
    cases: list[tuple[ExitCode, tuple[object, ...]]] = [
        (ExitCode.NOT_FOUND, ("import", kind, nowhere, tmp_path / "x")),
        (ExitCode.NOT_FOUND, ("export", kind, nowhere, tmp_path / "x", *more)),
        (ExitCode.NOT_FOUND, ("export", kind, run, tmp_path / "x", "--step", 99, *more)),
        (ExitCode.HELD, ("import", kind, out, tmp_path / "new", "--step", 7)),
        (ExitCode.HELD, ("export", kind, run, out, *more)),
        (ExitCode.USAGE, ("import", kind, out)),
        (ExitCode.USAGE, ("import", kind, out, tmp_path / "x", "--step", "last")),
        (ExitCode.USAGE, ("import", kind, out, tmp_path / "x", "--shards", 2)),
    ]
    for code, words in cases:
        for dry in ((), ("--dry-run",)):
            done = invoke(*words, *dry)
            assert (done.exit_code, done.stdout) == (code, ""), (words, done.output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out", "run"]


OPERATIONS = 12  # Before the one in which the process ends.
KILLED = """
import os, sys
from asyncckpt.cli import run
left = int(sys.argv[1])
def counted(real):
    def call(*arguments, **more):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return real(*arguments, **more)
    return call
for name in ("open", "rename", "fsync", "mkdir"):
    setattr(os, name, counted(getattr(os, name)))
sys.exit(run(sys.argv[2:]))
"""


@pytest.mark.parametrize("kind", share_of(FORMATS, "killed conversions"))
def test_one_that_was_killed_is_begun_again(kind: str, run: Path, tmp_path: Path) -> None:
    """The same command does all of it, and nothing of before is in the way."""
    for command in (
        ["export", kind, str(run), str(tmp_path / "out"), *EXPORT.get(kind, [])],
        ["import", kind, str(tmp_path / "out"), str(tmp_path / "new"), "--step", "5"],
    ):
        words = [sys.executable, "-c", KILLED, str(OPERATIONS), *command]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 9, ended.stderr
        assert list(tmp_path.glob("new/manifests/*")) == []
        result = invoke(*command)
        assert result.exit_code == ExitCode.OK, result.output
    assert asyncckpt.list_steps(tmp_path / "new") == [5]
    asyncckpt.verify(tmp_path / "new")
