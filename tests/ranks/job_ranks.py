"""Ranks of small jobs, each a function of (rank, folder) that checks what this rank sees. Run by test_jobs.py."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.errors import CheckpointError, ConflictError, FilterError, PeerError, UsageError
from tests.ranks.training import Training

PEER_DEADLINE_S = 20.0
WAIT_S_MAX = 60.0


def group_of(rank: int, ranks_count: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks_count)
    return dist.group.WORLD


def saver_of(training: Training, path: Path, **options: Any) -> asyncckpt.Saver:
    return asyncckpt.Saver(
        training.rank,
        training.ranks_count,
        path=path,
        hashtables={"user": training.table},
        tensors=training.tensors,
        peer_deadline=options.pop("peer_deadline", PEER_DEADLINE_S),
        **options,
    )


def raised(future: asyncckpt.SaveFuture) -> BaseException:
    error = future.exception(WAIT_S_MAX)
    assert error is not None, future
    return error


def files_only(rank: int, folder: Path) -> None:
    """Three ranks without a process group: full saves, a delta, steps by themselves, a blocking save."""
    training = Training(rank, 3)
    with saver_of(training, folder / "checkpoints", on_busy="wait") as saver:
        for _ in range(2):
            training.train()
            saver.save_async(training.step)
        training.train()
        assert saver.save_async(kind="delta").result(WAIT_S_MAX).step == 3
        training.train()
        assert saver.save().step == 4


def begin_and_die(rank: int, folder: Path) -> None:
    """A job without a process group whose rank 1 dies in its second save."""
    from tests.ranks.schedule_rank import Schedule, run_rank

    run_rank(Schedule(2, 1, "write", over="file"), rank, folder)


def begin_again(rank: int, folder: Path) -> None:
    """The same job, started anew in the same directory: it goes on from the newest step and saves the next one."""
    training = Training(rank, 2)
    asyncckpt.Loader(folder / "checkpoints", {"user": training.table}, training.tensors).load()
    assert training.step == 1
    with saver_of(training, folder / "checkpoints") as saver:
        training.train()
        assert saver.save(2).step == 2


def sub_group(rank: int, folder: Path) -> None:
    """Ranks 0 and 2 of three save together, rank 1 saves alone; all at once."""
    group_of(rank, 3, folder)
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(UsageError, match="not in the process group"):
            asyncckpt.Saver(path=folder / "checkpoints", process_group=group)
        alone = Training(0, 1)
        alone.train()
        with saver_of(alone, folder / "alone") as saver:
            saver.save(1)
        return
    training = Training(rank // 2, 2, group)
    training.train()
    with pytest.raises(UsageError, match="not those of the process group"):
        asyncckpt.Saver(1 - training.rank, 2, path=folder / "checkpoints", process_group=group)
    with asyncckpt.Saver(
        path=folder / "checkpoints",
        hashtables={"user": training.table},
        tensors=training.tensors,
        process_group=group,
        peer_deadline=PEER_DEADLINE_S,
    ) as saver:
        saver.save_async(1).result(WAIT_S_MAX)
        training.train()
        saver.save(2)


def different_steps(rank: int, folder: Path) -> None:
    """Nothing is saved, all are told the same; the next save is none the worse."""
    training = Training(rank, 2, group_of(rank, 2, folder))
    training.train()
    with saver_of(training, folder / "checkpoints") as saver:
        error = raised(saver.save_async(5 + rank))
        assert isinstance(error, ConflictError)
        assert re.search(r"ranks 0 and 1 save together but differ in step: '5' on rank 0, '6' on rank 1", str(error))
        assert saver.save(1).step == 1


def a_filter_raises(rank: int, folder: Path) -> None:
    """On rank 1, in its first save: it raises that error, the other is told of it."""
    training = Training(rank, 2, group_of(rank, 2, folder))
    calls: list[int] = []

    def boom(blocks: list[asyncckpt.WriteBlock]) -> Sequence[asyncckpt.WriteBlock]:
        calls.append(len(blocks))
        if rank == 1 and len(calls) == 1:
            raise RuntimeError("boom on the second rank")
        return blocks

    training.train()
    with saver_of(training, folder / "checkpoints", filter_func=boom) as saver:
        error = raised(saver.save_async(1))
        if rank == 1:
            assert isinstance(error, FilterError)
            assert "boom" in repr(error.__cause__)
        else:
            assert isinstance(error, PeerError)
            assert error.rank == 1
            assert "boom on the second rank" in error.cause
            assert "FilterError" in error.cause
        training.train()
        assert saver.save(2).step == 2


def a_rank_skips(rank: int, folder: Path) -> None:
    """Rank 1 is busy with a save of its own; so all skip, and all make the save after that."""
    training = Training(rank, 2, group_of(rank, 2, folder))
    training.train()
    busy, free = threading.Event(), threading.Event()

    def wait(blocks: list[asyncckpt.WriteBlock]) -> list[asyncckpt.WriteBlock]:
        busy.set()
        assert free.wait(WAIT_S_MAX)
        return blocks

    with saver_of(training, folder / "checkpoints", on_busy="skip") as saver:
        if rank == 1:
            own = asyncckpt.Saver(path=folder / "own", tensors={"w": torch.ones(3)}, filter_func=wait)
            other = own.save_async(1)
            assert busy.wait(WAIT_S_MAX)
        skipped = saver.save_async(1)
        if rank == 1:
            free.set()
            other.result(WAIT_S_MAX)
            own.close()
        assert skipped.result(WAIT_S_MAX).skipped
        saver.wait_idle()
        # What rank 1 has to tell about the first call is told in the background, in front of this.
        assert not saver.save_async(2, on_busy="wait").result(WAIT_S_MAX).skipped


def a_call_fails(rank: int, folder: Path) -> None:
    """Before anything is captured, on rank 0: it raises at once, the other is told."""
    training = Training(rank, 2, group_of(rank, 2, folder))
    training.train()
    extra: dict[str, Any] = {}
    state = {**training.tensors, "extra": extra}
    with asyncckpt.Saver(
        rank,
        2,
        path=folder / "checkpoints",
        hashtables={"user": training.table},
        tensors=state,
        peer_deadline=PEER_DEADLINE_S,
    ) as saver:
        if rank == 0:
            extra["socket"] = threading.Lock()
            with pytest.raises(CheckpointError, match="socket"):
                saver.save_async(1)
            del extra["socket"]
        else:
            error = raised(saver.save_async(1))
            assert isinstance(error, PeerError)
            assert error.rank == 0
            assert "socket" in error.cause
        training.train()
        assert saver.save(2).step == 2


def the_directory_cannot_be_opened(rank: int, folder: Path) -> None:
    """Rank 0 says why; nobody waits for the deadline. Then two directories over one group."""
    training = Training(rank, 2, group_of(rank, 2, folder))
    (folder / "file").touch()
    dist.barrier()
    if rank == 0:
        with pytest.raises(UsageError, match="not a folder"):
            saver_of(training, folder / "file")
    else:
        with pytest.raises(PeerError, match="not a folder") as caught:
            saver_of(training, folder / "file")
        assert caught.value.rank == 0
    training.train()
    with saver_of(training, folder / "checkpoints") as first, saver_of(training, folder / "others") as second:
        assert second.save(1).step == 1
        assert first.save(1).step == 1


def a_rank_does_not_come(rank: int, folder: Path) -> None:
    """Without a group nobody opens; with one the save of the others ends by its deadline."""
    if rank == 1:
        return
    training = Training(0, 2)
    with pytest.raises(PeerError, match=r"ranks \[1\] of 2 did not come"):
        saver_of(training, folder / "checkpoints", peer_deadline=0.5)
    with pytest.raises(PeerError, match="rank 0"):
        saver_of(Training(1, 2), folder / "nowhere", peer_deadline=0.5)
    alone = Training(0, 1)
    alone.train()
    with saver_of(alone, folder / "checkpoints") as saver:  # The lock was given back.
        saver.save(1)
