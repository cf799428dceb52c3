"""HierarchicalKV tables, behind a fake binding that behaves as the library documents itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.adapters import hkv
from asyncckpt.adapters.hkv import HkvTable, hkv_tables
from asyncckpt.modules.walk import tables_of
from asyncckpt.testing import Contents, TableSuite
from tests.experimental.fake_hkv import EMPTY_KEY, FakeHkv, HkvModule
from tests.testing.one_test import FAILURES, run_one


def table_of(module: HkvModule) -> HkvTable:
    (table,) = hkv_tables(module, "user").values()
    return table


class HkvSuite(TableSuite):
    cut_kind = "copies"
    failed_load = "unchanged"
    dtype = torch.float32

    def make_table(self, shard: tuple[int, int] = (0, 1)) -> HkvTable:
        return table_of(HkvModule(shard=shard, dtype=self.dtype))

    def make_shard(self, index: int, count: int) -> HkvTable:
        return self.make_table(shard=(index, count))

    def train(self, table: Any, step: int, seed: int) -> None:
        fake: FakeHkv = table._table
        random = np.random.default_rng([seed, step])
        for key in sorted(key for key in fake.keys.tolist() if key != EMPTY_KEY)[step % 5 :: 9]:
            fake.erase(key)
        keys = np.unique(random.integers(-40, 40, size=15)) * (2**56 + 1) + 7
        values = torch.from_numpy(random.standard_normal((len(keys), 7))).to(self.dtype)
        # Scores beyond 2**63 too: as int64 they are negative.
        scores = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, size=len(keys)))
        fake.insert_or_assign(len(keys), torch.from_numpy(keys), values, scores.view(torch.uint64), 0, True, True)

    def contents(self, table: Any) -> Contents:
        fake: FakeHkv = table._table
        used = fake.keys != EMPTY_KEY
        values = fake.values[used]
        return {
            "id": fake.keys[used],
            "embedding": values[:, :3],
            "exp_avg": values[:, 3:6],
            "step": values[:, 6:],
            "score": fake.scores[used],
        }

    def internals(self, table: Any) -> Contents:
        fake: FakeHkv = table._table
        used = fake.keys != EMPTY_KEY
        return {"keys": fake.keys, "scores": fake.scores[used], "values": fake.values[used]}


class TestHkv(HkvSuite):
    pass


class TestHkvOfHalves(HkvSuite):
    dtype = torch.bfloat16


class TestHkvInManyBatches(HkvSuite):
    """Batches of slots, some of them without a row, and the last one shorter."""

    @pytest.fixture(autouse=True)
    def _small_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hkv, "BATCH_SLOTS", 5)


class ScansRowsNotSlots(HkvTable):
    """As if offsets counted rows: what lies in slots behind the number of rows is missed."""

    def _export(self) -> Any:
        rows = self._export_batch(0, 0)
        return {name: column[: self._table.size(0) // 2] for name, column in rows.items()}


class LetsTheTableScore(HkvTable):
    """Inserts without `ignore_evict_strategy`."""

    def _insert(self, rows: Any, stream: int) -> None:
        insert = self._table.insert_or_assign
        self._table.insert_or_assign = lambda *arguments: insert(*arguments[:-1], False)
        try:
            super()._insert(rows, stream)
        finally:
            self._table.insert_or_assign = insert


@pytest.mark.parametrize(
    ("adapter", "test"),
    [(ScansRowsNotSlots, "test_cut_holds_the_contents"), (LetsTheTableScore, "test_blocking_save")],
)
def test_wrong_adapter_fails(adapter: type[HkvTable], test: str, tmp_path: Path) -> None:
    class Suite(HkvSuite):
        def make_table(self, shard: tuple[int, int] = (0, 1)) -> HkvTable:
            fake = FakeHkv(7, dtype=torch.float32)
            return adapter("user", fake, dim=3, states={"exp_avg": 3, "step": 1}, device="cpu")

    with pytest.raises(FAILURES):
        run_one(Suite(), test, tmp_path)


def put(table: HkvTable, keys: list[int]) -> None:
    fake: Any = table._table
    scores = torch.ones(len(keys), dtype=torch.int64).view(torch.uint64)
    fake.insert_or_assign(len(keys), torch.tensor(keys), torch.ones(len(keys), 7), scores, 0, True, True)


def save(path: Path, table: Any) -> None:
    with asyncckpt.Saver(path=path, hashtables={"user": table}, durability="none") as saver:
        saver.save(1)


def test_a_module_walk_finds_the_table_by_name() -> None:
    tables = tables_of(torch.nn.Sequential(HkvModule()))
    assert [*tables] == ["0"]
    assert [(c.name, c.row_shape, c.role.value) for c in tables["0"].schema().columns] == [
        ("id", (), "id"),
        ("embedding", (3,), "weight"),
        ("exp_avg", (3,), "optimizer"),
        ("step", (1,), "optimizer"),
        ("score", (), "metadata"),
    ]


@pytest.mark.parametrize("reserved", [-1, -2, -3, -4])
def test_reserved_ids_are_refused_on_the_way_in(tmp_path: Path, reserved: int) -> None:
    source = asyncckpt.HashTable(
        "user", 3, optimizer_slots={"exp_avg": (3,), "step": (1,)}, metadata={"score": torch.int64}
    )
    source.lookup(torch.tensor([5, reserved, 7]))
    save(tmp_path, source)
    table = table_of(HkvModule())
    put(table, [11])
    with pytest.raises(asyncckpt.UnsupportedError, match=rf"cannot hold ids .* found \[{reserved}\]"):
        asyncckpt.Loader(tmp_path, {"user": table}).load()
    assert table.begin_cut().column("id").tolist() == [11]


@pytest.mark.parametrize("reserved", [-2, -3, -4])
def test_reserved_ids_are_refused_on_the_way_out(tmp_path: Path, reserved: int) -> None:
    """They are there only when the binding was built with other marks than it says."""
    table = table_of(HkvModule())
    put(table, [5, 6])
    table._table.keys[0] = reserved
    with pytest.raises(asyncckpt.UnsupportedError, match=rf"'user' cannot hold ids .* found \[{reserved}\]"):
        save(tmp_path, table)
    assert asyncckpt.list_steps(tmp_path) == []


def test_neighbours_of_reserved_ids_pass(tmp_path: Path) -> None:
    table = table_of(HkvModule())
    put(table, [-5, 0, 2**63 - 1, -(2**63)])
    save(tmp_path, table)
    target = table_of(HkvModule())
    asyncckpt.Loader(tmp_path, {"user": target}).load()
    assert sorted(target.begin_cut().column("id").tolist()) == [-(2**63), -5, 0, 2**63 - 1]


def test_reserved_ids_move_with_the_option() -> None:
    module = HkvModule()
    module.reserved_key_start_bit = 4
    table = table_of(module)
    marks = [-2, -2 - 16, -2 - 32, -2 - 48]
    for mark in marks:
        with pytest.raises(asyncckpt.UnsupportedError):
            table._check_ids(np.array([0, mark], dtype=np.int64))
    table._check_ids(np.array([-1, -3, -4, -2 - 64], dtype=np.int64))


def test_a_table_that_changes_while_it_is_exported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hkv, "BATCH_SLOTS", 16)
    table = table_of(HkvModule())
    put(table, list(range(20)))
    fake: Any = table._table
    export = fake.export_batch

    def disturbed(*arguments: Any) -> None:
        export(*arguments)
        used = (fake.keys != EMPTY_KEY).nonzero()
        fake.keys[used[-1]] = EMPTY_KEY

    fake.export_batch = disturbed
    with pytest.raises(asyncckpt.ConflictError, match="changed while it was exported"):
        table.begin_cut()


def test_a_table_that_is_too_small_is_found_out(tmp_path: Path) -> None:
    table = table_of(HkvModule())
    put(table, list(range(100)))
    save(tmp_path, table)
    small = table_of(HkvModule(max_capacity=64))
    with pytest.raises(asyncckpt.IncompatibleError, match="too small for the checkpoint"):
        asyncckpt.Loader(tmp_path, {"user": small}).load()
    assert small.begin_cut().rows_count == 0


@pytest.mark.parametrize("states", [{}, {"exp_avg": 3}, {"exp_avg": 5}, {"a": 4, "b": 0}])
def test_columns_must_be_the_whole_value_row(states: dict[str, int]) -> None:
    with pytest.raises(asyncckpt.UsageError, match="are not its value row"):
        HkvTable("user", FakeHkv(7, dtype=torch.float32), dim=3, states=states, device="cpu")


@pytest.mark.parametrize("bit", [-1, 63])
def test_reserved_bit_is_checked(bit: int) -> None:
    with pytest.raises(asyncckpt.UsageError, match="reserved_key_start_bit of table 'user' must be"):
        HkvTable("user", FakeHkv(3, dtype=torch.float32), dim=3, device="cpu", reserved_key_start_bit=bit)


def test_a_table_says_that_it_is_experimental() -> None:
    with pytest.warns(UserWarning, match="HierarchicalKV is experimental, and was never tested with it"):
        table_of(HkvModule())
