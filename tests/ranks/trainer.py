"""A training script for torchrun: it trains, saves and forgets, and ends without closing anything.

Arguments: the checkpoint directory, how many steps, and where rank 1 kills itself in the last save ("": nowhere).
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import asyncckpt
from tests.ranks.kill_points import strike_at
from tests.ranks.training import RankTraining

PEER_DEADLINE_S = 20.0


def main() -> None:
    path, steps, point = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks_count = dist.get_rank(), dist.get_world_size()
    training = RankTraining(rank, ranks_count, dist.group.WORLD)
    saver = asyncckpt.Saver(
        rank,
        ranks_count,
        path=path,
        hashtables={"user": training.table},
        tensors=training.tensors,
        on_busy="wait",
        ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S),
    )
    for step in range(1, steps + 1):
        training.train()
        if step == steps and rank == 1 and point:
            saver.wait_idle()
            strike_at(point, signal.SIGKILL, step=step)
        saver.save_async(step)
    training.scramble()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
