"""Ranks that queue saves at different times; run by test_queued.py."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.checkpoints import pin
from asyncckpt.errors import ConflictError, PeerError, UsageError
from tests.ranks.job_ranks import PEER_DEADLINE_S, WAIT_S_MAX, group_of, raised

IDS = range(60)
STEPS_COUNT = 8
POLICY = asyncckpt.DeltaPolicy(deltas_max=3, bytes_share_max=1e9)


@dataclass(frozen=True)
class Change:
    """What is done to the state before a step, and how it is saved.

    more_on: ranks that have one tensor more. rows: all there are then, with their version.
    """

    step: int
    kind: Any
    removed: list[int]
    written: list[int]
    more_on: frozenset[int]
    rows: dict[int, int]


def changes(seed: int) -> Iterator[Change]:
    """The same on all ranks. An id that is removed may come back at once, and a name comes and goes."""
    chance = random.Random(seed)
    rows: dict[int, int] = {}
    more_on: frozenset[int] = frozenset()
    for step in range(1, STEPS_COUNT + 1):
        removed = [id for id in rows if chance.random() < 0.15]
        written = [id for id in IDS if chance.random() < (0.15 if rows else 0.7)]
        rows = {id: version for id, version in rows.items() if id not in removed} | dict.fromkeys(written, step)
        if chance.random() < 0.25:  # One that both had goes on both: who alone has it still may have left it out.
            chosen = frozenset(rank for rank in (0, 1) if chance.random() < 0.5)
            more_on = chosen if len(more_on) < 2 else frozenset()
        kind = "full" if step == 1 else chance.choice(["auto", "auto", "delta", "delta", "full"])
        yield Change(step, kind, removed, written, more_on, dict(rows))


class QueuedState:
    """A table of which every rank has a shard, one that all have in full, one without marks, and dense tensors."""

    def __init__(self, rank: int, ranks_count: int) -> None:
        self.rank, self.ranks_count = rank, ranks_count
        self.tables = {
            "user": asyncckpt.HashTable("user", 2, shard=(rank, ranks_count)),
            "all": asyncckpt.HashTable("all", 2, replicated=True),
        }
        self.plain = torch.nn.Embedding(len(IDS), 2)
        torch.nn.init.zeros_(self.plain.weight)
        self.tensors: dict[str, Any] = {"w": torch.zeros(5000), "v": torch.zeros(6000), "step": 0}

    @property
    def hashtables(self) -> dict[str, Any]:
        return {**self.tables, **asyncckpt.adapters.tables_of(self.plain)}

    def apply(self, change: Change) -> None:
        for name, table in self.tables.items():
            mine = [id for id in change.written if name == "all" or id % self.ranks_count == self.rank]
            table.remove(torch.tensor(change.removed, dtype=torch.int64))
            table.insert(torch.tensor(mine, dtype=torch.int64), torch.full((len(mine), 2), float(change.step)))
        with torch.no_grad():
            self.plain.weight[change.removed] = 0.0
            self.plain.weight[change.written] = float(change.step)
        for name in ("w", "v"):
            self.tensors[name].fill_(change.step)
        self.tensors["step"] = change.step
        self.tensors.pop("more", None)
        if self.rank in change.more_on:
            self.tensors["more"] = torch.full((7000,), float(change.step))


def differences(path: Path, change: Change) -> list[str]:
    """In what a checkpoint differs from the state after a change."""
    target = QueuedState(0, 1)
    target.plain.weight.data.fill_(-1.0)
    if change.more_on:
        target.tensors["more"] = torch.zeros(7000)
    report = asyncckpt.Loader(path, target.hashtables, target.tensors, step=change.step).load()
    found = []
    for name, table in target.tables.items():
        ids = table.ids()
        versions = table.embedding[table.used_rows()][:, 0].to(torch.int64)
        if dict(zip(ids.tolist(), versions.tolist(), strict=True)) != change.rows:
            found.append(f"table {name!r} of step {change.step}")
    if target.plain.weight[:, 1].tolist() != [change.rows.get(id, 0) for id in IDS]:
        found.append(f"the embedding of step {change.step}")
    dense = [float(value.mean()) for value in target.tensors.values() if isinstance(value, torch.Tensor)]
    if set(dense) != {change.step} or report.values["step"] != change.step:
        found.append(f"tensors of step {change.step}: {dense}, {report.values}")
    return found


def saver_of(rank: int, path: Path, state: QueuedState, **options: Any) -> asyncckpt.Saver:
    ranks = asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)
    options = {"on_busy": "queue", "deltas": POLICY, "ranks": ranks, **options}
    return asyncckpt.Saver(
        rank, state.ranks_count, path=path, hashtables=state.hashtables, tensors=state.tensors, **options
    )


def keep_of(seed: int) -> int | None:
    return 1 if seed % 2 else None


def at_any_times(rank: int, folder: Path, seeds: list[int]) -> None:
    """Every rank saves the same, and waits for some of its saves: for which ones differs from rank to rank."""
    group_of(rank, 2, folder)
    for seed in seeds:
        own, state = random.Random(1000 * seed + rank), QueuedState(rank, 2)
        with saver_of(rank, folder / f"{seed}", state, keep=keep_of(seed)) as saver:
            futures = []
            for change in changes(seed):
                state.apply(change)
                futures.append(saver.save_async(change.step, kind=change.kind))
                if own.random() < 0.5:
                    futures[-1].result(WAIT_S_MAX)
            for future in futures:
                future.result(WAIT_S_MAX)


def one_rank_is_ahead(rank: int, folder: Path) -> None:
    """Rank 1 makes its calls before any save has ended, rank 0 each after the one before has."""
    group_of(rank, 2, folder)
    for kind in ("auto", "delta"):
        state = QueuedState(rank, 2)
        with saver_of(rank, folder / kind, state) as saver:
            futures = []
            if rank == 0:
                dist.barrier()
            for change in list(changes(1))[:2]:
                state.apply(change)
                futures.append(saver.save_async(change.step, kind="full" if change.step == 1 else kind))
                if rank == 0:
                    futures[-1].result(WAIT_S_MAX)
            if rank == 1:
                dist.barrier()
            assert [future.result(WAIT_S_MAX).kind for future in futures] == ["full", "delta"]


def a_delta_has_nothing_to_build_upon(rank: int, folder: Path) -> None:
    """The first save fails, and the delta behind it too, on both ranks, whether it was queued or not."""
    group_of(rank, 2, folder)
    state = QueuedState(rank, 2)
    fails = [True]

    def fail(blocks: Any) -> Any:
        if fails[0]:
            raise RuntimeError("a filter fails")
        return blocks

    with saver_of(rank, folder / "checkpoints", state, filter_func=fail) as saver:
        if rank == 0:
            dist.barrier()
        first = saver.save_async(1)
        if rank == 0:
            raised(first)
            with pytest.raises(UsageError, match="needs a base"):
                saver.save_async(2, kind="delta")
        else:
            second = saver.save_async(2, kind="delta")
            dist.barrier()
            raised(first)
            assert isinstance(raised(second), (UsageError, PeerError))
        fails[0] = False
        assert saver.save_async(3, on_busy="wait").result(WAIT_S_MAX).kind == "full"


def the_next_step_after_a_failed_one(rank: int, folder: Path) -> None:
    """The first save fails on rank 0, when rank 1 has made its next call, and rank 0 has not; no call names a step."""
    group_of(rank, 2, folder)
    state = QueuedState(rank, 2)
    fails = [rank == 0]

    def fail_once(blocks: Any) -> Any:
        if fails.pop() if fails else False:
            raise RuntimeError("a filter fails")
        return blocks

    with saver_of(rank, folder / "checkpoints", state, filter_func=fail_once) as saver:
        futures = []
        if rank == 0:
            dist.barrier()
        for change in list(changes(3))[:3]:
            state.apply(change)
            futures.append(saver.save_async())
            if rank == 0 or len(futures) == 3:
                futures[-1].exception(WAIT_S_MAX)
            elif len(futures) == 2:
                assert futures[1].step == 1
                dist.barrier()
                raised(futures[0])
        assert [future.result(WAIT_S_MAX).step for future in futures[1:]] == [0, 1]
        assert [future.step for future in futures[1:]] == [0, 1]


@contextmanager
def changed(
    rank: int, folder: Path, **options: Any
) -> Iterator[tuple[asyncckpt.Saver, Callable[..., asyncckpt.SaveFuture]]]:
    """A Saver of one of two ranks, and what changes its state and begins a save of it."""
    group_of(rank, 2, folder)
    state, calls = QueuedState(rank, 2), changes(2)
    with saver_of(rank, folder / "checkpoints", state, **options) as saver:

        def begin(**options: Any) -> asyncckpt.SaveFuture:
            change = next(calls)
            state.apply(change)
            return saver.save_async(change.step, **options)

        yield saver, begin


def the_parent_is_removed(rank: int, folder: Path) -> None:
    """By others, as after a mistake: the next save is full on all ranks, and a delta that was asked for is refused."""
    with changed(rank, folder, on_busy="wait") as (_, begin):

        def save(**options: Any) -> Any:
            return begin(**options).result(WAIT_S_MAX).kind

        assert [save(), save()] == ["full", "delta"]
        dist.barrier()
        if rank == 0:
            shutil.rmtree(next((folder / "checkpoints" / "data").glob("000000000001-*")))
        dist.barrier()
        with pytest.raises(ConflictError, match="is missing or damaged"):
            save(kind="delta")
        assert [save(), save()] == ["full", "delta"]


def what_is_kept(rank: int, folder: Path) -> None:
    """Rank 0 removes, and its metadata counts; rank 1 pins a step beside it."""
    group_of(rank, 2, folder)
    state, path = QueuedState(rank, 2), folder / "checkpoints"
    policy = asyncckpt.KeepPolicy(best=1, metric="loss")
    with saver_of(rank, path, state, keep=policy, on_busy="wait") as saver:
        for change, loss in zip(changes(2), [3.0, 1.0, 2.0, 5.0], strict=False):
            state.apply(change)
            metadata = None if rank else {"loss": loss}
            saver.save_async(change.step, kind="full", metadata=metadata).result(WAIT_S_MAX)
            saver.wait_idle(WAIT_S_MAX)
            dist.barrier()
            if rank == 1 and change.step == 3:
                pin(path, 3)
            dist.barrier()
        with pytest.raises(PeerError if rank else UsageError, match="no number 'loss'"):
            saver.save_async(9).result(WAIT_S_MAX)
        assert asyncckpt.list_steps(path) == [2, 3, 4]


def the_ranks_compact(rank: int, folder: Path) -> None:
    """Rank 0 does it; all count from what was compacted, also the rank that has called before."""
    with changed(rank, folder) as (saver, save):
        assert [save().result(WAIT_S_MAX).kind for _ in range(4)] == ["full", *["delta"] * 3]
        dist.barrier()
        saver.compact(4).result(WAIT_S_MAX)
        dist.barrier()
        assert [save().result(WAIT_S_MAX).kind for _ in range(2)] == ["delta"] * 2
        future = save() if rank else None
        dist.barrier()
        saver.compact(6).result(WAIT_S_MAX)
        dist.barrier()
        assert (future or save()).result(WAIT_S_MAX).kind == "delta"
        assert save().result(WAIT_S_MAX).kind == "delta"


def one_rank_has_not_seen_that_the_parent_is_removed(rank: int, folder: Path) -> None:
    """Because it was removed after its call, say: one save fails on all ranks, and the next one is full."""
    with changed(rank, folder, on_busy="wait") as (_, begin):
        assert begin().result(WAIT_S_MAX).kind == "full"
        dist.barrier()
        if rank == 0:
            (folder / "checkpoints" / "manifests" / "000000000001.json").unlink()
        dist.barrier()
        with pytest.MonkeyPatch.context() as blind:
            if rank == 1:
                blind.setattr("asyncckpt.engine.features.deltas._look", lambda job, base: base)
            with pytest.raises(ConflictError, match="is missing or damaged"):
                begin().result(WAIT_S_MAX)
        assert [begin().result(WAIT_S_MAX).kind for _ in range(2)] == ["full", "delta"]
