"""One rank of test_megatron: `python -m tests.strategies.megatron_process <rank> <world size> <store> <folder>`."""

from __future__ import annotations

import inspect
import io
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from asyncckpt.errors import UnsupportedError
from asyncckpt.strategies import MegatronStrategies, megatron_strategies, register_with_megatron

WHOLE = torch.arange(24.0).reshape(4, 6)


def state(rank: int, ranks_count: int, *, data: bool) -> dict[str, Any]:
    """Columns of one tensor, four replicas, and an object of every rank."""
    columns = WHOLE.chunk(ranks_count, dim=1)[rank]
    values = [torch.full((10,), float(number) if data else -1.0) for number in range(4)]
    return {
        "w": ShardedTensor.from_rank_offsets(
            "w", columns.clone() if data else torch.zeros_like(columns), (1, rank, ranks_count)
        ),
        "copies": [
            ShardedTensor.from_rank_offsets(f"copy{n}", value, replica_id=rank) for n, value in enumerate(values)
        ],
        "object": ShardedObject("extra", io.BytesIO(bytes([rank])) if data else None, (ranks_count,), (rank,)),
    }


def check(loaded: dict[str, Any], rank: int, ranks_count: int) -> None:
    assert torch.equal(loaded["w"], WHOLE.chunk(ranks_count, dim=1)[rank])
    assert [copy.unique().tolist() for copy in loaded["copies"]] == [[0.0], [1.0], [2.0], [3.0]]
    assert loaded["object"].read() == bytes([rank])


def save(rank: int, ranks_count: int, folder: Path, made: MegatronStrategies, *, is_async: bool) -> None:
    """By Megatron's own function, which spreads replicas over the ranks and checks that nothing is missing."""
    folder.mkdir(exist_ok=True)
    dist.barrier()
    takes_backend = "backend" in inspect.signature(FullyParallelSaveStrategyWrapper.__init__).parameters
    named = {"backend": "asyncckpt", "version": 1} if takes_backend else {}
    wrapped = FullyParallelSaveStrategyWrapper(made.save_sharded, **named)
    whole = {**state(rank, ranks_count, data=True), "iteration": 3}
    request = dist_checkpointing.save(whole, str(folder), sharded_strategy=wrapped, async_sharded_save=is_async)
    if is_async:
        request.execute_sync()


def doors() -> MegatronStrategies:
    """Where there is a registry, strategies must be in it for Megatron to take them for asynchronous ones."""
    try:
        return register_with_megatron(peer_deadline=60.0)
    except UnsupportedError:
        return megatron_strategies(peer_deadline=60.0)


def main() -> None:
    rank, ranks_count, store, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks_count)
    made = doors()
    for is_async in (False, True):
        path = folder.with_name(f"{folder.name}-{is_async}")
        save(rank, ranks_count, path, made, is_async=is_async)
        check(made.load_sharded.load(state(rank, ranks_count, data=False), path), rank, ranks_count)
        assert (path / "metadata.json").exists()
    dist.barrier()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
