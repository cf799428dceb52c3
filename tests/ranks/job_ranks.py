"""Ranks of small jobs, each a function of (rank, folder) that checks what this rank sees. Run by test_jobs.py."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.coordination import store_channel
from asyncckpt.engine.ranks import meeting
from asyncckpt.errors import CheckpointError, ConflictError, FilterError, PeerError, UsageError
from tests.ranks.training import RankTraining

PEER_DEADLINE_S = 20.0
WAIT_S_MAX = 60.0


def group_of(rank: int, ranks_count: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks_count)
    return dist.group.WORLD


def saver_of(training: RankTraining, path: Path, **options: Any) -> asyncckpt.Saver:
    return asyncckpt.Saver(
        training.rank,
        training.ranks_count,
        path=path,
        hashtables={"user": training.table},
        tensors=training.tensors,
        ranks=options.pop("ranks", asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)),
        **options,
    )


def raised(future: asyncckpt.SaveFuture) -> BaseException:
    error = future.exception(WAIT_S_MAX)
    assert error is not None, future
    return error


def files_only(rank: int, folder: Path) -> None:
    """Three ranks without a process group: full saves, a delta, steps by themselves, a blocking save."""
    training = RankTraining(rank, 3)
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
    from tests.ranks.schedule_rank import Strikes, run_rank

    run_rank(Strikes(2, 1, "write", over="file"), rank, folder)


def begin_again(rank: int, folder: Path) -> None:
    """The same job, started anew in the same directory: it goes on from the newest step and saves the next one."""
    training = RankTraining(rank, 2)
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
            asyncckpt.Saver(path=folder / "checkpoints", ranks=asyncckpt.RankOptions(process_group=group))
        alone = RankTraining(0, 1)
        alone.train()
        with saver_of(alone, folder / "alone") as saver:
            saver.save(1)
        return
    training = RankTraining(rank // 2, 2, group)
    training.train()
    with pytest.raises(UsageError, match="not those of the process group"):
        asyncckpt.Saver(
            1 - training.rank, 2, path=folder / "checkpoints", ranks=asyncckpt.RankOptions(process_group=group)
        )
    with asyncckpt.Saver(
        path=folder / "checkpoints",
        hashtables={"user": training.table},
        tensors=training.tensors,
        ranks=asyncckpt.RankOptions(process_group=group, peer_deadline=PEER_DEADLINE_S),
    ) as saver:
        saver.save_async(1).result(WAIT_S_MAX)
        training.train()
        saver.save(2)


def different_steps(rank: int, folder: Path) -> None:
    """Nothing is saved, all are told the same; the next save is none the worse."""
    training = RankTraining(rank, 2, group_of(rank, 2, folder))
    training.train()
    with saver_of(training, folder / "checkpoints") as saver:
        error = raised(saver.save_async(5 + rank))
        assert isinstance(error, ConflictError)
        assert re.search(r"ranks 0 and 1 save together but differ in step: '5' on rank 0, '6' on rank 1", str(error))
        assert saver.save(1).step == 1


def a_filter_raises(rank: int, folder: Path) -> None:
    """On rank 1, in its first save: it raises that error, the other is told of it."""
    training = RankTraining(rank, 2, group_of(rank, 2, folder))
    calls: list[int] = []

    def boom(blocks: list[asyncckpt.filters.WriteBlock]) -> Sequence[asyncckpt.filters.WriteBlock]:
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
    training = RankTraining(rank, 2, group_of(rank, 2, folder))
    training.train()
    busy, free = threading.Event(), threading.Event()

    def wait(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
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
    training = RankTraining(rank, 2, group_of(rank, 2, folder))
    training.train()
    extra: dict[str, Any] = {}
    state = {**training.tensors, "extra": extra}
    with asyncckpt.Saver(
        rank,
        2,
        path=folder / "checkpoints",
        hashtables={"user": training.table},
        tensors=state,
        ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S),
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
    """Rank 0 says why; nobody waits for the deadline, who comes late neither. Then two directories over one group."""
    training = RankTraining(rank, 2, group_of(rank, 2, folder))
    (folder / "file").touch()
    dist.barrier()
    if rank == 0:
        with pytest.raises(UsageError, match="not a folder"):
            saver_of(training, folder / "file")
    else:
        with pytest.raises(PeerError, match="not a folder") as caught:
            saver_of(training, folder / "file")
        assert caught.value.rank == 0
        dist.barrier()  # Behind the end of what rank 0 has tried.
    store_channel.CLOSE_S_MAX = 0.1
    with pytest.raises(PeerError if rank else UsageError, match="not a folder"):
        saver_of(training, folder / "file")
    if rank == 0:
        dist.barrier()
    training.train()
    with saver_of(training, folder / "checkpoints") as first, saver_of(training, folder / "others") as second:
        assert second.save(1).step == 1
        assert first.save(1).step == 1


def a_rank_does_not_come(rank: int, folder: Path) -> None:
    """Without a group nobody opens; with one the save of the others ends by its deadline."""
    if rank == 1:
        return
    training = RankTraining(0, 2)
    with pytest.raises(PeerError, match=r"ranks \[1\] of 2 did not come"):
        saver_of(training, folder / "checkpoints", ranks=asyncckpt.RankOptions(peer_deadline=0.5))
    with pytest.raises(PeerError, match="rank 0"):
        saver_of(RankTraining(1, 2), folder / "nowhere", ranks=asyncckpt.RankOptions(peer_deadline=0.5))
    alone = RankTraining(0, 1)
    alone.train()
    with saver_of(alone, folder / "checkpoints") as saver:  # The lock was given back.
        saver.save(1)


def periodic_savers(rank: int, folder: Path) -> None:
    """An error of one rank reaches every loop; the ranks stay in step whichever step it reaches them in."""
    training = RankTraining(rank, 2, group_of(rank, 2, folder))
    broken = threading.Event()

    def boom(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        if rank == 1 and broken.is_set():
            raise RuntimeError("boom on the second rank")
        return blocks

    with saver_of(training, folder / "checkpoints", filter_func=boom) as saver:
        with pytest.raises(UsageError, match="every_seconds is for one rank"):
            asyncckpt.PeriodicSaver(saver, every_seconds=5.0)
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=1)
        broken.set()
        training.train()
        future = periodic.step(training.step)
        assert future is not None
        future._wait_done(60.0)  # Without asking: whoever asks has the error.
        broken.clear()
        training.train()
        if rank == 0:  # Rank 0 hears of it where a save is due, rank 1 before that.
            with pytest.raises(PeerError, match="boom"):
                periodic.step(training.step)
        else:
            with pytest.raises(FilterError, match="boom"):
                periodic.drain()
            missed = periodic.step(training.step)
            assert missed is not None
            assert missed.result(60.0).skipped
            periodic.drain()
            assert periodic.statistics().failed_count == 1
            assert periodic.statistics().skipped_count == 1
        training.train()
        periodic.step(training.step)
        periodic.drain()
        assert periodic.statistics().last_result is not None
        assert training.step == 3


def compaction(rank: int, folder: Path) -> None:
    """A chain of deltas is folded by rank 0, for all."""
    training = RankTraining(rank, 2, group_of(rank, 2, folder))
    with saver_of(training, folder / "checkpoints") as saver:
        for kind in ("full", "delta", "delta"):
            training.train()
            assert saver.save_async(training.step, kind=kind).result(WAIT_S_MAX).kind == kind
        result = saver.compact().result(WAIT_S_MAX)
        assert result.step == 3
        assert result.skipped == (rank == 1)


def a_last_call_fails(rank: int, folder: Path) -> None:
    """And the Saver is closed at once: the other rank is told all the same, long before its deadline."""
    training = RankTraining(rank, 2, group_of(rank, 2, folder))
    training.train()
    with saver_of(training, folder / "checkpoints") as saver:
        saver.save(1)
        if rank == 1:
            with pytest.raises(UsageError, match="step must be"):
                saver.save_async(-5)
        else:
            error = raised(saver.save_async(2))
            assert isinstance(error, PeerError)
            assert "step must be" in error.cause


SLICE_SIZE = 65536


def gen_slice(index: int, count: int) -> tuple[int, int, int]:
    """What RecIS' function of this name gives: the first shards have the buckets that are left over."""
    sizes = [SLICE_SIZE // count + (number < SLICE_SIZE % count) for number in range(count)]
    return sum(sizes[:index]), sum(sizes[: index + 1]), SLICE_SIZE


def rows_of_slice(ids: np.ndarray[Any, Any], index: int, count: int) -> np.ndarray[Any, Any]:
    begin, end, _ = gen_slice(index, count)
    return np.array([begin <= int(id) % 2**64 % SLICE_SIZE < end for id in ids])


def slices(rank: int, folder: Path) -> None:
    """Three ranks with slices of RecIS; any other slices, and any tables by modulo, take what is theirs, from whole
    tables and from changes to them. What is not in its slice no table takes."""
    group_of(rank, 3, folder)
    ids = np.concatenate([np.arange(-4000, 4000) * 37, [-(2**63), 2**63 - 1]]).astype(np.int64)
    rows = torch.from_numpy(np.stack([ids % 1000, ids % 777], axis=1)).float()
    table = asyncckpt.HashTable("sliced", 2, shard=gen_slice(rank, 3))
    mine = rows_of_slice(ids, rank, 3)
    for strange in (ids[~mine][:1], ids[~mine][-1:]):
        with pytest.raises(UsageError, match=rf"{strange[0]} belongs to bucket \d+ .* holds buckets"):
            table.insert(strange, rows[:1])
        with pytest.raises(UsageError, match="belongs to bucket"):
            table.lookup(strange)
    assert len(table) == 0
    table.insert(ids[mine], rows[torch.from_numpy(mine)] + (ids[mine] % 3 == 0)[:, None])
    with asyncckpt.Saver(
        rank, 3, path=folder / "slices", hashtables={"sliced": table}, ranks=asyncckpt.RankOptions(peer_deadline=20.0)
    ) as saver:
        saver.save(1)
        table.insert(ids[mine], rows[torch.from_numpy(mine)])
        assert saver.save_async(2, kind="delta").result(WAIT_S_MAX).kind == "delta"
    for count in (1, 2, 5):
        for index in range(count):
            modulo = asyncckpt.HashTable("sliced", 2, shard=(index, count))
            by_modulo = ids.view(np.uint64) % np.uint64(count) == np.uint64(index)
            sliced = asyncckpt.HashTable("sliced", 2, shard=gen_slice(index, count))
            for target, owned in ((modulo, by_modulo), (sliced, rows_of_slice(ids, index, count))):
                report = asyncckpt.Loader(folder / "slices", {"sliced": target}).load()
                assert report.rows == {"sliced": int(owned.sum())}
                found = target.lookup(torch.from_numpy(ids[owned]), insert=False)
                assert torch.equal(target.embedding[found], rows[torch.from_numpy(owned)])


def replicas(rank: int, folder: Path) -> None:
    """What all ranks hold is written once, what only one holds too; values are every rank's own."""
    training = RankTraining(rank, 3, group_of(rank, 3, folder))
    training.train()
    table = asyncckpt.HashTable("whole", 2, replicated=True)
    table.insert(torch.arange(5), torch.ones(5, 2))
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
        model[1].running_mean.fill_(float(rank))
    state: dict[str, Any] = {"model": model, "rank": rank, "same": torch.full((5000,), 3.0)}
    if rank == 2:
        state["alone"] = torch.full((6000,), 4.0)
    options = {"path": folder / "replicas", "hashtables": {"whole": table}, "tensors": state}
    with asyncckpt.Saver(rank, 3, ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S), **options) as saver:
        written = [saver.save_async(step).result(WAIT_S_MAX).bytes_logical for step in (1, 2)]
        assert written[1] < written[0], "a share is captured once it is known"
        for step in (1, 2):
            blocks = asyncckpt.describe(folder / "replicas", step).blocks
            assert len({block.name for block in blocks}) == len(blocks), "each is there once"
            assert {block.rank for block in blocks if "running" in block.name} == {0}
            assert {block.rank for block in blocks if block.name == "alone"} == {2}
        if rank == 1:
            state["same"] = torch.zeros(5001)  # On this rank only.
        assert isinstance(raised(saver.save_async(3)), ConflictError)
        state["same"] = torch.full((5001,), 5.0)
        saver.save(4)
    found: dict[str, Any] = {"model": torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40)), "rank": 0}
    found |= {"same": torch.zeros(5001), "alone": torch.zeros(6000)}
    again = asyncckpt.HashTable("whole", 2, replicated=True)
    report = asyncckpt.Loader(folder / "replicas", {"whole": again}, found, shard_index=rank, shard_num=3).load()
    assert (report.step, report.values["rank"], report.rows) == (4, rank, {"whole": 5})
    module = found["model"]
    for tensor, value in ((found["same"], 5), (found["alone"], 4), (module[0].weight, 7), (module[1].running_mean, 0)):
        assert bool((tensor == value).all())


def without_a_word_about_ranks(rank: int, folder: Path) -> None:
    """Two ranks that take the directory each for itself: the second one is told what to do, and comes in afterwards."""
    meeting.MEETING_S = 0.2
    group_of(rank, 2, folder)
    for opening in range(2):
        if rank == opening:
            with pytest.warns(UserWarning, match="saves alone"):
                saver = asyncckpt.Saver(path=folder / "checkpoints")
            dist.barrier()
            dist.barrier()
            saver.close()
        else:
            dist.barrier()
            with pytest.raises(ConflictError, match=r"come too late.*process_group=.*alone=True"):
                asyncckpt.Saver(path=folder / "checkpoints")
            with pytest.raises(ConflictError, match="ranks of one job save together: RankOptions"):
                asyncckpt.Saver(path=folder / "checkpoints", ranks=asyncckpt.RankOptions(alone=True))
            dist.barrier()
        dist.barrier()


def boxes_that_do_not_make_up_the_whole(rank: int, folder: Path) -> None:
    """After a save that failed, rank 0 says that it holds what rank 1 holds: nothing is committed."""
    group_of(rank, 2, folder)
    part = torch.full((3, 2), float(rank))
    state = {"w": asyncckpt.sharded(part, (3 * rank, 0), (6, 2))}
    with asyncckpt.Saver(
        rank, 2, path=folder / "boxes", tensors=state, ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)
    ) as saver:
        for step in (1, 2):
            saver.save_async(step).result(WAIT_S_MAX)
        raised(saver.save_async(5 + rank))  # Different steps; so the ranks ask anew who writes what.
        state["w"] = asyncckpt.sharded(part, (3, 0), (6, 2))
        error = raised(saver.save_async(3))
        assert isinstance(error, ConflictError if rank == 0 else PeerError)
        assert "what ranks hold of tensor 'w' of step 3 does not make it up, or overlaps" in str(error)
        assert all(f"[3, 2] at [3, 0] on rank {other}" in str(error) for other in (0, 1))
        state["w"] = asyncckpt.sharded(part, (3 * rank, 0), (6 + rank, 2))
        error = raised(saver.save_async(3))
        assert isinstance(error, ConflictError if rank == 0 else PeerError)
        assert "tensor 'w' of step 3 is not the same on all ranks" in str(error)
        assert all(f"float32 [{6 + other}, 2] on rank {other}" in str(error) for other in (0, 1))
        state["w"] = asyncckpt.sharded(part, (3 * rank, 0), (6, 2))
        saver.save(4)
    whole = torch.zeros(6, 2)
    assert asyncckpt.Loader(folder / "boxes", tensors={"w": whole}).load().step == 4
    assert whole[:, 0].tolist() == [0.0] * 3 + [1.0] * 3
