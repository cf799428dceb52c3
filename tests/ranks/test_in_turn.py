"""Ranks of one process that save one after the other: each leaves its part, the last one commits, or nothing does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.checkpoints import remove
from asyncckpt.commit.attempt import claims
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.ranks import in_turn
from asyncckpt.errors import FilterError, UnsupportedError, UsageError
from asyncckpt.storage import owner_lock
from tests.ranks.forked import REPOSITORY
from tests.worlds.gates import WAIT_S_MAX, Gate

RANKS = 4
IN_TURN = asyncckpt.RankOptions(in_turn=True)
IDS = torch.arange(-100, 100)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    yield
    assert not in_turn._steps
    assert not claims.held
    assert not owner_lock._registry.held


def rows_of(ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return ids[:, None] * torch.tensor([1.0, 0.5]) * scale


def shard(rank: int, count: int = RANKS, *, scale: float = 1.0) -> asyncckpt.HashTable:
    table = asyncckpt.HashTable("user", 2, shard=(rank, count))
    mine = IDS[table.owns(IDS)]
    table.insert(mine, rows_of(mine, scale))
    return table


def saver_of(path: Path, rank: int, *, table: Any = None, weight: float = 1.0, **options: Any) -> asyncckpt.Saver:
    tables = {"user": shard(rank) if table is None else table}
    tensors = {"weight": torch.full((2000,), weight), "rank": rank}
    return asyncckpt.Saver(rank, RANKS, 8, path, tables, tensors, ranks=IN_TURN, **options)


def save(path: Path, rank: int, step: int | None = 1, **options: Any) -> asyncckpt.SaveResult:
    with saver_of(path, rank, **options) as saver:
        return saver.save(step)


def check_loads(path: Path, *, scale: float = 1.0, count: int = 1) -> None:
    """Into any number of ranks."""
    found = {}
    for rank in range(count):
        table, weight = asyncckpt.HashTable("user", 2, shard=(rank, count)), torch.zeros(2000)
        asyncckpt.Loader(path, {"user": table}, {"weight": weight}).load()
        assert bool(weight.eq(1).all())
        ids = table.ids()
        assert torch.equal(table.read(ids)["embedding"], rows_of(ids, scale))
        found.update(dict.fromkeys(ids.tolist(), rank))
    assert sorted(found) == IDS.tolist()


def files_of(path: Path) -> list[str]:
    return [str(file.relative_to(path)) for file in path.rglob("*.safetensors")]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_each_leaves_its_part_and_the_last_one_commits(tmp_path: Path, order: Sequence[int]) -> None:
    path, left = tmp_path / "run", set(range(RANKS))
    for rank in order:
        assert not (path / "manifests").exists() or asyncckpt.list_steps(path) == []
        result = save(path, rank)
        left.remove(rank)
        assert set(result.waits_for) == left
        assert result.rows_count == len(IDS) // RANKS
    assert asyncckpt.list_steps(path) == [1]
    assert asyncckpt.verify(path).strays == ()
    check_loads(path)
    check_loads(path, count=3)
    info = asyncckpt.describe(path)
    assert [block.rank for block in info.blocks if block.name == "weight"] == [order[0]]
    for rank in range(RANKS):
        report = asyncckpt.Loader(path, tensors={"rank": 0}, shard_index=rank, shard_num=RANKS).load()
        assert report.values == {"rank": rank}


def test_savers_that_stay_open_save_step_after_step(tmp_path: Path) -> None:
    tables = [shard(rank) for rank in range(RANKS)]
    savers = [saver_of(tmp_path, rank, table=tables[rank], keep=2) for rank in range(RANKS)]
    for step in range(4):
        for rank, table in enumerate(tables):
            table.insert(table.ids(), rows_of(table.ids(), step + 1.0))
            metadata = {"of": rank}
            result = savers[rank].save(None if step % 2 else step, metadata=metadata)
            assert (result.step, result.kind) == (step, "full")
        check_loads(tmp_path, scale=step + 1.0)
    for saver in savers:
        saver.close()
    assert asyncckpt.list_steps(tmp_path) == [2, 3]
    assert asyncckpt.describe(tmp_path).metadata == {"of": 0}


def test_saves_in_the_background_wait_in_line(tmp_path: Path) -> None:
    savers = [saver_of(tmp_path, rank) for rank in range(RANKS)]
    futures = [saver.save_async(step, on_busy="queue") for step in (1, 2) for saver in savers]
    assert [len(future.result(60).waits_for) for future in futures] == [3, 2, 1, 0] * 2
    for saver in savers:
        saver.close()
    assert asyncckpt.list_steps(tmp_path) == [1, 2]
    check_loads(tmp_path)


@pytest.mark.parametrize("step", [1, 2, None], ids=str)
def test_a_part_that_has_not_come_is_named(tmp_path: Path, step: int | None) -> None:
    """By who begins the next step, or its own part of this one again; after that all goes on."""
    for rank in (0, 2):
        save(tmp_path, rank)
    with saver_of(tmp_path, 0) as saver:
        with pytest.raises(
            asyncckpt.PeerError, match=r"step 1 of .* was not committed: 2 of 4 ranks .* 1, 3 "
        ) as caught:
            saver.save(step)
        assert caught.value.rank == 1
        assert asyncckpt.list_steps(tmp_path) == []
        assert files_of(tmp_path) == []
        assert saver.save(1).waits_for == (1, 2, 3)
    for rank in (1, 2, 3):
        save(tmp_path, rank)
    check_loads(tmp_path)


def test_who_removes_a_step_in_turn_hears_which_parts_are_missing(tmp_path: Path) -> None:
    for rank in range(RANKS):
        save(tmp_path, rank)
    for rank in (0, 2):
        save(tmp_path, rank, 2)
    with pytest.raises(asyncckpt.ConflictError, match=r"step 2 .* in use .*save the parts of ranks 1, 3 first"):
        remove(tmp_path, [2])
    for rank in (1, 3):
        save(tmp_path, rank, 2)
    assert remove(tmp_path, [2]) == [2]


def test_another_number_of_ranks_is_no_part(tmp_path: Path) -> None:
    save(tmp_path, 0)
    tensors = {"x": torch.ones(1)}
    with (
        asyncckpt.Saver(1, 2, path=tmp_path, tensors=tensors, ranks=IN_TURN) as saver,
        pytest.raises(asyncckpt.PeerError, match="3 of 4 ranks"),
    ):
        saver.save(1)


def failing(blocks: Any) -> Any:
    raise RuntimeError("the filter")


def test_a_part_that_fails_gives_the_step_up(tmp_path: Path) -> None:
    save(tmp_path, 0)
    with pytest.raises(FilterError, match="the filter"):
        save(tmp_path, 1, filter_func=failing)
    assert files_of(tmp_path) == []
    for rank in range(RANKS):
        result = save(tmp_path, rank)
    assert result.waits_for == ()
    check_loads(tmp_path)


def test_parts_behind_one_that_fails_hear_of_it(tmp_path: Path) -> None:
    savers = [saver_of(tmp_path, rank, **({"filter_func": failing} if rank == 1 else {})) for rank in range(3)]
    futures = [saver.save_async(1, on_busy="queue") for saver in savers]
    assert futures[0].result(60).waits_for == (1, 2, 3)
    with pytest.raises(FilterError):
        futures[1].result(60)
    with pytest.raises(asyncckpt.PeerError, match=r"given up before the part of rank 2.*the filter"):
        futures[2].result(60)
    for saver in savers:
        saver.close()
    assert files_of(tmp_path) == []


def test_a_save_that_runs_while_its_step_is_given_up_fails(tmp_path: Path) -> None:
    gate = Gate()
    with saver_of(tmp_path, 0, filter_func=gate, on_busy="queue") as saver:
        future = saver.save_async(1)
        with pytest.raises(asyncckpt.PeerError, match="step 1 was not committed"):
            saver.save_async(2)
        gate.open()
        with pytest.raises(asyncckpt.PeerError, match="step 1 was given up"):
            future.result(60)
    assert asyncckpt.list_steps(tmp_path) == []


def test_a_part_of_a_step_that_was_given_up_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = Gate(), in_turn.write_files

    def written(*args: Any) -> Any:
        files = write(*args)
        gate()
        return files

    monkeypatch.setattr(in_turn, "write_files", written)
    with saver_of(tmp_path, 0, on_busy="queue") as saver:
        future = saver.save_async(1)
        assert gate.reached.wait(WAIT_S_MAX)
        with pytest.raises(asyncckpt.PeerError, match="step 1 was not committed"):
            saver.save_async(2)
        gate.open()
        with pytest.raises(asyncckpt.PeerError, match="step 1 was given up before the part of rank 0"):
            future.result(WAIT_S_MAX)
    assert files_of(tmp_path) == []


def test_a_call_that_is_refused_may_be_made_again(tmp_path: Path) -> None:
    bad: Any = {"no plain value": object()}
    with saver_of(tmp_path, 0) as saver:
        with pytest.raises(asyncckpt.UsageError):
            saver.save(1, kind="delta")
        asyncckpt.save(tmp_path, {"x": torch.ones(1)}, 1)  # The step is free.
        saver.save(2)
    with saver_of(tmp_path, 1) as saver:
        with pytest.raises(asyncckpt.UsageError):
            saver.save(2, metadata=bad)
        with pytest.raises(asyncckpt.UsageError):
            saver.save(2, kind="delta")
        assert saver.save(2).waits_for == (2, 3)
    for rank in (2, 3):
        save(tmp_path, rank, 2)
    check_loads(tmp_path)


def test_parts_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 0)
    with pytest.raises(asyncckpt.ConflictError, match=r"weight.*ranks 0 and 1"):
        save(tmp_path, 1, weight=2.0)
    for rank, rows in enumerate((10, 15)):
        table = asyncckpt.HashTable("user", 2, replicated=True)
        table.insert(torch.arange(rows), torch.ones(rows, 2))
        if rank:
            with pytest.raises(asyncckpt.ConflictError, match="table 'user' has different rows on ranks 0 and 1"):
                save(tmp_path, rank, table=table)
        else:
            save(tmp_path, rank, table=table)
    save(tmp_path, 0)
    table = asyncckpt.HashTable("user", 2, shard=(0, 20_000, 65_536))
    with pytest.raises(asyncckpt.ConflictError, match="'user'"):
        save(tmp_path, 1, table=table)
    assert asyncckpt.list_steps(tmp_path) == []


def test_other_steps_may_be_saved_between_the_parts(tmp_path: Path) -> None:
    """What sweeps leaves the parts alone, and nobody else gets the step."""
    other = {"x": torch.ones(1)}
    for rank in range(RANKS):
        assert len(save(tmp_path, rank, 9).waits_for) == 3 - rank
        with pytest.raises(asyncckpt.ConflictError, match="step 9 already exists"):
            asyncckpt.save(tmp_path, other, 9)
        asyncckpt.save(tmp_path, other, rank)
    assert asyncckpt.list_steps(tmp_path) == [0, 1, 2, 3, 9]
    check_loads(tmp_path)


def test_a_commit_in_doubt_is_in_doubt_for_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(RANKS - 1):
        save(tmp_path, rank)

    def fail(*_: Any) -> None:
        raise OSError(5, "what is there cannot be looked at")

    with saver_of(tmp_path, RANKS - 1) as saver:
        monkeypatch.setattr(Transaction, "_check_after", fail)
        for step in (1, 2):
            with pytest.raises(asyncckpt.IndeterminateError, match="step 1 may be visible"):
                saver.save(step)
    check_loads(tmp_path)


PROGRAM = """
import sys
from pathlib import Path
from tests.ranks.test_in_turn import save
for rank in (0, 2):
    save(Path(sys.argv[1]), rank)
"""


def test_the_end_of_the_program_names_what_has_not_come(tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    ended = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    what = f"step 1 of '{tmp_path / 'run'}' was not committed: 2 of 4 ranks have not saved their parts: 1, 3 (save all"
    assert what in ended.stderr
    assert asyncckpt.list_steps(tmp_path / "run") == files_of(tmp_path / "run") == []


FORKING = (
    PROGRAM
    + """
import os
if not (child := os.fork()):
    sys.exit()
os.waitpid(child, 0)
for rank in (1, 3):
    save(Path(sys.argv[1]), rank)
"""
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_end_of_a_forked_child_is_not_that_of_a_step(tmp_path: Path) -> None:
    program = [sys.executable, "-c", FORKING, str(tmp_path / "run")]
    ended = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    assert "was not committed" not in ended.stderr
    assert asyncckpt.list_steps(tmp_path / "run") == [1]


def test_what_saves_by_itself_refuses_ranks_in_turn(tmp_path: Path) -> None:
    with saver_of(tmp_path, 0) as saver, pytest.raises(asyncckpt.UsageError, match="in turn"):
        asyncckpt.PeriodicSaver(saver, every_steps=1)
    for more in ({}, {"shard_index": 0, "shard_num": 2}):
        with pytest.raises(asyncckpt.UsageError, match="in turn"):
            asyncckpt.Checkpointer(tmp_path, every=1, options={"ranks": IN_TURN, **more}, x=torch.nn.Linear(1, 1))
    with pytest.raises(asyncckpt.UsageError, match="in turn"):
        asyncckpt.RankOptions(process_group=object(), in_turn=True)
    with pytest.raises(asyncckpt.UsageError, match="in_turn must be"):
        asyncckpt.RankOptions(in_turn=1)  # type: ignore[arg-type]


def test_one_rank_in_turn_is_a_saver_like_any_other(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(1)}, ranks=IN_TURN) as saver:
        assert saver.save(1).waits_for == ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [lambda: torch.nested.nested_tensor([torch.ones(2, 3)] * 2).transpose(1, 2), torch.nn.UninitializedParameter],
)
def test_a_tensor_without_sizes_is_refused_and_named(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    refused = pytest.raises((UnsupportedError, UsageError), match="'lost'")
    with refused, asyncckpt.Saver(0, 2, path=tmp_path, tensors={"lost": make()}, ranks=IN_TURN) as saver:
        saver.save(1)
