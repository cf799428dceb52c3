"""Megatron-Core's interface, with the parts of a checkpoint in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import NotFoundError, UsageError
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from asyncckpt.strategies import CommonLoad, CommonSave, ShardedLoad, ShardedSave
from asyncckpt.strategies.mapping import ShardedObject, ShardedTensor
from tests.cloud import seaweed
from tests.cloud.strategies_rank import COLUMNS, whole
from tests.ranks.processes import await_ranks, start_rank

WAIT_S = 120.0


def state(value: float, *, data: bool = True) -> dict[str, Any]:
    leaves = {
        "w": [ShardedTensor.from_rank_offsets("w", torch.arange(3.0) + 3 * n + value, (0, n, 2)) for n in range(2)],
        "optimizer": ShardedTensor.from_rank_offsets("optimizer.sum", torch.full((9000,), float(value))),
        "rng": ShardedObject("rng", {"seed": value}, (1,), (0,)),
    }
    if not data:
        for tensor in (*leaves["w"], leaves["optimizer"]):
            tensor.data = torch.full_like(tensor.data, -1)
        leaves["rng"].data = None
    return leaves


def test_all_parts_are_saved_and_loaded(owner: seaweed.Server, url: str) -> None:
    for value in (1.0, 2.0):  # What is saved again replaces what was there.
        CommonSave().save_common({"iteration": value, "t": torch.ones(3)}, url)
        CommonSave().save_sharded_objects({"rng": state(value)["rng"]}, url)
        request = ShardedSave().async_save(state(value), url)
        request.execute_sync()
    assert asyncckpt.list_steps(f"{url}/sharded") == [1]
    common = CommonLoad().load_common(url)
    assert (common["iteration"], common["t"].tolist()) == (2.0, [1, 1, 1])
    assert CommonLoad().load_sharded_objects({"rng": state(0, data=False)["rng"]}, url) == {"rng": {"seed": 2.0}}
    found = ShardedLoad().load(state(0, data=False), url)
    assert torch.equal(torch.cat(found["w"]), torch.arange(6.0) + 2)
    assert torch.equal(found["optimizer"], torch.full((9000,), 2.0))
    assert found["rng"] == {"seed": 2.0}
    assert ShardedLoad().load_tensors_metadata(url).keys() == {"w", "optimizer.sum"}


def test_tensors_are_removed(owner: seaweed.Server, url: str) -> None:
    ShardedSave().save(state(1), url)
    ShardedLoad().remove_sharded_tensors(url, "optimizer")
    assert ShardedLoad().load_sharded_metadata(url).keys() == {"w", *(key for key in [state(1)["rng"].unique_key])}
    assert asyncckpt.list_steps(f"{url}/sharded") == [1]
    keys = [found.key for found in ObjectStore(StoreUrl.of(f"{url}/sharded")).below("data")]
    assert {key.split("/")[1].partition("-")[0] for key in keys} == {"000000000001"}


def test_what_is_not_there_and_a_path_that_was_a_url_are_named(owner: seaweed.Server, url: str) -> None:
    with pytest.raises(NotFoundError, match="has no 'common' state"):
        CommonLoad().load_common(url)
    with pytest.raises(UsageError, match="as a str, not as a Path"):
        ShardedSave().save(state(1), Path(url))


def test_what_two_ranks_save_is_loaded_by_one(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    ranks = [
        start_rank("tests.cloud.strategies_rank", (rank, 2, tmp_path, f"{url}/iter1"), tmp_path) for rank in (0, 1)
    ]
    ended = await_ranks(ranks, WAIT_S)
    assert [rank.status for rank in ended] == [0, 0], [rank.output for rank in ended]
    target = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2 * COLUMNS))
    assert torch.equal(ShardedLoad().load({"w": target}, f"{url}/iter1")["w"], whole(2))
