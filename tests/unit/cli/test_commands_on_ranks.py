"""The command line on a checkpoint of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.cli.findings import ExitCode
from tests.end_to_end.merged_ranks import as_boxes, save_each
from tests.program import invoke


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two ranks: a table in two shards, a tensor in two boxes, one that only rank 1 has written."""
    states, tables = [], []
    for rank in range(2):
        table = asyncckpt.HashTable("user", 4, shard=(rank, 2))
        ids = torch.arange(51)
        table.lookup(ids[table.owns(ids)])
        states.append({"w": torch.ones(3, 2 + rank), "same": torch.ones(7)})
        tables.append({"user": table})
    boxes = {(0, "w"): ((0, 0), (3, 5)), (1, "w"): ((0, 2), (3, 5))}
    return save_each(tmp_path, states, tables=tables, change=as_boxes(boxes, only={"same": 1}))


def test_show_tells_what_each_rank_has_written(checkpoint: Path) -> None:
    result = invoke("show", checkpoint)
    assert result.exit_code == ExitCode.OK
    assert "saved by" in result.stdout
    assert "2 ranks" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    info = asyncckpt.describe(checkpoint)
    for rank, rows_count in ((0, 26), (1, 25)):
        row = next(line for line in lines if line[:2] == [str(rank), "1"])
        assert row[-1] == str(rows_count)
        assert info.ranks[rank].tables == {"user": rows_count}
    assert ["user", "51"] in lines


def test_show_json_holds_ranks_and_boxes(checkpoint: Path) -> None:
    result = invoke("show", checkpoint, "--json")
    answer = json.loads(result.stdout)
    assert answer["ranks_count"] == 2
    assert [(rank["rank"], len(rank["files"]), rank["tables"]) for rank in answer["ranks"]] == [
        (0, 1, {"user": 26}),
        (1, 1, {"user": 25}),
    ]
    assert sum(rank["bytes"] for rank in answer["ranks"]) == answer["bytes"]
    boxes = [block for block in answer["blocks"] if block["name"] == "w"]
    assert [(block["rank"], block["begin"], block["shape"], block["whole_shape"]) for block in boxes] == [
        (0, [0, 0], [3, 2], [3, 5]),
        (1, [0, 2], [3, 3], [3, 5]),
    ]
    (same,) = [block for block in answer["blocks"] if block["name"] == "same"]
    assert (same["rank"], same["whole_shape"]) == (1, None)


def test_ls_and_verify(checkpoint: Path) -> None:
    listed = invoke("ls", checkpoint)
    assert listed.exit_code == ExitCode.OK
    row = next(line.split() for line in listed.stdout.splitlines() if line.split()[:1] == ["1"])
    assert row[-4:] == ["2", "51", "2", "committed"]  # Files, rows, tensors.
    assert invoke("verify", checkpoint).exit_code == ExitCode.OK
    (shard,) = (checkpoint / "data").glob("*/r00001-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    damaged = invoke("verify", checkpoint)
    assert damaged.exit_code == ExitCode.DAMAGED
    assert "r00001-000.safetensors" in damaged.stdout
