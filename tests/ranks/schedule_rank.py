"""One rank of a schedule: it trains, saves two steps and forgets them, and one rank is struck in the second save."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.coordination import file_channel, store_channel
from asyncckpt.coordination.messages import Limits
from asyncckpt.pipeline.filters import identity
from tests.ranks.kill_points import strike_at
from tests.ranks.training import RankTraining
from tests.worlds.gates import unchanged

OPENING_S_MAX = 40.0  # On a busy machine ranks may take long to start.
LIMITS = Limits(begin_s=8.0, silence_s=8.0)
OUTCOME_S_MAX = 40.0  # Nothing hangs: the limits of a save add up to far less.


@dataclass(frozen=True)
class Strikes:
    """Which rank is struck where, by SIGKILL or SIGSTOP; over: the channel, "store" or "file"."""

    ranks_count: int
    victim: int
    point: str
    strike: str = "kill"
    over: str = "store"

    @property
    def name(self) -> str:
        return f"{self.strike} rank {self.victim} of {self.ranks_count} at {self.point!r} over {self.over}"


def run_rank(schedule: Strikes, rank: int, folder: Path) -> None:
    """Writes how its second save ended to `outcome-<rank>`."""
    torch.set_num_threads(1)
    store_channel.CLOSE_S_MAX = file_channel.CLOSE_S_MAX = 0.3  # A rank that was killed is waited for in vain.
    training = join(schedule, rank, folder)
    saver = asyncckpt.Saver(
        rank,
        schedule.ranks_count,
        path=folder / "checkpoints",
        hashtables={"user": training.table},
        tensors=training.tensors,
        on_busy="wait",
        filter_func=unchanged if schedule.point == "filter" else identity,
        ranks=asyncckpt.RankOptions(peer_deadline=OPENING_S_MAX),
    )
    assert saver._ranks is not None
    saver._ranks.limits = LIMITS
    training.train()
    saver.save_async(1)
    training.train()
    if rank == schedule.victim:
        strike_at(schedule.point, signal.SIGKILL if schedule.strike == "kill" else signal.SIGSTOP, step=2)
    begun = time.monotonic()
    future = saver.save_async(2)
    training.scramble()
    told = describe(future.exception(OUTCOME_S_MAX))
    told["seconds"] = time.monotonic() - begun
    (folder / f"outcome-{rank}").write_text(json.dumps(told))
    saver.close()


def join(schedule: Strikes, rank: int, folder: Path) -> RankTraining:
    if schedule.over == "file":
        return RankTraining(rank, schedule.ranks_count)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=schedule.ranks_count)
    return RankTraining(rank, schedule.ranks_count, dist.group.WORLD)


def describe(error: BaseException | None) -> dict[str, Any]:
    """How a save ended, as one of committed, doubt, peer, or the name of another error."""
    if error is None:
        return {"outcome": "committed"}
    told: dict[str, Any] = {"rank": getattr(error, "rank", None), "text": str(error)}
    if isinstance(error, asyncckpt.errors.PeerInDoubtError):
        return {"outcome": "doubt", "resolved": error.resolve(), **told}
    return {"outcome": "peer" if isinstance(error, asyncckpt.PeerError) else type(error).__name__, **told}
