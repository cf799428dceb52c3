"""Checkpoints of several ranks, loaded by any number of ranks: every bit is there, each rank reads what it needs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.adapters import FixedTable
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.verify import newest_verified
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.sharded import Piece, Sharded
from tests.bad_input.crafted import Crafted
from tests.chains.model import DIM, Rows, new_table, rows_of
from tests.chains.written import Written
from tests.main_job.merged_ranks import Boxes, as_boxes, merge

SPREAD = {"rows": (11, 3), "boxes": (7, 6), "deep": (3, 4, 5), "thin": (2, 9)}
DTYPES = {"rows": torch.float32, "boxes": torch.bfloat16, "deep": torch.complex64, "thin": torch.bool}
IDS = [*range(-40, 60), -(2**63), 2**63 - 1, 2**40]
REPLICAS = {"replica": 0, "scalar": 1, "model.weight": 1, "model.bias": 0}
ALWAYS = asyncckpt.DeltaPolicy(deltas_max=1000, bytes_share_max=1e9)


def whole(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    values = torch.randn(SPREAD[name], generator=generator)
    return values > 0 if DTYPES[name] is torch.bool else values.to(DTYPES[name])


def box_of(name: str, rank: int, ranks_count: int) -> tuple[tuple[int, int], ...]:
    """What a rank has of a tensor: rows, columns, or both; some ranks have nothing."""
    first, second, *others = SPREAD[name]
    if name == "rows":
        return (chunk(first, rank, ranks_count), (0, second))
    if name == "boxes" and ranks_count % 2 == 0:
        return (chunk(first, rank // 2, ranks_count // 2), chunk(second, rank % 2, 2))
    return ((0, first), chunk(second, rank, ranks_count), *((0, size) for size in others))


def chunk(size: int, index: int, count: int) -> tuple[int, int]:
    """As torch.chunk cuts: equal sizes rounded up, so that the last ones may be empty."""
    step = -(-size // count)
    return min(size, step * index), min(size, step * (index + 1))


def taken(tensor: torch.Tensor, box: Sequence[tuple[int, int]]) -> torch.Tensor:
    return tensor[tuple(slice(low, high) for low, high in box)]


def row(id: int, version: int = 0) -> tuple[float, ...]:
    return tuple(float((id * 7 + version * 13 + column) % 1009) for column in range(DIM + 1))


def insert(table: asyncckpt.HashTable, rows: Rows) -> None:
    if rows:
        values = torch.tensor(list(rows.values()))
        table.insert(torch.tensor(list(rows)), values[:, :DIM], sum=values[:, DIM])


def owned(rows: Rows, rank: int, ranks_count: int) -> Rows:
    return {id: values for id, values in rows.items() if id % 2**64 % ranks_count == rank}


def state_of(rank: int, ranks_count: int) -> dict[str, Any]:
    """What a rank gives to its Saver; spread tensors are its boxes."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        **{name: taken(whole(name), box_of(name, rank, ranks_count)).clone() for name in SPREAD},
        "replica": torch.arange(10.0),
        "scalar": torch.tensor(2.5),
        "model": model,
        "optim": optimizer,
        "rank": rank,
        "epoch": 3,
    }


def boxes_of(ranks_count: int) -> Boxes:
    found = {}
    for rank in range(ranks_count):
        for name, shape in SPREAD.items():
            found[rank, name] = (tuple(low for low, _ in box_of(name, rank, ranks_count)), shape)
    return found


def writes(ranks_count: int) -> Callable[[int, BlockSpec], BlockSpec | None]:
    """Spread tensors as boxes, empty ones left out; every replica by one rank."""
    boxes = as_boxes(boxes_of(ranks_count))

    def change(rank: int, spec: BlockSpec) -> BlockSpec | None:
        is_spread = spec.name in SPREAD
        if spec.table is None and not is_spread and rank != REPLICAS.get(spec.name, 0) % ranks_count:
            return None
        if is_spread and not math.prod(spec.shape):
            return None
        return boxes(rank, spec)

    return change


def saved_by(path: Path, ranks_count: int, *, step: int = 5) -> Written:
    """A checkpoint of this many ranks, in path / "all"."""
    for rank in range(ranks_count):
        table = new_table(shard=(rank, ranks_count))
        insert(table, owned({id: row(id) for id in IDS}, rank, ranks_count))
        state = state_of(rank, ranks_count)
        with asyncckpt.Saver(
            path=path / f"{rank}", hashtables={"user": table}, tensors=state, durability="none"
        ) as saver:
            saver.save(step, metadata={"loss": 0.5})
    (path / "all").mkdir()
    return merge(path / "all", step, [path / f"{rank}" for rank in range(ranks_count)], change=writes(ranks_count))


class Target:
    """What one rank of a job loads into."""

    def __init__(self, rank: int, ranks_count: int) -> None:
        self.rank, self.ranks_count = rank, ranks_count
        self.table = new_table(shard=(rank, ranks_count))
        insert(self.table, owned({id: row(id, 9) for id in (1, 2, 3, 100, 101)}, rank, ranks_count))
        self.boxes = {name: box_of(name, rank, ranks_count) for name in SPREAD}
        self.pieces = {name: torch.ones_like(taken(whole(name), box)) for name, box in self.boxes.items()}
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.5)
        self.plain = {"replica": torch.zeros(10), "scalar": torch.tensor(0.0)}

    @property
    def state(self) -> dict[str, Any]:
        spread = {
            name: Sharded(SPREAD[name], DTYPES[name], (Piece(piece, tuple(low for low, _ in self.boxes[name])),))
            for name, piece in self.pieces.items()
        }
        own = {"model": self.model, "optim": self.optimizer, "rank": -1, "epoch": -1}
        return {**spread, **self.plain, **own}

    def load(self, path: Path, **options: Any) -> asyncckpt.LoadReport:
        place = {"shard_index": self.rank, "shard_num": self.ranks_count}
        return asyncckpt.Loader(path, {"user": self.table}, self.state, **place, **options).load()

    def check(self, expected: Rows | None = None) -> None:
        rows = {id: row(id) for id in IDS} if expected is None else expected
        assert rows_of(self.table) == owned(rows, self.rank, self.ranks_count)
        for name, piece in self.pieces.items():
            assert torch.equal(piece, taken(whole(name), self.boxes[name])), name
        saved = state_of(0, 1)
        assert torch.equal(self.plain["replica"], saved["replica"])
        assert self.plain["scalar"] == 2.5
        assert torch.equal(self.model.weight, saved["model"].weight)
        for mine, theirs in zip(self.model.parameters(), saved["model"].parameters(), strict=True):
            for key, value in saved["optim"].state[theirs].items():
                assert torch.equal(self.optimizer.state[mine][key], value), key


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
        assert newest_verified(root) == set()
        Target(2, 3).load(tmp_path / "all")
        assert newest_verified(root) == {5}


@pytest.mark.parametrize("name", ["user@id", "user@sum", "boxes"])
def test_damage_is_named_with_rank_and_file(tmp_path: Path, name: str) -> None:
    written = saved_by(tmp_path, 2)
    block = next(b for b in asyncckpt.describe(tmp_path / "all").blocks if b.name == name and b.rank == 1)
    shard = written.folder / block.file
    raw = bytearray(shard.read_bytes())
    raw[block.offset + block.bytes - 1] ^= 1
    shard.write_bytes(raw)
    target = Target(1, 3)
    before = rows_of(target.table)
    with pytest.raises(asyncckpt.CorruptError, match=rf"r00001-000\.safetensors' .* corrupt: block '{name}'"):
        target.load(tmp_path / "all")
    assert rows_of(target.table) == (before if name == "user@id" else {})
    with pytest.raises(asyncckpt.CorruptError, match=f"block '{name}'"):
        asyncckpt.verify(tmp_path / "all")


# --- deltas, compaction, followers ---


class TrainedRanks:
    """Ranks that save deltas, each for itself, and the checkpoints that they would have made together."""

    def __init__(self, path: Path, ranks_count: int, *, seed: int = 0) -> None:
        self.path, self.ranks_count = path, ranks_count
        self.random = random.Random(seed)
        self.rows: Rows = {}
        self.written: Written | None = None
        self.tables = [new_table(shard=(rank, ranks_count)) for rank in range(ranks_count)]
        self.states = [state_of(rank, ranks_count) for rank in range(ranks_count)]
        self.savers = [
            asyncckpt.Saver(
                path=path / f"{rank}",
                hashtables={"user": table},
                tensors=state,
                deltas=ALWAYS,
                durability="none",
            )
            for rank, (table, state) in enumerate(zip(self.tables, self.states, strict=True))
        ]
        self.root.mkdir()

    @property
    def root(self) -> Path:
        return self.path / "all"

    def save(self, step: int) -> None:
        gone = [id for id in IDS if id in self.rows and self.random.random() < 0.1]
        new = {id: row(id, step) for id in IDS if self.random.random() < (0.2 if self.rows else 0.7)}
        self.rows = {id: values for id, values in self.rows.items() if id not in gone} | new
        for rank, table in enumerate(self.tables):
            table.remove(torch.tensor(gone, dtype=torch.int64))
            insert(table, owned(new, rank, self.ranks_count))
        for saver in self.savers:
            saver.save(step, metadata={"loss": 0.5})
        sources = [self.path / f"{rank}" for rank in range(self.ranks_count)]
        change = writes(self.ranks_count)
        kind = asyncckpt.describe(sources[0], step).kind
        parent = self.written if kind == "delta" else None
        self.written = merge(self.root, step, sources, change=change, parent=parent)

    def __enter__(self) -> TrainedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for saver in self.savers:
            saver.close()


@pytest.mark.parametrize("ranks_count", [2, 3])
def test_deltas_and_compaction_of_several_ranks(tmp_path: Path, ranks_count: int) -> None:
    with TrainedRanks(tmp_path, ranks_count) as ranks:
        for step in (1, 2, 3, 4):
            ranks.save(step)
            for after in (1, ranks_count, 4):
                for rank in range(after):
                    target = Target(rank, after)
                    target.load(ranks.root)
                    target.check(ranks.rows)
        assert asyncckpt.describe(ranks.root).kind == "delta"
        result = asyncckpt.compact(ranks.root)
        assert not result.skipped
        asyncckpt.verify(ranks.root)
        compacted = asyncckpt.describe(ranks.root)
        assert (compacted.kind, compacted.compacted, compacted.ranks_count) == ("full", True, ranks_count)
        assert compacted.tables == {"user": len(ranks.rows)}
        for rank in compacted.ranks:
            assert rank.tables == {"user": len(owned(ranks.rows, rank.rank, ranks_count))}
            assert all(f"/r{rank.rank:05d}-" in file for file in rank.files)
        for after in (ranks_count, 5):
            for rank in range(after):
                target = Target(rank, after)
                report = target.load(ranks.root)
                target.check(ranks.rows)
                assert report.values["rank"] == (rank if after == ranks_count else 0)
        ranks.save(5)
        target = Target(0, 1)
        target.load(ranks.root)  # On top of the compacted one.
        target.check(ranks.rows)
        assert asyncckpt.verify(ranks.root).steps == (5, 4)


async def test_a_follower_of_several_ranks(tmp_path: Path) -> None:
    with TrainedRanks(tmp_path, 3, seed=5) as ranks:
        for step in (1, 2, 3):
            ranks.save(step)
        target = Target(0, 1)
        rows: Rows = {}
        kinds = []
        async for update in asyncckpt.follow(ranks.root, until=3, poll_seconds=0.01):
            kinds.append((update.kind, update.tables["user"].whole))
            changed, removed = await update.rows("user"), await update.removed("user")
            rows = (
                {}
                if update.tables["user"].whole
                else {id: r for id, r in rows.items() if id not in set(removed.tolist())}
            )
            values = torch.cat([changed["embedding"], changed["sum"][:, None]], dim=1).tolist()
            rows |= {id: tuple(value) for id, value in zip(changed["id"].tolist(), values, strict=True)}
            report = await update.load({"user": target.table}, target.state)
            assert rows_of(target.table) == rows
            assert report.values == {"rank": 0, "epoch": 3}
        assert kinds == [("full", True), ("delta", False), ("delta", False)]
        target.check(ranks.rows)


# --- tables that own ranges ---


def test_tables_by_ranges(tmp_path: Path) -> None:
    """Ranks that own ranges of rows, into other ranges: one of them has none."""
    values = torch.arange(30.0).reshape(10, 3)

    def table(low: int, high: int, storage: torch.Tensor) -> Any:
        return FixedTable("page", lambda: {"embedding": storage}, first_id=low, ids_end=10)

    bounds = [(0, 4), (4, 4), (4, 10)]
    for rank, (low, high) in enumerate(bounds):
        tables = {"page": table(low, high, values[low:high].clone())}
        with asyncckpt.Saver(path=tmp_path / f"{rank}", hashtables=tables, durability="none") as saver:
            saver.save(1)
    (tmp_path / "all").mkdir()
    merge(tmp_path / "all", 1, [tmp_path / f"{rank}" for rank in range(3)])
    for low, high in ((0, 10), (3, 7), (0, 1), (9, 10)):
        storage = torch.zeros(high - low, 3)
        asyncckpt.Loader(tmp_path / "all", {"page": table(low, high, storage)}).load()
        assert torch.equal(storage, values[low:high])


# --- states that differ from rank to rank ---


def _save_each(path: Path, states: Sequence[Any], change: Any = None) -> Path:
    for rank, state in enumerate(states):
        with asyncckpt.Saver(path=path / f"{rank}", tensors=state, durability="none") as saver:
            saver.save(1)
    (path / "all").mkdir()
    options = {} if change is None else {"change": change}
    merge(path / "all", 1, [path / f"{rank}" for rank in range(len(states))], **options)
    return path / "all"


def test_ranks_with_different_states(tmp_path: Path) -> None:
    """Every rank gets back what was its own; another number of ranks sees all of it."""
    states = [
        {"layers": {"a": torch.ones(2)}, "data": {"at": 10, "who": [1, 2]}, "first": 1},
        {"layers": {"b": torch.zeros(3)}, "data": {"at": 20, "who": [3], "more": (4, None)}},
    ]
    root = _save_each(tmp_path, states)

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


class Holder:
    """An object with a state dict."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_objects_get_the_state_of_their_own_rank(tmp_path: Path) -> None:
    """And nothing of the tensors of other ranks is read for it; of another number of ranks they get all."""
    states = [{"o": Holder(seen=rank, **{f"t{rank}": torch.full((4,), rank)})} for rank in range(2)]
    root = _save_each(tmp_path, states)
    for rank in range(2):
        holder = Holder()
        report = asyncckpt.Loader(root, tensors={"o": holder}, shard_index=rank, shard_num=2).load()
        assert list(holder.state) == ["seen", f"t{rank}"]
        assert holder.state["seen"] == rank
        assert holder.state[f"t{rank}"].tolist() == [rank] * 4
        assert report.bytes_read == 32
    joined = Holder()
    asyncckpt.Loader(root, tensors={"o": joined}).load()
    assert list(joined.state) == ["seen", "t0", "t1"]
    assert joined.state["seen"] == 0


def test_parts_of_a_module_on_different_ranks(tmp_path: Path) -> None:
    """What only one rank had is not unexpected on another one; what all had, and the model has not, is."""
    whole_model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    halves = [{"m": torch.nn.ModuleDict({str(i): whole_model[i]})} for i in range(2)]
    root = _save_each(tmp_path, halves)
    for number in range(2):
        for place in ({}, {"shard_index": number, "shard_num": 2}, {"shard_index": 0, "shard_num": 3}):
            fresh = torch.nn.ModuleDict({str(number): torch.nn.Linear(2, 2)})
            asyncckpt.Loader(root, tensors={"m": fresh}, **place).load()
            assert torch.equal(fresh[str(number)].weight, whole_model[number].weight)
    with pytest.raises(asyncckpt.IncompatibleError, match=r"'m\.1\.weight' is unexpected"):
        asyncckpt.Loader(root, tensors={"m": torch.nn.ModuleDict()}, shard_index=1, shard_num=2).load()
    with pytest.raises(asyncckpt.IncompatibleError, match=r"'m\.2\.weight' is missing"):
        asyncckpt.Loader(root, tensors={"m": torch.nn.ModuleDict({"2": torch.nn.Linear(2, 2)})}).load()


# --- DTensors: modules and optimizers ---


@contextmanager
def one_rank_of(rank: int, ranks_count: int) -> Iterator[Any]:
    """This process as one rank of many that are not there, and their mesh.

    torch remembers meshes: in one process, always the same rank of a number of ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks_count, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks_count,))
    finally:
        dist.destroy_process_group()


def spread_module(mesh: Any) -> torch.nn.Module:
    from torch.distributed.tensor import Shard, distribute_tensor

    module = torch.nn.Linear(6, 5)
    for name, parameter in list(module.named_parameters()):
        leaf = distribute_tensor(torch.zeros_like(parameter), mesh, [Shard(0)], src_data_rank=None)
        setattr(module, name, torch.nn.Parameter(leaf))
    return module


@pytest.mark.parametrize("saved_ranks", [1, 2])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(("rank", "ranks_count"), [(0, 8), (2, 5), (5, 7)])
def test_optimizers_over_sharded_parameters(
    tmp_path: Path, saved_ranks: int, fresh: bool, rank: int, ranks_count: int
) -> None:
    """Moments come back as DTensors of their parameters, in a fresh optimizer too; steps come whole."""
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    names = ["model.weight", "model.bias"]
    names += [f"optim.state.{number}.{moment}" for number in (0, 1) for moment in ("exp_avg", "exp_avg_sq")]
    states, boxes = [], {}
    for saver in range(saved_ranks):
        low, high = chunk(5, saver, saved_ranks)
        part = torch.nn.Linear(6, high - low)
        part_optimizer = torch.optim.AdamW(part.parameters())
        for own, all_of in zip(part.parameters(), model.parameters(), strict=True):
            own.data.copy_(all_of.data[low:high])
            state = optimizer.state[all_of]
            part_optimizer.state[own] = {
                key: value.clone() if key == "step" else value[low:high].clone() for key, value in state.items()
            }
        states.append({"model": part, "optim": part_optimizer})
        for name in names:
            shape = (5,) if name.endswith("bias") or ".1." in name else (5, 6)
            boxes[saver, name] = ((low,) + (0,) * (len(shape) - 1), shape)
    only = {f"optim.state.{number}.step": 0 for number in (0, 1)}
    root = _save_each(tmp_path, states, as_boxes(boxes, only=only))
    with one_rank_of(rank, ranks_count) as mesh:
        target = spread_module(mesh)
        restored = torch.optim.AdamW(target.parameters(), lr=0.5)
        if not fresh:
            for parameter in target.parameters():
                parameter.grad = torch.zeros_like(parameter)
            restored.step()
        asyncckpt.Loader(root, tensors={"model": target, "optim": restored}).load()
        assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        low, high = chunk(5, rank, ranks_count)
        for mine, theirs in zip(target.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.data[low:high])
            for key in ("exp_avg", "exp_avg_sq"):
                moment = restored.state[mine][key]
                assert moment.placements == mine.placements
                assert torch.equal(moment.to_local(), optimizer.state[theirs][key][low:high])
            step = restored.state[mine]["step"]
            assert type(step) is torch.Tensor
            assert torch.equal(step, optimizer.state[theirs]["step"])


def test_optimizer_without_sharded_parameters_gets_whole_tensors(tmp_path: Path) -> None:
    states = [{"o": Holder(t=torch.arange(6.0)[rank * 3 : rank * 3 + 3])} for rank in range(2)]
    root = _save_each(tmp_path, states, as_boxes({(rank, "o.t"): ((rank * 3,), (6,)) for rank in range(2)}))
    fresh, spread = Holder(), Holder(t=Sharded((6,), torch.float32, (Piece(torch.zeros(2), (3,)),)))
    asyncckpt.Loader(root, tensors={"o": fresh}).load()
    assert fresh.state["t"].tolist() == list(range(6))
    piece = spread.state["t"].pieces[0].tensor
    asyncckpt.Loader(root, tensors={"o": spread}).load()
    assert piece.tolist() == [3, 4]
    assert isinstance(spread.state["t"], Sharded)


def test_the_rank_of_a_reader(tmp_path: Path) -> None:
    root = _save_each(tmp_path, [{"rank": rank} for rank in range(3)])
    for rank in range(3):
        with one_rank_of(rank, 3):
            assert asyncckpt.Loader(root).load().values == {"rank": rank}
            assert asyncckpt.Loader(root, shard_index=1, shard_num=3).load().values == {"rank": 1}
            with pytest.raises(asyncckpt.UsageError, match="not those of the process group"):
                asyncckpt.Loader(root, shard_index=rank, shard_num=4, process_group=dist.group.WORLD)
    assert asyncckpt.Loader(root).load().values == {"rank": 0}
    for wrong in ({"shard_index": 1}, {"shard_num": 2}, {"shard_index": 2, "shard_num": 2}, {"process_group": "x"}):
        with pytest.raises(asyncckpt.UsageError):
            asyncckpt.Loader(root, **wrong)


# --- bad input: nothing of a target changes ---


def untouched_by(root: Path, match: str, error: type[Exception] = asyncckpt.CorruptError) -> None:
    target = Target(0, 2)
    before = rows_of(target.table)
    with pytest.raises(error, match=match):
        target.load(root)
    assert rows_of(target.table) == before
    assert all(bool((piece == 1).all()) for piece in target.pieces.values())
    assert torch.equal(target.plain["replica"], torch.zeros(10))


def _drop_rank(document: dict[str, Any]) -> None:
    document["others"].pop()


def _repeat_rank(document: dict[str, Any]) -> None:
    document["others"][1] = document["others"][0]


def _other_count(document: dict[str, Any]) -> None:
    document["ranks_count"] = 4


def _rank_without_files(document: dict[str, Any]) -> None:
    document["others"][1].update(files=[], blocks=[], tables=[])


def _block_of_rank_1(document: dict[str, Any], name: str) -> dict[str, Any]:
    found = next(block for block in document["others"][0]["blocks"] if block["name"] == name)
    assert isinstance(found, dict)
    return found


def _hole(document: dict[str, Any]) -> None:
    _block_of_rank_1(document, "rows")["row_begin"] = 5


def _covered_twice(document: dict[str, Any]) -> None:
    _block_of_rank_1(document, "boxes")["column_begins"] = [1]


def _outside(document: dict[str, Any]) -> None:
    _block_of_rank_1(document, "boxes")["column_begins"] = [5]


def _other_shape(document: dict[str, Any]) -> None:
    _block_of_rank_1(document, "rows")["whole_shape"] = [12, 3]


def _other_dtype(document: dict[str, Any]) -> None:
    _block_of_rank_1(document, "rows")["dtype"] = "int32"


def _values_missing(document: dict[str, Any]) -> None:
    document["others"][0]["values"].pop()


def _leaf_missing(document: dict[str, Any]) -> None:
    document["others"][1]["tree"] = {"d": []}


def _same_shard_twice(document: dict[str, Any]) -> None:
    document["others"][1]["tables"][0]["shard"] = [1, 3]


def _other_columns(document: dict[str, Any]) -> None:
    found = _block_of_rank_1(document, "user@sum")
    found.update(name="user@age", column="age", key=found["key"])


def _bad_value(document: dict[str, Any]) -> None:
    document["others"][0]["values"][0] = {"int": "zz"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_drop_rank, "has not the parts of all ranks"),
        (_repeat_rank, "lists a file of another rank"),
        (_other_count, "has not the parts of all ranks"),
        (_rank_without_files, "has no file of rank 2"),
        (_hole, "elements of tensor 'rows' are missing or covered twice"),
        (_covered_twice, "elements of tensor 'boxes' are missing or covered twice"),
        (_outside, "parts of tensor 'boxes' have another shape"),
        (_other_shape, "tensor 'rows' is there twice, or its parts disagree"),
        (_other_dtype, "'rows'"),
        (_values_missing, "the tree and its values disagree"),
        (_leaf_missing, "the tree and its values disagree"),
        (_same_shard_twice, "ranks 1 and 2 hold the same shard of table 'user'"),
        (_other_columns, "table 'user' has other columns in rank 1"),
    ],
    ids=lambda value: value.__name__[1:] if callable(value) else None,
)
def test_ranks_that_do_not_fit_together(tmp_path: Path, change: Any, match: str) -> None:
    saved_by(tmp_path, 3)
    Crafted(tmp_path / "all", 5).edit(change)
    untouched_by(tmp_path / "all", match)


def test_a_damaged_value_of_another_rank_is_none_of_ours(tmp_path: Path) -> None:
    """The rank that it belongs to gets an error that names it."""
    saved_by(tmp_path, 3)
    Crafted(tmp_path / "all", 5).edit(_bad_value)
    with pytest.raises(asyncckpt.CorruptError, match=r"of rank 1 of step 5"):
        Target(1, 3).load(tmp_path / "all")
    Target(0, 3).load(tmp_path / "all")


def test_an_id_of_two_ranks(tmp_path: Path) -> None:
    """Found when the table gets it: the table is empty then."""
    for rank in range(2):
        table = new_table()
        insert(table, {id: row(id) for id in (1, 2, 10 + rank)})
        with asyncckpt.Saver(path=tmp_path / f"{rank}", hashtables={"user": table}, durability="none") as saver:
            saver.save(1)
    (tmp_path / "all").mkdir()
    merge(tmp_path / "all", 1, [tmp_path / "0", tmp_path / "1"])
    target = new_table()
    insert(target, {5: row(5)})
    with pytest.raises(asyncckpt.CorruptError, match="table 'user', loaded into 'user', holds the same id twice"):
        asyncckpt.Loader(tmp_path / "all", {"user": target}).load()
    assert rows_of(target) == {}


def test_a_chain_of_different_numbers_of_ranks(tmp_path: Path) -> None:
    with TrainedRanks(tmp_path, 2) as ranks:
        ranks.save(1)
        parent = ranks.written
        for saver in ranks.savers:
            saver.save(2)
        merge(
            ranks.root,
            2,
            [tmp_path / "0"],
            change=lambda rank, spec: None if spec.table is None else spec,
            parent=parent,
        )
        untouched_by(ranks.root, "step 1, upon which it builds, was saved by another number of ranks")


def test_a_delta_over_another_shard(tmp_path: Path) -> None:
    with TrainedRanks(tmp_path, 2) as ranks:
        ranks.save(1)
        ranks.save(2)

        def change(document: dict[str, Any]) -> None:
            document["tables"][0]["shard"] = [0, 4]

        Crafted(ranks.root, 2).edit(change)
        untouched_by(ranks.root, "table 'user' of rank 0 of step 2 holds another shard than in step 1")
