"""Ranks in processes of their own save one checkpoint, which any number of ranks loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.strategies import CommonLoad, ShardedLoad
from asyncckpt.strategies.mapping import ShardedObject, ShardedTensor
from tests.strategies.rank_process import WHOLE
from tests.strategies.rank_runs import run_ranks

pytestmark = pytest.mark.any_core


def test_two_ranks_save_and_one_loads(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000001"
    run_ranks("rank_process", 2, tmp_path / "store", folder)
    load = ShardedLoad()
    metadata = load.load_sharded_metadata(folder)
    assert set(metadata) == {"w", "norm", "layers", "rng/shard_0_2", "rng/shard_1_2"}  # "only on ..." was removed.
    wanted = {
        "w": ShardedTensor("w", None, torch.float32, (4, 6), (4, 6), (0, 0), None),
        "norm": ShardedTensor("norm", None, torch.float32, (3,), (3,), (0,), None),
        "layers": ShardedTensor("layers", None, torch.float32, (2, 2, 2), (2, 2, 2), (0, 0, 0), None),
        "rng": [ShardedObject("rng", None, (2,), (n,)) for n in range(2)],
    }
    got = load.load(wanted, folder)
    assert torch.equal(got["w"], WHOLE)
    assert got["norm"].tolist() == [1.0] * 3
    assert [layer.unique().tolist() for layer in got["layers"]] == [[0.0], [1.0]]
    assert [item["seed"] for item in got["rng"]] == [0, 1]
    objects = CommonLoad().load_sharded_objects(
        {str(n): ShardedObject("extra", None, (2,), (n,)) for n in range(2)}, folder
    )
    assert [item.read() for item in objects.values()] == [b"\0", b"\1"]
    for part in ("common", "objects", "sharded"):
        asyncckpt.verify(folder / part)
