"""Limits at their true sizes, where that costs nothing: what was acknowledged once and could not be read."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asyncckpt

TOO_LARGE: dict[str, Callable[[], object]] = {
    "65 dimensions": lambda: torch.ones([1] * 65),
    "64 dimensions of pairs": lambda: torch.zeros([1] * 64, dtype=torch.complex128),
    "2**63 bytes but for a dimension of 0": lambda: torch.empty((0, 2**61)),
    "over 1 GiB in base64": lambda: bytes(810 << 20),
}
TABLES_COUNT = 1_001


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_refused_in_the_call(tmp_path: Path, kind: str) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"model": {"leaf": TOO_LARGE[kind]()}}) as saver:
        with pytest.raises(asyncckpt.CheckpointError, match=r"model.*leaf"):
            saver.save_async(1)
        assert list((tmp_path / "data").iterdir()) == []
    assert asyncckpt.list_steps(tmp_path) == []


def test_more_than_a_thousand_shard_files_of_a_rank(tmp_path: Path) -> None:
    """Every table that is left open has a file of its own."""
    files_max, hard_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files_max, min(4096, hard_max)), hard_max))
    tables = {
        f"t{number}": asyncckpt.MultiLevelTable(f"t{number}", 1, cache_rows=4, capacity=8)
        for number in range(TABLES_COUNT)
    }
    try:
        for number, table in enumerate(tables.values()):
            table.insert(torch.tensor([number]), torch.full((1, 1), float(number)))
        with asyncckpt.Saver(path=tmp_path, hashtables=tables, host_level="first_touch", durability="none") as saver:
            saver.save_async(1).result(120)
        asyncckpt.verify(tmp_path, 1)
        last = f"t{TABLES_COUNT - 1}"
        loaded = asyncckpt.HashTable(last, 1)
        asyncckpt.Loader(tmp_path, hashtables={last: loaded}, strict=False).load()
        rows = loaded.lookup(torch.tensor([TABLES_COUNT - 1]), insert=False)
        assert loaded.embedding[rows].tolist() == [[TABLES_COUNT - 1.0]]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, hard_max))
