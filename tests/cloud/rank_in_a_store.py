"""One rank of a job whose directory is in a store. It says each step that has committed.

python -m tests.cloud.rank_in_a_store <rank> <ranks> <folder, where they meet> <url>
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import asyncckpt

DEADLINE_S = 10.0
STEPS_COUNT = 3
ROWS_COUNT = 40


def main(rank: int, ranks_count: int, folder: Path, url: str, *, another_saves: bool = False) -> None:
    """another_saves: another process saves the first step, behind the constructors of all ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks_count)
    ids = torch.arange(rank, ROWS_COUNT, ranks_count)
    table = asyncckpt.HashTable("t", 2, shard=(rank, ranks_count))
    tensors = {f"own.{rank}": torch.zeros(1), "both": torch.zeros(4)}
    ranks = asyncckpt.RankOptions(process_group=dist.group.WORLD, peer_deadline=DEADLINE_S)
    saver = asyncckpt.Saver(path=url, hashtables={"t": table}, tensors=tensors, ranks=ranks)
    first = max(asyncckpt.list_steps(url), default=-1) + 1
    with suppress(RuntimeError):  # A rank whose Saver is refused does not come.
        dist.barrier()
    if another_saves:
        if rank == 0:
            asyncckpt.save(url, {"x": torch.zeros(1)}, step=first)
        dist.barrier()
        with pytest.raises(asyncckpt.CheckpointError, match=f"step {first} already exists"):
            saver.save()
        first = saver.save().step + 1
    with saver:
        for step in range(first, first + STEPS_COUNT):
            table.insert(ids, (ids + 100.0 * step)[:, None].expand(-1, 2))
            tensors[f"own.{rank}"].fill_(step + 100 * rank)
            tensors["both"].fill_(step)
            saver.save_async(step, kind="delta" if step > first else "full").result(60)
            print("step", step, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], another_saves=len(sys.argv) > 5)
