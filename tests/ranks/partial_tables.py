"""Ranks that save a state of which each holds a part, in every way in which they may say so, or not; and what a program
with the whole table gets back: all of it, or somebody was told before. Run by test_partial_tables.py."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import asyncckpt
from asyncckpt import embcache
from asyncckpt.cli import run as run_command
from asyncckpt.coordination import store_channel
from asyncckpt.dcp import StorageWriter
from asyncckpt.engine.ranks import meeting
from asyncckpt.errors import CheckpointError, IncompatibleError
from asyncckpt.strategies.mapping import ShardedTensor
from asyncckpt.strategies.sharded_state import ShardedSave
from tests.embcache.models import config
from tests.ranks.job_ranks import group_of
from tests.worlds.saves import save_one

# Of ranks that do not come; those that must hold are waited for, however slow they are.
SHORT_S, LONG_S = 0.4, 60.0
IDS_COUNT = 24  # Divisible by every number of ranks, and by one more.
SAID = ("right", "the same on all", "too few", "nothing")


@dataclass(frozen=True)
class Cell:
    """One way to save. group: what is said of the ranks. come: which of them make a Saver."""

    door: str
    group: str
    indices: bool
    come: str
    said: str

    @property
    def must_hold(self) -> bool:
        """Whether this is sound, so that all of it must be there."""
        knows = self.group != "none" or self.indices
        return self.come == "all" and self.said == "right" and knows

    @property
    def deadline_s(self) -> float:
        return LONG_S if self.must_hold else SHORT_S

    def __str__(self) -> str:
        return f"{self.door}, group {self.group}, {'indices, ' if self.indices else ''}{self.come}, says {self.said}"


def cells() -> list[Cell]:
    """All of them, but those that nobody can judge: processes that nothing connects, with tables that say nothing."""
    doors = itertools.product(("table", "boxes", "checkpointer"), ("given", "default", "none"), (False, True))
    found = [Cell(*door, *rest) for door in doors for rest in itertools.product(("all", "rank 0"), SAID)]
    found = [cell for cell in found if cell.group != "none" or cell.indices or cell.said != "nothing"]
    found = [cell for cell in found if cell.door != "boxes" or cell.said != "nothing"]
    whole = itertools.product(("embcache", "strategy", "dcp"), ("all", "rank 0"), SAID[:3])
    found += [Cell(door, "default", False, come, said) for door, come, said in whole]
    # A DTensor says by its mesh which part is here, so it cannot say that of another rank.
    return [cell for cell in found if (cell.door, cell.said) != ("dcp", "the same on all")]


def drawn(count: int, seed: int) -> list[Cell]:
    """Return some of each door, but for DCP, whose first save takes seconds of torch's imports."""
    chosen, listed = random.Random(seed), [cell for cell in cells() if cell.door != "dcp"]
    by_door = {door: [cell for cell in listed if cell.door == door] for door in dict.fromkeys(c.door for c in listed)}
    return [cell for some in by_door.values() for cell in chosen.sample(some, min(len(some), count))]


def run_cells(listed: list[Cell], ranks_count: int, rank: int, folder: Path) -> None:
    wrong = []
    store_channel.CLOSE_S_MAX = SHORT_S
    for number, cell in enumerate(listed):
        meeting.MEETING_S = cell.deadline_s
        path = folder / f"cell-{number}"
        path.mkdir(mode=0o750, exist_ok=True)
        group_of(rank, ranks_count, path)  # Ranks that do not come leave the meetings of a group out of step.
        problem = judged(cell, rank, ranks_count, path / "saved")
        if problem:
            wrong.append(f"{cell} ({ranks_count} ranks): {problem}")
        dist.barrier()
        dist.destroy_process_group()
    assert not wrong, "\n".join(wrong)


def no_door_waits(rank: int, folder: Path) -> None:
    """What says who saves, or takes it from torch.distributed, does not look for other ranks."""
    group_of(rank, 2, folder)
    with mock.patch.object(meeting.Meeting, "wait", side_effect=AssertionError("it waits to see who comes")):
        for door in ("embcache", "strategy", "dcp"):
            DOORS[door](Cell(door, "default", indices=False, come="all", said="right"), rank, 2, folder / door)
        for group, indices in (("given", False), ("given", True), ("default", True)):
            cell = Cell("table", group, indices, "all", "right")
            save_table(cell, rank, 2, folder / f"{group}-{indices}")
        if rank == 0:
            asyncckpt.save(folder / "alone", {"w": torch.ones(3)})
            torch.save({"w": torch.ones(3)}, folder / "w.pt")
            assert run_command(["import", "torch", str(folder / "w.pt"), str(folder / "imported")]) == 0
            for name in ("alone", "imported"):
                assert asyncckpt.Loader(folder / name, tensors={"w": torch.zeros(3)}).load().step == 0
                assert list(asyncckpt.load(folder / name)) == ["w"]
    dist.barrier()


class Raises:
    """A state whose first questions are answered by errors of others than this library."""

    def __init__(self, *errors: BaseException) -> None:
        self.left = list(errors)

    def state_dict(self) -> dict[str, Any]:
        if self.left:
            raise self.left.pop(0)
        return {"w": torch.ones(3)}


def alone_after_errors(rank: int, folder: Path) -> None:
    """A rank that saves alone, and whose Saver could not be made, makes another one: nobody else has the directory."""
    group_of(rank, 2, folder)
    meeting.MEETING_S = SHORT_S
    if rank == 0:
        state = Raises(RuntimeError("of the user"), KeyboardInterrupt())
        for error in (RuntimeError, KeyboardInterrupt, UserWarning):
            with warnings.catch_warnings():
                warnings.simplefilter("error" if error is UserWarning else "ignore")
                with pytest.raises(error):
                    asyncckpt.Saver(path=folder / "saved", tensors={"state": state})
        with asyncckpt.Saver(path=folder / "saved", tensors={"state": state}) as saver:
            assert saver.save(1).step == 1
    dist.barrier()


def forked_from_a_rank(rank: int, folder: Path) -> None:
    """A child has the connection of its parent: what it asked the store, the parent could be answered."""
    group_of(rank, 2, folder)
    state = {"w": torch.ones(3)}
    child = os.fork()
    if child == 0:
        with ending():
            group = asyncckpt.RankOptions(process_group=dist.group.WORLD)
            for ranks in (asyncckpt.RankOptions(), group):
                with pytest.raises(asyncckpt.UsageError, match=r"forked from a rank .*alone=True"):
                    asyncckpt.Saver(path=folder / f"{rank}", tensors=state, ranks=ranks)
            with pytest.raises(asyncckpt.UsageError, match=r"forked from a rank .*alone=True"):
                asyncckpt.Checkpointer(folder / f"{rank}", every=1, state=state)
            alone = asyncckpt.RankOptions(alone=True)
            with asyncckpt.Saver(path=folder / f"{rank}", tensors=state, ranks=alone) as saver:
                assert saver.save(1).step == 1
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncckpt.list_steps(folder / f"{rank}") == [1]
    dist.barrier()


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """End the process with the block, and say how that went."""
    code = 1
    try:
        yield
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def judged(cell: Cell, rank: int, ranks_count: int, path: Path) -> str:
    """Return what is wrong with a cell: every rank says the same."""
    told: list[str] = []
    has_saved = False
    with warnings.catch_warnings(record=True) as warned, group_as(cell.group):
        warnings.simplefilter("always")
        if cell.come == "all" or rank == 0:
            try:
                DOORS[cell.door](cell, rank, ranks_count, path)
                has_saved = True
            except CheckpointError as error:
                told.append(f"rank {rank}: {type(error).__name__}: {error}")
        told += [str(warning.message) for warning in warned if "asyncckpt" in str(warning.message)]
    everywhere: list[Any] = [None] * ranks_count
    dist.all_gather_object(everywhere, (has_saved, told))
    has_saved, told = any(saved for saved, _ in everywhere), [text for _, texts in everywhere for text in texts]
    if not has_saved:
        return "" if told and not cell.must_hold else f"nobody has saved: {told}"
    problem = ""
    if rank == 0:
        count = loaded_count(cell, path)
        if count != IDS_COUNT and (cell.must_hold or not told):
            problem = f"{count} of {IDS_COUNT}, and nobody was told; {told}"
    dist.barrier()
    return problem


@contextlib.contextmanager
def group_as(group: str) -> Iterator[None]:
    """none: as if torch.distributed were not there."""
    if group != "none":
        yield
        return
    with mock.patch.object(dist, "is_initialized", return_value=False):
        yield


def options_of(cell: Cell, rank: int, ranks_count: int) -> dict[str, Any]:
    group = dist.group.WORLD if cell.group == "given" else None
    options: dict[str, Any] = {"ranks": asyncckpt.RankOptions(group, peer_deadline=cell.deadline_s)}
    return options | ({"shard_index": rank, "shard_num": ranks_count} if cell.indices else {})


def shard_of(cell: Cell, rank: int, ranks_count: int) -> tuple[int, int]:
    return {
        "right": (rank, ranks_count),
        "the same on all": (0, ranks_count),
        "too few": (rank, ranks_count + 1),
        "nothing": (0, 1),
    }[cell.said]


def table_of(cell: Cell, rank: int, ranks_count: int) -> asyncckpt.HashTable:
    shard = shard_of(cell, rank, ranks_count)
    table = asyncckpt.HashTable("t", 2, shard=shard)
    index, count = (rank, ranks_count) if cell.said == "nothing" else shard
    ids = torch.arange(index, IDS_COUNT, count)
    table.insert(ids, ids[:, None].repeat(1, 2).float())
    return table


def save_table(cell: Cell, rank: int, ranks_count: int, path: Path) -> None:
    tables = {"t": table_of(cell, rank, ranks_count)}
    save_one(path, hashtables=tables, **options_of(cell, rank, ranks_count))


def save_boxes(cell: Cell, rank: int, ranks_count: int, path: Path) -> None:
    index, count = shard_of(cell, rank, ranks_count)
    size = IDS_COUNT // count
    box = asyncckpt.sharded(torch.arange(index * size, (index + 1) * size), (index * size,), (IDS_COUNT,))
    save_one(path, tensors={"t": box}, **options_of(cell, rank, ranks_count))


def save_steps(cell: Cell, rank: int, ranks_count: int, path: Path) -> None:
    options = options_of(cell, rank, ranks_count)
    with asyncckpt.Checkpointer(path, every=1, options=options, t=table_of(cell, rank, ranks_count)) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1)


def save_collection(cell: Cell, rank: int, ranks_count: int, path: Path) -> None:
    shard = shard_of(cell, rank, ranks_count)
    module = embcache.EmbCacheEmbeddingBagCollection(
        [config("t", ("f",), dim=2, optimizer_slots=None, metadata=None)], shard=shard
    )
    module(
        {
            "f": (
                torch.arange(shard[0], IDS_COUNT, shard[1]),
                torch.arange(len(range(shard[0], IDS_COUNT, shard[1])) + 1),
            )
        }
    )
    with embcache.Saver(peers_deadline=cell.deadline_s) as saver:
        saver.save(module, path)


def save_strategy(cell: Cell, rank: int, ranks_count: int, path: Path) -> None:
    index, count = shard_of(cell, rank, ranks_count)
    size = IDS_COUNT // count
    part = ShardedTensor.from_rank_offsets("t", torch.arange(index * size, (index + 1) * size), (0, index, count))
    path.mkdir(exist_ok=True)
    ShardedSave(peer_deadline=cell.deadline_s).save({"t": part}, path)


def save_dcp(cell: Cell, rank: int, ranks_count: int, path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    index, count = shard_of(cell, rank, ranks_count)
    size = IDS_COUNT // count
    mesh = init_device_mesh("cpu", (ranks_count,))
    part = torch.arange(index * size, (index + 1) * size)
    whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=(IDS_COUNT,), stride=(1,))
    try:
        dcp.save({"t": whole}, storage_writer=StorageWriter(path, step=1), no_dist=cell.come != "all")
    except CheckpointException as error:
        raise CheckpointError(f"torch says: {error}") from error


def loaded_count(cell: Cell, path: Path) -> int:
    """Return how many ids, or elements, a program gets that holds the whole; 0 where it is told that it cannot."""
    try:
        if cell.door in ("boxes", "dcp"):
            found = torch.full((IDS_COUNT,), -1)
            asyncckpt.Loader(path, tensors={"t": found}, shard_index=0, shard_num=1).load()
            return int((found == torch.arange(IDS_COUNT)).sum())
        if cell.door == "strategy":
            return sum(leaf.numel() for leaf in tree_leaves(asyncckpt.load(path / "sharded")) if leaf.ndim)
        table = asyncckpt.HashTable("t", 2)
        asyncckpt.Loader(path, hashtables={"t": table}, shard_index=0, shard_num=1).load()
        return len(table)
    except IncompatibleError:
        return 0


DOORS: dict[str, Callable[[Cell, int, int, Path], None]] = {
    "table": save_table,
    "boxes": save_boxes,
    "checkpointer": save_steps,
    "embcache": save_collection,
    "strategy": save_strategy,
    "dcp": save_dcp,
}
