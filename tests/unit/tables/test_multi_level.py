"""MultiLevelTable against a dict, and against HashTable under the same training."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.errors import UsageError
from asyncckpt.model.table import DeferredCut, Table
from asyncckpt.tables import (
    HashEmbedding,
    HashEmbeddingBag,
    HashTable,
    MultiLevelTable,
    SparseAdagrad,
    SparseSGD,
    Uniform,
)
from tests.unit.tables.multi_level_world import CACHE_ROWS, DIM, OPS, POLICIES, LevelsBesideDict, first_row, new_table
from tests.worlds.rows import batch

pytestmark = pytest.mark.filterwarnings("ignore:cache of table:RuntimeWarning")


@settings(max_examples=150, deadline=None)
@given(cache_rows=CACHE_ROWS, policy=POLICIES, ops=st.lists(OPS, max_size=25))
def test_any_use_equals_the_dict(cache_rows: int, policy: str, ops: list[Any]) -> None:
    world = LevelsBesideDict(cache_rows=cache_rows, policy=policy)
    for op in ops:
        world.apply(op)
        world.check()


def batches_of_ids(count: int, *, seed: int) -> list[torch.Tensor]:
    random = np.random.default_rng(seed)
    return [torch.from_numpy(random.zipf(1.3, size=(6, 5)) % 200) for _ in range(count)]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("cache_rows", [1, 20, 300])
@pytest.mark.parametrize("make", [SparseSGD, SparseAdagrad])
def test_training_equals_that_of_a_hash_table(policy: Any, cache_rows: int, make: Any) -> None:
    kinds: dict[str, Any] = {
        "optimizer_slots": {"sum": torch.float32},
        "metadata": {"last_seen": torch.int64, "count": torch.int64},
        "initializer": Uniform(0.5, seed=2),
    }
    tables = [HashTable("t", DIM, **kinds), MultiLevelTable("t", DIM, cache_rows=cache_rows, policy=policy, **kinds)]
    losses: list[list[float]] = []
    for table in tables:
        modules = [HashEmbedding(table), HashEmbeddingBag(table, mode="sum")]
        optimizer = make(modules, lr=0.1)
        losses.append([])
        for step, ids in enumerate(batches_of_ids(30, seed=5)):
            for module in modules:
                module.step = step
            loss = (modules[0](ids) - 1.0).square().sum() + modules[1](ids.flip(0)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    plain, levels = tables
    assert isinstance(plain, HashTable)
    assert isinstance(levels, MultiLevelTable)
    assert losses[0] == losses[1]
    ids = plain.ids()
    assert sorted(levels.ids().tolist()) == sorted(ids.tolist())
    rows, newest = plain.lookup(ids, insert=False), levels.read(ids)
    assert torch.equal(newest["embedding"], plain.embedding[rows])
    assert all(torch.equal(newest[name], plain.slot(name)[rows]) for name in ("sum", "last_seen", "count"))
    # Two modules read every batch once each.
    assert int(newest["count"].sum()) == 2 * 30 * 30


def test_is_a_table() -> None:
    table = new_table(shard=(1, 2), dtype=torch.bfloat16)
    assert isinstance(table, Table)
    cut = table.begin_cut()
    assert isinstance(cut, DeferredCut)
    cut.end(True)
    assert (table.name, table.shard, table.dim, table.dtype) == ("user", (1, 2), DIM, torch.bfloat16)
    assert (table.device, table.cache_rows, table.capacity) == (torch.device("cpu"), 4, 1)
    assert table.embedding.shape == (4, DIM)
    assert table.slot("flags").shape == (4, 3)
    assert [column.name for column in table.schema().columns] == ["id", "embedding", "sum", "flags", "last_seen"]
    assert table.companions() == {}
    assert repr(table) == "MultiLevelTable('user', dim=3, rows=0, cache_rows=4, device='cpu', shard=(1, 2))"


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3)])
def test_shapes_follow_ids(shape: tuple[int, ...]) -> None:
    ids = torch.arange(int(np.prod(shape))).reshape(shape)
    table = new_table(cache_rows=8)
    rows = table.lookup(ids)
    assert rows.shape == shape
    assert torch.equal(table.lookup(ids.numpy()), rows)
    assert table.read(ids)["flags"].shape == (*shape, 3)
    assert table.read(ids)["sum"].shape == shape
    assert torch.equal(table.embedding[rows], table.read(ids)["embedding"])


def test_absent_ids_are_minus_one_without_insert() -> None:
    table = new_table()
    table.lookup(batch([1, 2]))
    assert [row >= 0 for row in table.lookup(batch([2, 3, 1]), insert=False).tolist()] == [True, False, True]
    assert len(table) == 2
    assert 1 in table
    assert 3 not in table


def test_removed_rows_begin_anew() -> None:
    world = LevelsBesideDict(cache_rows=2)
    world.train([1, 2])
    world.train([3])
    world.remove([1, 3, 99])
    world.train([3, 1])
    world.check()
    assert world.rows[3][1] == SUM_AFTER_ONE_STEP


SUM_AFTER_ONE_STEP = 1.25


def test_evict_goes_by_the_newest_number() -> None:
    world = LevelsBesideDict(cache_rows=2)
    for ids in ([1, 2], [3, 4], [1, 5]):
        world.train(ids)
    # The host rows of 1 and 5 still say 1 and 0.
    world.evict(3)
    world.check()
    assert sorted(world.rows) == [1, 5]


def test_clear_forgets_all() -> None:
    world = LevelsBesideDict(cache_rows=2)
    world.train([1, 2, 3])
    world.table.clear()
    world.rows.clear()
    world.check()
    world.train([2])
    world.check()


def test_reserve_and_growth_keep_rows() -> None:
    world = LevelsBesideDict(cache_rows=2)
    world.train([1, 2])
    world.table.reserve(100)
    assert world.table.capacity == 100
    world.train([3])
    world.check()
    with pytest.raises(UsageError, match="rows of a reservation of table 'user' must be"):
        world.table.reserve(-1)


def test_read_refuses_unknown_ids() -> None:
    table = new_table()
    table.lookup(batch([1]))
    with pytest.raises(UsageError, match="id to read from table 'user' has no row, found 7"):
        table.read(batch([1, 7, 8]))


def test_owns_by_unsigned_modulo() -> None:
    table = new_table(shard=(1, 2))
    assert table.owns(batch([-1, 2, 3])).tolist() == [True, False, True]
    with pytest.raises(UsageError, match="id 2 belongs to shard 0 of 2, and table 'user' holds shard 1 of 2"):
        table.lookup(batch([1, 2]))
    with pytest.raises(UsageError, match="id 2 belongs to shard 0"):
        table.insert(batch([2]), torch.ones(1, DIM))
    assert table.lookup(batch([2]), insert=False).tolist() == [-1]
    assert len(table) == 0


@pytest.mark.parametrize(
    ("rows", "slots", "message"),
    [
        (torch.ones(2, DIM + 1), {}, r"'embedding' of table 'user' have the wrong shape, found \(2, 4\)"),
        (torch.ones(2, DIM).double(), {}, r"wrong dtype, found torch.float64"),
        ([[1.0] * DIM] * 2, {}, "'embedding' of table 'user' must be .*; got a list"),
        (torch.ones(2, DIM), {"sum": torch.ones(2, 1).double()}, "'sum' of table 'user' have the wrong shape"),
        (torch.ones(2, DIM), {"momentum": torch.ones(2)}, "no slot 'momentum', expected"),
    ],
)
def test_insert_refuses_before_any_change(rows: Any, slots: dict[str, torch.Tensor], message: str) -> None:
    table = new_table()
    with pytest.raises(UsageError, match=message):
        table.insert(batch([1, 2]), rows, **slots)
    assert len(table) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "name of a table must be"),
        ({"dim": 0}, "dim of a table must be .*; got 0"),
        ({"cache_rows": 0}, "cache_rows of table 'user' must be an int of at least 1; got 0"),
        ({"cache_rows": 2.0}, "cache_rows of table 'user' must be"),
        ({"capacity": True}, "capacity of table 'user' must be"),
        ({"policy": "fifo"}, r"policy of table 'user' must be one of 'lru', 'lfu'; got 'fifo'"),
        ({"admit_after": 0}, "admit_after of table 'user' must be"),
        ({"undo_bytes_max": 0}, "undo_bytes_max of table 'user' must be"),
        ({"shard": (1, 1)}, "shard of table 'user' must be"),
        ({"device": "meta"}, "device of table 'user' must be"),
        ({"initializer": "zeros"}, "initializer of table 'user' must be"),
    ],
)
def test_constructor_refuses(options: dict[str, Any], message: str) -> None:
    arguments = {"name": "user", "dim": DIM, "cache_rows": 4, **options}
    with pytest.raises(UsageError, match=message):
        MultiLevelTable(arguments.pop("name"), arguments.pop("dim"), **arguments)


@pytest.mark.parametrize("use", ["lookup", "prefetch", "remove", "read"])
@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32), [1]])
def test_ids_of_another_type_are_refused(use: str, ids: Any) -> None:
    with pytest.raises(UsageError, match="ids for table 'user'"):
        getattr(new_table(), use)(ids)


def test_failed_initializer_leaves_no_id_behind() -> None:
    def fail_at_seven(ids: torch.Tensor) -> torch.Tensor:
        if 7 in ids.tolist():
            raise ValueError("seven")
        return torch.ones(len(ids), DIM)

    table = new_table(initializer=fail_at_seven, cache_rows=2)
    rows = table.lookup(batch([1, 2]))
    table.embedding[rows] = 5.0
    with pytest.raises(ValueError, match="seven"):
        table.lookup(batch([1, 7, 8]))
    assert sorted(table.ids().tolist()) == [1, 2]
    assert table.read(batch([1, 2]))["embedding"].tolist() == [[5.0] * DIM] * 2
    assert table.lookup(batch([8])).tolist() != [-1]


@pytest.mark.parametrize("clear", [True, False])
def test_load_fills_the_host_level(clear: bool) -> None:
    world = LevelsBesideDict(cache_rows=2)
    world.train([1, 2, 3])
    load = world.table.begin_load(clear=clear, rows_count=50, filled=["embedding"])
    rows = load.insert(batch([3, 9]))
    load.column("embedding")[rows] = 4.0
    load.end(ok=True)
    kept = {} if clear else {1: world.rows[1], 2: world.rows[2], 3: world.rows[3]}
    world.rows = kept | {id: ((4.0,) * DIM, *kept.get(id, first_row(id))[1:]) for id in (3, 9)}
    world.check()
    world.train([9, 1, 3])
    world.check()


def test_failed_load_leaves_the_table_empty() -> None:
    world = LevelsBesideDict(cache_rows=2)
    world.train([1, 2, 3])
    load = world.table.begin_load(clear=False, rows_count=1)
    load.insert(batch([9]))
    load.end(ok=False)
    world.rows.clear()
    world.check()
    world.train([1])
    world.check()


def test_threads_share_a_table() -> None:
    world = LevelsBesideDict(cache_rows=50)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(30):
            ids = random.integers(-300, 300, size=40)
            assert (world.table.lookup(ids) >= 0).all()
            world.table.prefetch(random.integers(-300, 300, size=40))
            cut = world.table.begin_cut()
            held = cut.cache_map[cut.cache_map >= 0]
            assert len(held.unique()) == len(held)
            cut.fence()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.rows = {id: first_row(id) for id in world.table.ids().tolist()}
    world.check()
