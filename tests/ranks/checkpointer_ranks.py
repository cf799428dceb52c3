"""Ranks of synchronous training with a Checkpointer, functions of (rank, folder). Run by test_checkpointer_ranks.py.

The sum over all ranks in every step makes none of them end a step that another one has not begun.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt import checkpointer
from asyncckpt.errors import IncompatibleError, PeerError, UsageError
from tests.ranks.job_ranks import group_of

DEADLINE = asyncckpt.RankOptions(peer_deadline=20.0)


class Training:
    """A tensor of the number of steps, on every rank."""

    def __init__(self, rank: int, folder: Path, ranks_count: int = 2) -> None:
        self.rank = rank
        group_of(rank, ranks_count, folder)
        self.x = torch.zeros(3)
        self.done = (folder / f"done-{rank}").open("a", buffering=1)

    def open(self, path: Path, **options: Any) -> asyncckpt.Checkpointer:
        return asyncckpt.Checkpointer(path, options={"ranks": DEADLINE}, x=self.x, **{"every": 1000, **options})

    def train(self, step: int) -> None:
        one = torch.ones(3) / 2
        dist.all_reduce(one)
        self.x += one
        print(step, file=self.done)


def asked_to_stop(rank: int, folder: Path) -> None:
    """Rank 1 is terminated in the middle of step 5: both save step 6, and leave."""
    training = Training(rank, folder)
    with training.open(folder / "ckpt", every=4) as ckpt:
        for step in range(ckpt.restore(), 100):
            if (rank, step) == (1, 5):
                os.kill(os.getpid(), signal.SIGTERM)
            training.train(step)
            ckpt.step(step)


def all_asked_to_stop(rank: int, folder: Path) -> None:
    """As by torchrun, which sends SIGTERM to all; here just before the last step."""
    training = Training(rank, folder)
    with training.open(folder / "ckpt") as ckpt:
        for step in range(ckpt.restore(), 6):
            if step == 5 - rank:
                os.kill(os.getpid(), signal.SIGTERM)
            training.train(step)
            ckpt.step(step)


def out_of_time(rank: int, folder: Path) -> None:
    """The clock of rank 0 alone is past max_hours in step 3."""
    now = [0.0]
    checkpointer.monotonic = lambda: now[0]  # type: ignore[attr-defined]
    training = Training(rank, folder)
    with training.open(folder / "ckpt", max_hours=1) as ckpt:
        for step in range(ckpt.restore(), 100):
            training.train(step)
            if (rank, step) == (0, 3):
                now[0] = 3600.0
            ckpt.step(step)


def to_the_end(rank: int, folder: Path) -> None:
    """Without a `with` block, and by sys.exit on all."""
    training = Training(rank, folder)
    ckpt = training.open(folder / "ckpt", every=2)
    for step in range(ckpt.restore(), 8):
        training.train(step)
        ckpt.step(step)
    raise SystemExit(3)


def an_exception(rank: int, folder: Path) -> None:
    """On rank 1, in step 5: nobody waits for the others, and nothing is saved that not all have."""
    training = Training(rank, folder)
    with suppress(RuntimeError), training.open(folder / "ckpt", every=4) as ckpt:
        for step in range(ckpt.restore(), 100):
            if (rank, step) == (1, 5):
                raise RuntimeError("of this rank alone")
            training.train(step)
            ckpt.step(step)
            ckpt._periodic.drain()
    os._exit(0)  # Without the end of gloo, which has lost a peer.


def a_rank_cannot_restore(rank: int, folder: Path) -> None:
    """Then none goes on, and nothing is discarded; afterwards both can."""
    training = Training(rank, folder)
    with training.open(folder / "ckpt") as ckpt:
        assert ckpt.restore() == 0
        for step in range(4):
            training.train(step)
            ckpt.save_now(step)
    more = {"only here": torch.ones(2)} if rank else {}
    with training.open(folder / "ckpt", **more) as ckpt:
        with pytest.raises(UsageError if rank == 0 else PeerError, match="step 1 is not the newest"):
            ckpt.restore(1)
        with pytest.raises(IncompatibleError if rank else PeerError, match="only here"):
            ckpt.restore(1, discard_newer=True)
        assert asyncckpt.list_steps(folder / "ckpt") == [0, 1, 2, 3]
    with training.open(folder / "ckpt") as ckpt:
        assert ckpt.restore(1, discard_newer=True) == 2
        assert asyncckpt.list_steps(folder / "ckpt") == [0, 1]
        assert training.x.tolist() == [2.0] * 3
        ckpt.step(2)
