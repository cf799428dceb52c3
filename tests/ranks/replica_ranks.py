"""Ranks that agree on who writes what they share, at different times; run by test_jobs.py."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import asyncckpt
from tests.ranks.job_ranks import PEER_DEADLINE_S, WAIT_S_MAX, group_of


def one_rank_is_ahead(rank: int, folder: Path) -> None:
    """Rank 1 makes its second call while the first save, in which they ask who writes what, is in flight; rank 0 makes
    it after that. Whether the second save is queued or skipped, it and the third one are as good as any."""
    group_of(rank, 2, folder)
    for on_busy in ("queue", "skip"):
        state = {on_busy: torch.full((5000,), 3.0), f"of {rank}": torch.full((6000,), 4.0)}
        with asyncckpt.Saver(
            rank,
            2,
            path=folder / on_busy,
            tensors=state,
            on_busy=on_busy,
            ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S),
        ) as saver:
            if rank == 1:
                futures = [saver.save_async(step) for step in (1, 2)]
            dist.barrier()
            if rank == 0:
                futures = []
                for step in (1, 2):
                    futures.append(saver.save_async(step))
                    futures[-1].result(WAIT_S_MAX)
            assert not futures[0].result(WAIT_S_MAX).skipped
            assert futures[1].result(WAIT_S_MAX).skipped == (on_busy == "skip")
            saver.wait_idle()
            assert saver.save(3).step == 3
        found = {on_busy: torch.zeros(5000), "of 0": torch.zeros(6000), "of 1": torch.zeros(6000)}
        for step in (1, 3) if on_busy == "skip" else (1, 2, 3):
            asyncckpt.Loader(folder / on_busy, tensors=found, step=step).load()
            assert [float(found[name].mean()) for name in sorted(found)] == [4.0, 4.0, 3.0]
