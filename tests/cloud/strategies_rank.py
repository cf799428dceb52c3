"""One rank of a job that saves its columns of a tensor by a strategy to a store.

python -m tests.cloud.strategies_rank <rank> <ranks> <folder, where they meet> <url>
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from asyncckpt.strategies import ShardedSave
from asyncckpt.strategies.mapping import ShardedTensor

COLUMNS = 3


def whole(ranks_count: int) -> torch.Tensor:
    return torch.arange(4.0 * ranks_count * COLUMNS).reshape(4, -1)


def main(rank: int, ranks_count: int, folder: Path, url: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks_count)
    own = whole(ranks_count)[:, rank * COLUMNS : (rank + 1) * COLUMNS].contiguous()
    ShardedSave().save({"w": ShardedTensor.from_rank_offsets("w", own, (1, rank, ranks_count))}, url)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
