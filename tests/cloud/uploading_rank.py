"""One rank of a job whose checkpoints are uploaded; it asks the store for each behind its upload.

python -m tests.cloud.uploading_rank <rank> <ranks> <folder> <url, or nothing>
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import asyncckpt

DEADLINE_S = 60.0


def main(rank: int, ranks_count: int, folder: Path, url: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks_count)
    ids = torch.arange(rank, 20, ranks_count)
    table = asyncckpt.HashTable("t", 2, shard=(rank, ranks_count))
    tensors = {f"own.{rank}": torch.zeros(1), "both": torch.zeros(4)}
    saver = asyncckpt.Saver(
        rank,
        ranks_count,
        path=folder / "checkpoints",
        hashtables={"t": table},
        tensors=tensors,
        upload=url or None,
        ranks=asyncckpt.RankOptions(process_group=dist.group.WORLD, peer_deadline=DEADLINE_S),
    )
    with saver:
        for step in range(3):
            table.insert(ids, (ids + 100.0 * step)[:, None].expand(-1, 2))
            tensors[f"own.{rank}"].fill_(step + 100 * rank)
            tensors["both"].fill_(step)
            saved = saver.save_async(step, kind="delta" if step else "full")
            if url:
                saved.wait_uploaded(DEADLINE_S)
                assert asyncckpt.list_steps(url)[-1] == step


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
