"""What diff and cat print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.cli.findings import ExitCode
from asyncckpt.inspection import compare, find_rows
from tests.program import invoke


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Between steps 1 and 2 a row changes, one goes and two come; so do a tensor, a value and metadata."""
    table = asyncckpt.HashTable("user", 2, dtype=torch.float16)
    table.insert(torch.tensor([5, -6, 7]), torch.tensor([[0.5, 1], [2, 3], [4, 5]], dtype=torch.float16))
    state = {"w": torch.tensor([1.0, 0.0]), "same": torch.ones(2), "epoch": 1}
    path = tmp_path / "run"
    with asyncckpt.Saver(path=path, hashtables={"user": table}, tensors=state) as saver:
        saver.save(1, metadata={"loss": 0.5})
        table.remove(torch.tensor([5]))
        table.insert(torch.tensor([7, 8, 9]), torch.full((3, 2), 0.1, dtype=torch.float16))
        state["w"][0] = 3
        state["epoch"] = 2
        saver.save(2, metadata={"loss": 0.25})
    return path


def lines_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_diff_tells_rows_columns_tensors_values_and_metadata(two: Path) -> None:
    result = invoke("diff", two)
    assert result.exit_code == ExitCode.DIFFERENT
    lines = lines_of(result.stdout)
    assert lines[0] == ["from", "step", "1", "to", "step", "2"]
    for line in (
        ["user", "3", "4", "2", "1", "1"],
        ["user", "added", "8", "9"],
        ["user", "removed", "5"],
        ["user", "changed", "7"],
        ["w", "changed", "float32", "[2]", "2", "1"],
        ["epoch", "1", "2"],
        ["loss", "0.5", "0.25"],
    ):
        assert line in lines
    [column] = [line for line in lines if line[0:1] == ["user@embedding"]]
    assert column[1:4] == ["float16", "[2]", "1"]
    assert "same" not in result.stdout


def test_diff_as_json(two: Path) -> None:
    answer = json.loads(invoke("diff", two, 1, 2, "--json").stdout)
    assert (answer["step"], answer["other_step"], answer["same"]) == (1, 2, False)
    table = answer["tables"]["user"]
    assert table["added"] == {"count": 2, "ids": [8, 9]}
    assert table["columns"]["embedding"]["rows"] == 1
    assert answer["tensors"]["w"] == {
        "kind": "changed",
        "before": "float32 [2]",
        "after": "float32 [2]",
        "max_abs": 2.0,
        "cosine": 1.0,
    }
    assert answer["values"] == {"epoch": {"before": [1], "after": [2]}}
    assert answer["metadata"] == {"loss": {"before": [0.5], "after": [0.25]}}
    assert json.loads(invoke("diff", two, "--json", "--most", 1).stdout)["tables"]["user"]["added"]["ids"] == [8]


def test_what_is_the_same_ends_with_0(two: Path, tmp_path: Path) -> None:
    result = invoke("diff", two, 2, 2)
    assert (result.exit_code, result.stdout) == (ExitCode.OK, "steps 2 and 2 hold the same: 4 entries\n")
    assert invoke("diff", two, 2, "--with", two).exit_code == ExitCode.OK
    assert invoke("diff", two, "--with", two).exit_code == ExitCode.OK
    missing = invoke("diff", two, 1, "--with", tmp_path / "nothing")
    assert (missing.exit_code, missing.stdout) == (ExitCode.NOT_FOUND, "")


def test_cat_prints_rows_in_the_order_of_ids(two: Path) -> None:
    result = invoke("cat", two, "user", 9, "-6")
    assert result.exit_code == ExitCode.OK
    assert lines_of(result.stdout) == [["id", "embedding"], ["9", "0.099975586", "0.099975586"], ["-6", "2.0", "3.0"]]
    first = invoke("cat", two, "user", "0x5", "--step", 1, "--json")
    assert json.loads(first.stdout)["rows"] == [{"id": 5, "embedding": [0.5, 1.0]}]


def test_cat_says_which_ids_are_not_there(two: Path) -> None:
    result = invoke("cat", two, "user", 5, 7)
    assert result.exit_code == ExitCode.NOT_FOUND
    assert result.stderr == "asyncckpt cat: table 'user' holds no row with id 5\n"
    assert [line[0] for line in lines_of(result.stdout)] == ["id", "7"]
    assert json.loads(invoke("cat", two, "user", 5, "--json").stdout) == {
        "path": str(two),
        "table": "user",
        "rows": [],
        "missing": [5],
    }


def test_cat_of_what_is_no_table_or_id(two: Path) -> None:
    result = invoke("cat", two, "item", 5)
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "no table 'item'" in result.stderr
    assert invoke("cat", two, "user", 1 << 63).exit_code == ExitCode.USAGE
    assert invoke("cat", two, "user", "five").exit_code == ExitCode.USAGE


@pytest.fixture
def ranked(tmp_path: Path) -> Path:
    """Rows 0 to 9 change by 0, 1, ... 9 in turn, down or up, row 3 to nan."""
    table = asyncckpt.HashTable("t", 2)
    ids = torch.arange(10)
    table.insert(ids, torch.zeros(10, 2))
    with asyncckpt.Saver(path=tmp_path / "run", hashtables={"t": table}) as saver:
        saver.save(1)
        values = torch.stack([torch.zeros(10), ids * torch.tensor(1.0).copysign(ids - 5.5)], dim=1)
        values[3] = torch.nan
        table.insert(ids[1:], values[1:])
        saver.save(2)
    return tmp_path / "run"


def test_diff_ranks_the_rows_that_changed_most(ranked: Path) -> None:
    lines = lines_of(invoke("diff", ranked, "--top", 4).stdout)
    at = lines.index(["changed", "most", "in", "id", "max", "abs"])
    assert lines[at + 1 : at + 6] == [["t", "3", "inf"], ["t", "9", "9"], ["t", "8", "8"], ["t", "7", "7"]]
    answer = json.loads(invoke("diff", ranked, "--top", 2, "--json").stdout)
    assert answer["tables"]["t"]["top"] == [{"id": 3, "max_abs": "inf"}, {"id": 9, "max_abs": 9.0}]
    assert "changed most" not in invoke("diff", ranked).stdout
    change = compare(ranked, 1, 2).tables["t"]
    assert dict(zip(change.changed.tolist(), change.max_abs.tolist(), strict=True))[5] == 5.0


def test_cat_without_ids_prints_the_lowest(ranked: Path) -> None:
    lines = lines_of(invoke("cat", ranked, "t", "--step", 1, "--most", 3).stdout)
    assert [line[0] for line in lines] == ["id", "0", "1", "2"]
    rows = json.loads(invoke("cat", ranked, "t", "--json").stdout)["rows"]
    assert [row["id"] for row in rows] == list(range(10))


def test_rows_are_found_by_arrays_of_ids(ranked: Path) -> None:
    for ids in ([0], torch.tensor([0]), torch.tensor([0]).numpy(), torch.tensor([0, 1]).numpy(), (2,)):
        assert find_rows(ranked, "t", ids).ids.tolist() == list(map(int, ids))
    with pytest.raises(asyncckpt.UsageError, match="most"):
        find_rows(ranked, "t", None, most=-1)


def test_ls_shows_metadata_and_lists_what_is_asked_for(two: Path) -> None:
    lines = lines_of(invoke("ls", two, "--metadata").stdout)
    assert lines[0][-1] == "metadata"
    assert [line[-1] for line in lines[1:]] == ["loss=0.5", "loss=0.25"]
    assert [found["metadata"] for found in json.loads(invoke("ls", two, "--json").stdout)["checkpoints"]] == [
        {"loss": 0.5},
        {"loss": 0.25},
    ]
    assert [line[0] for line in lines_of(invoke("ls", two, "--after", 1).stdout)] == ["step", "2"]
    assert lines_of(invoke("ls", two, "--most", 1).stdout)[0] == ["and", "1", "older", "ones", "(--most,", "--json)"]
    assert [line[0] for line in lines_of(invoke("ls", two, "--kind", "full").stdout)] == ["step", "1", "2"]
    assert "no such checkpoints" in invoke("ls", two, "--kind", "delta").stdout
