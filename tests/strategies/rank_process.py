"""One rank of test_two_ranks: `python -m tests.strategies.rank_process <rank> <world size> <store> <folder>`."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncckpt.errors import PeerError, UsageError
from asyncckpt.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from asyncckpt.strategies.base import StrategyAction, get_default_strategy
from asyncckpt.strategies.mapping import ShardedObject, ShardedTensor
from asyncckpt.strategies.sharded_state import ShardedSave

WHOLE = torch.arange(24.0).reshape(4, 6)


def save_tensors(rank: int, ranks_count: int, folder: Path) -> None:
    """Columns of one tensor on every rank, a replica, layers of one pipeline stage each, and objects."""
    save = get_default_strategy(StrategyAction.SAVE_SHARDED, "asyncckpt", 1)
    columns = WHOLE.chunk(ranks_count, dim=1)[rank].clone()
    layer = torch.full((2, 2), float(rank))
    state = {
        "w": ShardedTensor.from_rank_offsets("w", columns, (1, rank, ranks_count)),
        "norm": ShardedTensor.from_rank_offsets("norm", torch.ones(3) + rank, replica_id=rank),
        "layer": ShardedTensor.from_rank_offsets("layers", layer, (0, rank, ranks_count), prepend_axis_num=1),
        "own": ShardedTensor.from_rank_offsets(f"only on {rank}", torch.full((2,), float(rank))),
        "rng": ShardedObject("rng", {"seed": rank, "state": torch.full((2,), rank)}, (ranks_count,), (rank,)),
    }
    request = save.async_save(state, folder)
    columns.zero_()
    layer.zero_()
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    while not queue.maybe_finalize_async_calls():
        dist.barrier()  # The ranks of a training step; a round that differed would leave one of them here.
    queue.close()


def save_common(rank: int, ranks_count: int, folder: Path) -> None:
    save = get_default_strategy(StrategyAction.SAVE_COMMON, "asyncckpt", 1)
    save.save_common({"iteration": 7, "rank": rank}, folder)
    objects = {"extra": ShardedObject("extra", io.BytesIO(bytes([rank])), (ranks_count,), (rank,))}
    save.save_sharded_objects(objects, folder)


def fail_alike(rank: int, folder: Path) -> None:
    """What one rank cannot save is saved by none, and a call that fails on one rank fails on all."""
    save = ShardedSave(peer_deadline=60.0)
    state: dict[str, Any] = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=rank)}
    if rank == 1:
        state["wrong"] = 0.1
    with pytest.raises((PeerError, UsageError)) as caught:
        save.save(state, folder)
    assert isinstance(caught.value, UsageError if rank == 1 else PeerError), caught.value
    assert "'wrong'" in str(caught.value), caught.value
    assert not list((folder / "sharded" / "manifests").iterdir())

    queue = AsyncCallsQueue(peer_deadline=60.0)
    queue.schedule_async_request(AsyncRequest(no_space if rank == 1 else None, (), []))
    queue.schedule_async_request(AsyncRequest(None, (), []))
    with pytest.raises((OSError, PeerError), match="no space"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    queue.close()
    AsyncRequest(None, (), []).execute_sync()


def no_space() -> None:
    raise OSError("no space")


def load_tensors(rank: int, ranks_count: int, folder: Path) -> None:
    """Rows, where columns were saved."""
    load = get_default_strategy(StrategyAction.LOAD_SHARDED, "asyncckpt", 1)
    rows = WHOLE.chunk(ranks_count)[rank]
    leaf = ShardedTensor.from_rank_offsets("w", torch.zeros_like(rows), (0, rank, ranks_count))
    other = ranks_count - 1 - rank
    got = load.load({"w": leaf, "rng": ShardedObject("rng", None, (ranks_count,), (other,))}, folder)
    assert torch.equal(got["w"], rows)
    assert got["rng"]["seed"] == other
    assert got["rng"]["state"].tolist() == [other] * 2
    common = get_default_strategy(StrategyAction.LOAD_COMMON, "asyncckpt", 1)
    assert common.load_common(folder) == {"iteration": 7, "rank": 0}
    dist.barrier()
    load.remove_sharded_tensors(folder, "only on ")


def main() -> None:
    rank, ranks_count, store, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks_count)
    save_common(rank, ranks_count, folder)
    save_tensors(rank, ranks_count, folder)
    dist.barrier()
    load_tensors(rank, ranks_count, folder)
    fail_alike(rank, folder.with_name("failed"))
    dist.barrier()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
