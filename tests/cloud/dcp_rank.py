"""One rank of a job that saves by DCP to a store. It says each step that has committed.

python -m tests.cloud.dcp_rank <rank> <ranks> <folder, where they meet> <url>
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from asyncckpt.dcp import StorageWriter

STEPS_COUNT = 3
DEADLINE = timedelta(seconds=20)


def main(rank: int, ranks_count: int, folder: Path, url: str) -> None:
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks_count, timeout=DEADLINE)
    writer = StorageWriter(url)
    for step in range(STEPS_COUNT):
        own = {f"own{rank}": torch.full((5000,), float(step)), "both": torch.full((4,), float(step))}
        dcp.save(own, storage_writer=writer)
        print("step", step, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
