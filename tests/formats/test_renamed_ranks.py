"""Two things of different ranks do not become one by another name: nothing is lost without a word."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.program import invoke

pytestmark = [pytest.mark.any_core, pytest.mark.filterwarnings("ignore:(tables|tensors) .* are left out")]
KINDS = ["torch", "dcp", "hf", "recis", *(["parquet"] if importlib.util.find_spec("pyarrow") else [])]


def table(name: str, rank: int) -> asyncckpt.HashTable:
    made = asyncckpt.HashTable(name, 2, replicated=True)
    made.insert(torch.arange(rank, 8, 2), torch.full((4, 2), float(rank)))
    return made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint of two ranks that hold different things."""
    tensors: list[dict[str, Any]] = [{"b": torch.zeros(3)}, {"a": torch.ones(5), "m": {"x": torch.ones(2)}}]
    savers = [
        asyncckpt.Saver(
            rank,
            2,
            path=tmp_path / "run",
            tensors=tensors[rank],
            hashtables={f"t{rank}": table(f"t{rank}", rank)},
            ranks=asyncckpt.RankOptions(in_turn=True),
        )
        for rank in range(2)
    ]
    for saver in savers:
        saver.save(0)
    for saver in savers:
        saver.close()
    return tmp_path / "run"


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("rename", ["a=b", "b=m"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "parquet"])
def test_tensors(kind: str, rename: str, dry: bool, run: Path, tmp_path: Path) -> None:
    done = invoke("export", kind, run, tmp_path / "out", "--rename", rename, *(["--dry-run"] if dry else []))
    assert done.exit_code == 2, done.stdout + done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ("parquet", "recis")])
def test_tables(kind: str, dry: bool, run: Path, tmp_path: Path) -> None:
    done = invoke("export", kind, run, tmp_path / "out", "--rename", "t1=t0", *(["--dry-run"] if dry else []))
    assert done.exit_code == 2, done.stdout + done.stderr
    assert "same name" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_meet_is_renamed(kind: str, run: Path, tmp_path: Path) -> None:
    done = invoke("export", kind, run, tmp_path / "out", "--rename", "t1=t7" if kind == "parquet" else "a=c")
    assert done.exit_code == 0, done.stdout + done.stderr
