"""One of four gloo ranks, of which the first n take part in each hop. Started by test_matrix.py.

Arguments: rank, path of the store file, path to save to.
"""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import asyncckpt
from tests.reshard.world import RankObjects
from tests.trainer_state.run import ResumedRun

PROCESSES = 4
HOPS = (1, 2, 4, 3, 1)
GRIDS = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2)}
DEADLINE_S = 60.0


def saver_of(world: RankObjects, path: Path, group: Any) -> asyncckpt.Saver:
    options: dict[str, Any] = {"path": path, "hashtables": world.tables(), "tensors": world.state()}
    if world.ranks_count == 1:
        return asyncckpt.Saver(**options)
    return asyncckpt.Saver(ranks=asyncckpt.RankOptions(process_group=group, peer_deadline=DEADLINE_S), **options)


def load(world: RankObjects, path: Path, **options: Any) -> Any:
    return asyncckpt.Loader(
        path, world.tables(), world.state(), shard_index=world.rank, shard_num=world.ranks_count, **options
    ).load()


def _grid(count: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(count).reshape(GRIDS[count]), mesh_dim_names=("data", "tensor"))


def hops(rank: int, path: Path) -> None:
    counts = sorted(set(HOPS))
    groups = {count: dist.new_group(list(range(count))) for count in counts}
    lines = {count: DeviceMesh("cpu", list(range(count))) for count in counts}
    grids = {count: _grid(count) for count in counts}
    for hop, count in enumerate(HOPS):
        if rank < count:
            one_hop(RankObjects(rank, count, lines[count], grids[count]), hop, path, groups[count])
            reload(RankObjects(rank, count, lines[count], grids[count]), path / str(hop))
        dist.barrier()


def one_hop(world: RankObjects, hop: int, path: Path, group: Any) -> None:
    """Load what other ranks have saved, check it, save it: a full checkpoint that is off, and a delta upon it."""
    if hop == 0:
        world.fill()
    else:
        report = load(world, path / str(hop - 1), verify=hop != 2)
        world.check()
        # Plain values are those of rank 0: there is no rank of the same number of as many.
        found = {name: report.values[name] for name in ("epoch", "big", "mine", "saved_by")}
        assert found == {"epoch": 3, "big": 2**70, "mine": 0, "saved_by": HOPS[hop - 1]}
        # Random numbers too; of these the other ranks make their own.
        assert torch.equal(torch.rand(3), first_draws(0)) is (world.rank == 0)
    with saver_of(world, path / str(hop), group) as saver:
        world.perturb()
        saver.save_async(10).result(DEADLINE_S)
        world.restore()
        torch.manual_seed(50 + world.rank)
        result = saver.save_async(11, kind="delta").result(DEADLINE_S)
        assert (result.step, result.kind) == (11, "delta")
    world.check()


def first_draws(rank: int) -> torch.Tensor:
    """What a rank draws first behind the save of `one_hop`."""
    return torch.rand(3, generator=torch.Generator().manual_seed(50 + rank))


def reload(world: RankObjects, path: Path) -> None:
    """As many ranks as have saved: each gets its own values and random numbers."""
    load(world, path, step=10)
    with pytest.raises(AssertionError):
        world.check()  # It can fail.
    report = load(world, path)
    world.check()
    assert (report.step, report.values["mine"], report.values["saved_by"]) == (11, world.rank, world.ranks_count)
    assert torch.equal(torch.rand(3), first_draws(world.rank))


def resume(group: Any, path: Path) -> None:
    """Two ranks train with dropout and augmentation, each with random numbers and data of its own, and resume."""

    def seed(number: int) -> None:
        random.seed(number), np.random.seed(number), torch.manual_seed(number)

    rank, save_at, until = dist.get_rank(group), 9, 17  # In the second epoch of 7 batches; then into the third.
    seed(0)
    run = ResumedRun(group)
    seed(100 + rank)
    with asyncckpt.Saver(
        path=path, hashtables=run.tables, tensors=run.state, ranks=asyncckpt.RankOptions(process_group=group)
    ) as saver:
        expected = run.train(until=until, saver=saver, save_at=save_at)
    seed(7)
    fresh = ResumedRun(group)
    load_options = {"shard_index": rank, "shard_num": dist.get_world_size(group)}
    asyncckpt.Loader(path, fresh.tables, fresh.state, **load_options).load()
    assert fresh.train(until=until) == expected[save_at:]


def main() -> None:
    rank, store, path = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    wait = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES, timeout=wait)
    try:
        pair = dist.new_group([0, 1])
        if rank < 2:
            resume(pair, path / "resumed")
        hops(rank, path)
    finally:
        dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
