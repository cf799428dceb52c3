"""Checkpoints of several ranks, loaded by any number of ranks: every bit is there, each rank reads what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.adapters import FixedTable
from asyncckpt.commit.chain import newest_verified
from asyncckpt.commit.discover import KnownHeads
from asyncckpt.commit.root import CheckpointRoot
from tests.chains.model import new_table
from tests.end_to_end.merged_ranks import save_each
from tests.end_to_end.ranks_world import IDS, Target, insert, owned, row, saved_by
from tests.end_to_end.trees import differences
from tests.worlds.directories import flip_byte
from tests.worlds.objects import Stateful
from tests.worlds.rows import rows_of


@pytest.mark.parametrize("verify", [True, False, "before"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4), (4, 3), (3, 3), (2, 7), (7, 2)])
def test_any_number_of_ranks_into_any_other(tmp_path: Path, before: int, after: int, verify: Any) -> None:
    saved_by(tmp_path, before)
    for rank in range(after):
        target = Target(rank, after)
        report = target.load(tmp_path / "all", verify=verify)
        target.check()
        assert report.values == {"rank": rank if before == after else 0, "epoch": 3}
        assert report.metadata == {"loss": 0.5}
        assert (report.missing, report.unexpected) == ((), ())
        assert report.rows == {"user": len(target.table)}
    described = asyncckpt.describe(tmp_path / "all")
    assert described.ranks_count == before
    assert described.tables == {"user": len(IDS)}
    assert sum(rank.bytes for rank in described.ranks) == described.bytes


def test_a_rank_reads_only_what_it_needs(tmp_path: Path) -> None:
    """Blocks of other ranks are not read, and files that hold nothing for a rank need not even be there."""
    saved_by(tmp_path, 4)
    alone = Target(1, 4)
    report = alone.load(tmp_path / "all", filter_func=lambda info: {k: info[k] for k in ("user", "rows")}, strict=False)
    assert rows_of(alone.table) == owned({id: row(id) for id in IDS}, 1, 4)
    own = [block for block in asyncckpt.describe(tmp_path / "all").blocks if block.rank == 1]
    assert report.bytes_read == sum(block.bytes for block in own if block.name.startswith(("user@", "rows")))
    for rank in (0, 2, 3):
        for path in (tmp_path / "all" / "data").glob(f"*/r{rank:05d}-*"):
            path.unlink()
    again = Target(1, 4)
    again.load(tmp_path / "all", filter_func=lambda info: {k: info[k] for k in ("user", "rows")}, strict=False)
    assert torch.equal(again.pieces["rows"], alone.pieces["rows"])
    two = Target(1, 2)
    with pytest.raises(asyncckpt.CorruptError, match=r"r00003-000\.safetensors' of rank 3 of step 5 is missing"):
        two.load(tmp_path / "all", filter_func=lambda info: {"user": info["user"]}, strict=False)
    with pytest.raises(asyncckpt.CorruptError, match="is missing"):
        asyncckpt.verify(tmp_path / "all")


def test_what_a_rank_read_of_a_sound_step_is_proved(tmp_path: Path) -> None:
    saved_by(tmp_path, 3)
    with CheckpointRoot.for_reading(tmp_path / "all") as root:
        Target(2, 3).load(tmp_path / "all", verify=False)
        assert newest_verified(root, KnownHeads(root)) == set()
        Target(2, 3).load(tmp_path / "all")
        assert newest_verified(root, KnownHeads(root)) == {5}


def test_a_shard_that_nobody_has_saved(tmp_path: Path) -> None:
    """A target of ids that are not there is refused; not strict, it is emptied, and reads nothing."""
    table = new_table(shard=(0, 2))
    insert(table, owned({id: row(id) for id in IDS}, 0, 2))
    root = save_each(tmp_path, [{"x": 1}] * 2, tables=[{"user": table}, {}])
    target = Target(1, 4)
    with pytest.raises(asyncckpt.IncompatibleError, match=r"'user' takes ids of which the checkpoint has none"):
        asyncckpt.Loader(root, {"user": target.table}).load()
    report = asyncckpt.Loader(root, {"user": target.table}, strict=False).load()
    assert rows_of(target.table) == {}
    assert (report.rows, report.bytes_read) == ({"user": 0}, 0)
    half = Target(2, 4)
    asyncckpt.Loader(root, {"user": half.table}).load()
    assert rows_of(half.table) == owned({id: row(id) for id in IDS}, 2, 4)


@pytest.mark.parametrize("verify", [True, "before"])
@pytest.mark.parametrize("name", ["user@id", "user@sum", "boxes"])
def test_damage_is_named_with_rank_and_file(tmp_path: Path, name: str, verify: Any) -> None:
    written = saved_by(tmp_path, 2)
    block = next(b for b in asyncckpt.describe(tmp_path / "all").blocks if b.name == name and b.rank == 1)
    shard = written.folder / block.file
    flip_byte(shard, block.offset + block.bytes - 1)
    target = Target(1, 3)
    before = rows_of(target.table)
    with pytest.raises(asyncckpt.CorruptError, match=rf"step 5 is damaged: '{name}' in '.*r00001-000\.safetensors'"):
        target.load(tmp_path / "all", verify=verify)
    assert rows_of(target.table) == (before if name == "user@id" or verify == "before" else {})
    with pytest.raises(asyncckpt.CorruptError, match=f"is damaged: '{name}' in"):
        asyncckpt.verify(tmp_path / "all")


# --- tables that own ranges ---


def test_tables_by_ranges(tmp_path: Path) -> None:
    """Ranks that own ranges of rows, into other ranges: one of them has none."""
    values = torch.arange(30.0).reshape(10, 3)

    def table(low: int, high: int, storage: torch.Tensor) -> Any:
        return FixedTable("page", lambda: {"embedding": storage}, first_id=low, ids_end=10)

    bounds = [(0, 4), (4, 4), (4, 10)]
    tables = [{"page": table(low, high, values[low:high].clone())} for low, high in bounds]
    root = save_each(tmp_path, [{}] * 3, tables=tables)
    for low, high in ((0, 10), (3, 7), (0, 1), (9, 10)):
        storage = torch.zeros(high - low, 3)
        asyncckpt.Loader(root, {"page": table(low, high, storage)}).load()
        assert torch.equal(storage, values[low:high])


# --- states that differ from rank to rank ---


def test_ranks_with_different_states(tmp_path: Path) -> None:
    """Every rank gets back what was its own; another number of ranks sees all of it."""
    states = [
        {"layers": {"a": torch.ones(2)}, "data": {"at": 10, "who": [1, 2]}, "first": 1},
        {"layers": {"b": torch.zeros(3)}, "data": {"at": 20, "who": [3], "more": (4, None)}},
    ]
    root = save_each(tmp_path, states)

    def load(rank: int, count: int, **tensors: Any) -> asyncckpt.LoadReport:
        return asyncckpt.Loader(root, tensors=tensors, shard_index=rank, shard_num=count).load()

    assert load(0, 2).values == {"data.at": 10, "data.who.0": 1, "data.who.1": 2, "first": 1}
    assert load(1, 2).values == {"data.at": 20, "data.who.0": 3, "data.more.0": 4, "data.more.1": None}
    union = {"data.at": 10, "data.who.0": 1, "data.who.1": 2, "data.more.0": 4, "data.more.1": None, "first": 1}
    for rank, count in ((0, 1), (2, 3)):
        assert load(rank, count).values == union
    target = {"a": torch.zeros(2), "b": torch.ones(3)}
    load(0, 2, layers=target)
    assert (target["a"].tolist(), target["b"].tolist()) == ([1, 1], [0, 0, 0])


def test_one_name_of_different_tensors_on_different_ranks(tmp_path: Path) -> None:
    """A key may hold a dot, so names alone do not tell tensors apart."""
    zeros, ones, twos, tied = torch.zeros(3), torch.ones(3), torch.full((3,), 2.0), torch.full((4,), 3.0)
    states: list[dict[str, Any]] = [
        {"a": {"b": zeros}, "k": {"a.b": twos}, "c": tied, "d": {"e": tied}},
        {"a.b": ones, "k.a": {"b": twos + 1}, "c": tied, "d.e": ones},
    ]
    root = save_each(tmp_path, states, change=lambda rank, spec: None if (rank, spec.name) == (1, "c") else spec)
    for rank, state in enumerate(states):
        target: dict[str, Any] = {
            key: {k: torch.empty_like(v) for k, v in item.items()} if isinstance(item, dict) else torch.empty_like(item)
            for key, item in state.items()
        }
        asyncckpt.Loader(root, tensors=target, shard_index=rank, shard_num=2).load()
        assert list(differences(target, state)) == []
    assert list(differences(asyncckpt.load(root), states[0] | states[1])) == []
    assert asyncckpt.describe(root).tied == {"d.e": "c", "d.e#2": "a.b#2"}


def test_objects_get_the_state_of_their_own_rank(tmp_path: Path) -> None:
    """And nothing of the tensors of other ranks is read for it; of another number of ranks they get all."""
    states = [{"o": Stateful({"seen": rank, f"t{rank}": torch.full((4,), rank)})} for rank in range(2)]
    root = save_each(tmp_path, states)
    for rank in range(2):
        holder = Stateful({})
        report = asyncckpt.Loader(root, tensors={"o": holder}, shard_index=rank, shard_num=2).load()
        assert list(holder.state) == ["seen", f"t{rank}"]
        assert holder.state["seen"] == rank
        assert holder.state[f"t{rank}"].tolist() == [rank] * 4
        assert report.bytes_read == 32
    joined = Stateful({})
    asyncckpt.Loader(root, tensors={"o": joined}).load()
    assert list(joined.state) == ["seen", "t0", "t1"]
    assert joined.state["seen"] == 0


def test_parts_of_a_module_on_different_ranks(tmp_path: Path) -> None:
    """What only one rank had is not unexpected on another one; what all had, and the model has not, is."""
    whole_model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    halves = [{"m": torch.nn.ModuleDict({str(i): whole_model[i]})} for i in range(2)]
    root = save_each(tmp_path, halves)
    for number in range(2):
        for place in ({}, {"shard_index": number, "shard_num": 2}, {"shard_index": 0, "shard_num": 3}):
            fresh = torch.nn.ModuleDict({str(number): torch.nn.Linear(2, 2)})
            asyncckpt.Loader(root, tensors={"m": fresh}, **place).load()
            assert torch.equal(fresh[str(number)].weight, whole_model[number].weight)
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in the checkpoint .*'m\.1\.weight'"):
        asyncckpt.Loader(root, tensors={"m": torch.nn.ModuleDict()}, shard_index=1, shard_num=2).load()
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state .*'m\.2\.weight'"):
        asyncckpt.Loader(root, tensors={"m": torch.nn.ModuleDict({"2": torch.nn.Linear(2, 2)})}).load()
