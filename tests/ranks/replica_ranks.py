"""Ranks that agree on who writes what they share, at different times or of different sizes; run by test_jobs.py."""

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


def tables_that_grow_apart(rank: int, folder: Path) -> None:
    """Tables of the same form with other numbers of rows: each of them, and the tensor, is written by one rank."""
    group_of(rank, 2, folder)
    counts = {"a": (2000, 10), "b": (1990, 1000), "c": (10, 2000)}
    tables = {name: asyncckpt.HashTable(name, 2) for name in counts}
    for name, table in tables.items():
        table.insert(torch.arange(counts[name][rank]), torch.ones(counts[name][rank], 2))
    state = {"w": torch.full((3000,), 3.0)}
    ranks = asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)
    with asyncckpt.Saver(rank, 2, path=folder / "tables", hashtables=tables, tensors=state, ranks=ranks) as saver:
        for step in (1, 2):
            saver.save_async(step).result(WAIT_S_MAX)
    for step in (1, 2):
        blocks = asyncckpt.describe(folder / "tables", step).blocks
        assert sorted(block.name for block in blocks) == sorted({block.name for block in blocks}), "each is there once"
        found, w = {name: asyncckpt.HashTable(name, 2) for name in counts}, torch.zeros(3000)
        report = asyncckpt.Loader(folder / "tables", found, {"w": w}, step=step).load()
        assert all(report.rows[name] in counts[name] for name in counts)
        assert bool((w == 3).all())
