"""Runs that go back and are killed, one process or rank each, for test_going_back.py.

Every checkpoint holds its whole history: in which run each step was trained. So two of them belong to one history when
the older one's is the beginning of the newer one's.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.storage.directory import Directory

STEPS_MAX = 61
# What changes names in the directory; a run may be killed before each.
OPERATIONS = ("create_file", "move", "publish", "remove_file", "remove_folder")
LOST_RANK_S = 4.0


@dataclass(frozen=True)
class Plan:
    """One run: from which step it goes back, up to which it trains, and where it is killed.

    kill_at_step: behind the note of that step; kill_at_operation: before that change of names in the directory, of
    those that the restore makes.
    """

    number: int
    until: int
    back_to: int | None = None
    deltas: bool = False
    kill_at_step: int | None = None
    kill_at_operation: int | None = None
    every: int = 4


class Histories:
    """A model whose values tell by which run, and in which step, they were trained."""

    def __init__(self, rank: int, ranks_count: int) -> None:
        self.rank, self.ranks_count = rank, ranks_count
        self.history = torch.full((STEPS_MAX,), -1)
        self.table = asyncckpt.HashTable("t", 2, shard=(rank, ranks_count))

    def train(self, step: int, run: int) -> None:
        self.history[step] = run
        mine = torch.tensor(
            [id for id in range(step % 5, step + 1) if id % self.ranks_count == self.rank] or [self.rank]
        )
        self.table.insert(mine, torch.tensor([[float(run), float(step)]]).expand(len(mine), 2))


def run(rank: int, folder: Path, plan: Plan, ranks_count: int, *, over_group: bool = False) -> None:
    """Restore, train and save as planned, beside the folder of this run."""
    if over_group:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks_count)
    torch.set_num_threads(1)
    place = {} if over_group else {"shard_index": rank, "shard_num": ranks_count}
    options: dict[str, Any] = {**place, "durability": "none", "ranks": asyncckpt.RankOptions(peer_deadline=20.0)}
    state = Histories(rank, ranks_count)
    policy = asyncckpt.DeltaPolicy(deltas_max=1000, bytes_share_max=1e9) if plan.deltas else None
    with asyncckpt.Checkpointer(
        folder.parent / "ckpt", every=plan.every, deltas=policy, options=options, history=state.history, t=state.table
    ) as ckpt:
        with nullcontext() if plan.kill_at_operation is None else killed_at(plan.kill_at_operation, rank):
            back = {} if plan.back_to is None else {"step": plan.back_to, "discard_newer": True}
            first = ckpt.restore(**back)
        for step in range(first, plan.until):
            state.train(step, plan.number)
            ckpt.step(step)
            ckpt._periodic.drain()  # Each is committed, so that much is there to be discarded.
            if step == plan.kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)


class killed_at:
    """Rank 0 is killed before an operation of its process, and the others some time later."""

    def __init__(self, count: int, rank: int) -> None:
        self._left, self._rank = count, rank
        self._plain = {name: getattr(Directory, name) for name in OPERATIONS}

    def __enter__(self) -> None:
        if self._rank:
            threading.Timer(LOST_RANK_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return
        for name, plain in self._plain.items():
            setattr(Directory, name, self._counting(plain))

    def __exit__(self, *_: object) -> None:
        for name, plain in self._plain.items():
            setattr(Directory, name, plain)

    def _counting(self, plain: Any) -> Any:
        def operation(folder: Directory, *arguments: Any, **options: Any) -> Any:
            if folder.path.name in ("data", "manifests"):
                if self._left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                self._left -= 1
            return plain(folder, *arguments, **options)

        return operation
