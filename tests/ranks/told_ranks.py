"""Ranks of which one dies, hangs, raises or disagrees: what each other one is told. Functions of (name, rank, folder)
for forked.run; test_told_by_ranks.py walks over RANK_FAULTS.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.coordination import file_channel, store_channel
from asyncckpt.coordination.messages import Limits
from asyncckpt.engine.ranks import steps_together
from tests.ranks.job_ranks import WAIT_S_MAX, group_of
from tests.ranks.kill_points import strike_at
from tests.worlds.told import check_told

RANKS = 3
VICTIM = 1
SOON = Limits(begin_s=6.0, silence_s=6.0)
OPENING_S = 40.0
SECONDS = r"(for|within|after) [\d.]+ s"


@dataclass
class ToldRank:
    """One rank of three. is_victim: it is the one to which something happens."""

    rank: int
    folder: Path
    over: str = "store"
    ranks_count: int = RANKS
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        store_channel.CLOSE_S_MAX = file_channel.CLOSE_S_MAX = 0.3
        if self.over == "store":
            group_of(self.rank, RANKS, self.folder)
        self.state = {"weight": torch.full((100,), 1.0)}

    @property
    def is_victim(self) -> bool:
        return self.rank == VICTIM

    @property
    def path(self) -> Path:
        return self.folder / "ckpt"

    def open(self, path: Path | None = None, *, deadline: float = OPENING_S, **options: Any) -> asyncckpt.Saver:
        ranks = asyncckpt.RankOptions(peer_deadline=deadline)
        place = path or self.path
        return asyncckpt.Saver(self.rank, self.ranks_count, path=place, tensors=self.state, ranks=ranks, **options)

    def open_and_save_once(self, **options: Any) -> asyncckpt.Saver:
        saver = self.open(on_busy="wait", **options)
        saver.save_async(1).result(WAIT_S_MAX)
        assert saver._ranks is not None
        saver._ranks.limits = SOON
        return saver

    def restored(self) -> asyncckpt.Checkpointer:
        return asyncckpt.Checkpointer(
            self.path,
            every=1000,
            **self.state,
            options={"ranks": asyncckpt.RankOptions(peer_deadline=OPENING_S)},
        )

    def check(self, error: BaseException | None, *says: str | re.Pattern[str], is_own: bool = False) -> None:
        """Check what this rank is told. is_own: of what it did itself, which need not name the directory."""
        assert isinstance(error, asyncckpt.CheckpointError), repr(error)
        where = () if is_own else (str(self.folder),)
        check_told(error, "rank", *where, *says, shown={str(self.folder): "DIR"})

    def check_save(
        self, saver: asyncckpt.Saver, step: int, *says: str | re.Pattern[str], is_own: bool = False, **options: Any
    ) -> None:
        self.check(saver.save_async(step, **options).exception(WAIT_S_MAX), *says, is_own=is_own)


def error_of(call: Callable[[], object]) -> asyncckpt.CheckpointError | None:
    try:
        call()
    except asyncckpt.CheckpointError as error:
        return error
    return None


def leave(rank: int, folder: Path) -> None:
    """End without a word, because others may be gone; rank 0 when rank 2 has been told, as it serves the channel."""
    (folder / f"told-{rank}").touch()
    until = time.monotonic() + WAIT_S_MAX / 2
    while rank == 0 and not (folder / f"told-{RANKS - 1}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os._exit(0)


def named(rank: int) -> re.Pattern[str]:
    return re.compile(rf"rank {rank}\b|ranks \[{rank}\]")


def is_struck(point: str, strike: int, over: str, rank: int, folder: Path) -> None:
    """The victim is killed or stopped in its second save."""
    told = ToldRank(rank, folder, over)
    saver = told.open_and_save_once()
    if told.is_victim:
        strike_at(point, strike, step=2)
    told.check_save(saver, 2, named(VICTIM), re.compile(SECONDS))
    leave(rank, folder)


def coordinator_is_struck(point: str, strike: int, over: str, rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder, over)
    saver = told.open_and_save_once()
    if rank == 0:
        strike_at(point, strike, step=2)
    told.check_save(saver, 2, named(0))
    leave(rank, folder)


def does_not_save(rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder)
    saver = told.open_and_save_once()
    if told.is_victim:
        time.sleep(SOON.begin_s + 4)
        leave(rank, folder)
    told.check_save(saver, 2, named(VICTIM), re.compile(SECONDS))
    leave(rank, folder)


def raises_in_a_filter(rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder)

    def raising(blocks: list[Any]) -> list[Any]:
        if told.is_victim and is_on:
            raise RuntimeError("the filter fails\nin its second line")
        return blocks

    is_on: list[int] = []
    saver = told.open_and_save_once(filter_func=raising)
    is_on.append(1)
    others = () if told.is_victim else (named(VICTIM),)
    told.check_save(saver, 2, "the filter fails", *others, is_own=told.is_victim)
    leave(rank, folder)


def has_another_step(rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder)
    saver = told.open_and_save_once()
    told.check_save(saver, 7 if told.is_victim else 2, named(VICTIM), "'2'", "'7'", "step")
    leave(rank, folder)


def has_another_shape(rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder)
    saver = told.open_and_save_once()
    if told.is_victim:
        told.state["weight"] = torch.zeros(7)
    told.check_save(saver, 2, re.compile(r"ranks .*\b1\b"), "'weight'", "[7]", "[100]")
    leave(rank, folder)


def has_metadata_that_cannot_be_saved(rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder)
    saver = told.open_and_save_once()
    if told.is_victim:
        told.check(error_of(lambda: saver.save_async(2, metadata={"odd": object()})), "odd", is_own=True)
        time.sleep(2.0)
    else:
        told.check_save(saver, 2, named(VICTIM), "odd")
    leave(rank, folder)


def does_not_come(over: str, rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder, over)
    if not told.is_victim:
        error = error_of(lambda: told.open(deadline=2.0).save_async(1).result(WAIT_S_MAX))
        told.check(error, named(VICTIM) if rank == 0 else re.compile(r"rank [01]\b"), re.compile(SECONDS))
    else:
        time.sleep(12.0)
    leave(rank, folder)


def coordinator_does_not_come(over: str, rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder, over)
    if rank:
        told.check(error_of(lambda: told.open(deadline=2.0)), named(0), re.compile(SECONDS))
    else:
        time.sleep(12.0)
    leave(rank, folder)


def counts_other_ranks(rank: int, folder: Path) -> None:
    """Over files: the victim has been told of two ranks."""
    told = ToldRank(rank, folder, "file", ranks_count=2 if rank == VICTIM else RANKS)
    error = error_of(lambda: told.open(deadline=4.0))
    told.check(error, named(0 if rank else VICTIM), re.compile(SECONDS), *(() if rank else ("[2]",)))
    leave(rank, folder)


def opens_another_directory(rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder)
    error = error_of(lambda: told.open(folder / "other" if told.is_victim else None).close())
    if told.is_victim:
        told.check(error, str(folder / "other"), named(0))
    leave(rank, folder)


def cannot_open(rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder)
    (folder / "ckpt").touch()
    dist.barrier()
    told.check(error_of(told.open), "not a folder", *((named(0),) if rank else ()))
    dist.barrier()
    leave(rank, folder)


def is_gone_in_a_restore(strike: int, rank: int, folder: Path) -> None:
    steps_together.RESTORE_DEADLINE_S = 6.0
    told = ToldRank(rank, folder)
    told.open_and_save_once().close()
    ckpt = told.restored()
    dist.barrier()
    if told.is_victim:
        os.kill(os.getpid(), strike)
    told.check(error_of(ckpt.restore), named(VICTIM) if rank == 0 else re.compile(r"rank [01]\b"), re.compile(SECONDS))
    leave(rank, folder)


def coordinator_is_gone_in_a_restore(strike: int, rank: int, folder: Path) -> None:
    steps_together.RESTORE_DEADLINE_S = 6.0
    told = ToldRank(rank, folder)
    told.open_and_save_once().close()
    ckpt = told.restored()
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), strike)
    told.check(error_of(ckpt.restore), named(0))
    leave(rank, folder)


def cannot_restore(rank: int, folder: Path) -> None:
    told = ToldRank(rank, folder)
    told.open_and_save_once().close()
    if told.is_victim:
        told.state["weight"] = torch.zeros(7)
    others = () if told.is_victim else (named(VICTIM),)
    told.check(error_of(told.restored().restore), "'weight'", *others, is_own=told.is_victim)
    leave(rank, folder)


def is_missing_in_turn(rank: int, folder: Path) -> None:
    """Ranks of one process, one after the other."""
    if rank:
        leave(rank, folder)
    told = ToldRank(0, folder, "file")
    turns = asyncckpt.RankOptions(in_turn=True)
    savers = [
        asyncckpt.Saver(number, 2, path=told.path, tensors={"x": torch.ones(3)}, ranks=turns) for number in range(2)
    ]
    savers[0].save(1)
    told.check(error_of(lambda: savers[0].save(2)), re.compile(r"ranks?.*\b1\b"), "step 1")
    leave(rank, folder)
