"""One of several gloo ranks: trains, saves and loads, and checks what it sees. Started by test_two_ranks.py.

Arguments: rank, number of ranks, path of the store file, path to save to.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.embcache import EmbCacheShardedEmbeddingBagCollection, Saver
from tests.embcache.models import Net, config, image

DEADLINE_S = 120.0


def raised(kind: type[Exception], text: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call(*args, **options)


def rounds(rank: int, world: int, path: Path) -> None:
    collection = EmbCacheShardedEmbeddingBagCollection([config()])
    assert collection.tables()["user"].shard == (rank, world)

    saver = Saver(peers_deadline=DEADLINE_S)
    assert (saver.rank, saver.world_size) == (rank, world)
    raised(asyncckpt.UsageError, "not that of torch.distributed", Saver, rank=rank + 1)
    raised(asyncckpt.UsageError, "not that of torch.distributed", Saver, world_size=1)

    # A blocking save; then one while training goes on.
    net = Net(shard=(rank, world)).trained(range(3))
    assert saver.save(net, path).step == 0
    first = image(net)
    net.trained(range(3, 6))
    cut = image(net)
    future = saver.save_async(net, path)
    net.trained(range(6, 12))
    assert future.result(60).step == 1
    dist.barrier()
    fresh = Net(shard=(rank, world))
    report = saver.load(fresh, path)
    assert image(fresh) == cut
    assert (report.step, report.world_size) == (1, world)
    assert image(fresh.trained(range(6, 12))) == image(net)
    saver.load(fresh, path, step=0)
    assert image(fresh) == first

    # All ranks know the same save id, and it is another one for every save.
    ids = [metadata(path, rank, world, step)["save_id"] for step in (0, 1) for rank in range(world)]
    assert [len(set(ids[:world])), len(set(ids[world:])), len(set(ids))] == [1, 1, 2]

    # What goes wrong on one rank is told to all, and nothing is saved or changed.
    bad = path / "password" if rank == 1 else path
    kind, text = (
        (asyncckpt.UsageError, "sensitive word") if rank == 1 else (asyncckpt.ConflictError, "rank 1 could not")
    )
    raised(kind, text, saver.save, net, bad)
    raised(kind, text, saver.save_async, net, bad)
    raised(kind, text, saver.load, net, bad)
    if rank == 1:
        raised(asyncckpt.IncompatibleError, "dtype", saver.load, Net(shard=(rank, world), dtype=torch.float64), path)
    else:
        before = image(net)
        raised(asyncckpt.ConflictError, "rank 1 could not load", saver.load, net, path)
        assert image(net) == before
    raised(asyncckpt.UsageError, "different steps", saver.save, net, path, step=10 + rank)
    raised(asyncckpt.UsageError, "save_id is not the caller's", saver.save, net, path, save_id="x")

    # The next step is one more than the newest of any rank; a given one is the same on all.
    if rank == 1:
        with asyncckpt.Saver(path=path / f"rank00001-of-{world:05d}", tensors={"w": torch.ones(1)}) as foreign:
            foreign.save(7)
    assert saver.save(net, path).step == 8
    assert saver.save(net, path, step=20).step == 20
    saver.load(fresh, path)
    assert image(fresh) == image(net)

    # Closing one Saver and using another makes a new group.
    saver.close()
    dist.barrier()
    with Saver(peers_deadline=DEADLINE_S) as again:
        assert again.save(net, path).step == 21

    # A rank that does not come is waited for no longer than the deadline.
    with Saver(peers_deadline=2.0) as impatient:
        assert impatient.save(net, path).step == 22
        if rank == 0:
            raised(asyncckpt.IOFailedError, "ranks could not agree to begin to save", impatient.save, net, path)
    dist.barrier()


def metadata(path: Path, rank: int, world: int, step: int) -> Any:
    return asyncckpt.describe(path / f"rank{rank:05d}-of-{world:05d}", step).metadata["embcache"]


def main() -> None:
    rank, world, store, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        rounds(rank, world, path)
    finally:
        dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
