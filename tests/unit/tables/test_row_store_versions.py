"""A level counts its own writes as torch does: a cut sees the writes of others, and none where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.tables import HashEmbedding, HashTable, MultiLevelTable, SparseAdagrad, SparseSGD, Uniform
from tests.unit.tables.simulated_rows import tables_on_a_device
from tests.unit.tables.test_touched_rows_by_use import AnyTable, batch, touched, version_of

SLOTS: dict[str, Any] = {
    "optimizer_slots": {"sum": torch.float32},
    "metadata": {"last_seen": torch.int64, "count": torch.int64},
}


def constant(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(ids), 3)


TABLES: dict[str, Callable[..., Any]] = {
    "hash": lambda **options: HashTable("user", 3, capacity=2, **SLOTS, **options),
    "levels": lambda **options: MultiLevelTable("user", 3, cache_rows=4, capacity=2, admit_after=2, **SLOTS, **options),
}


def with_companions(table: Any) -> list[AnyTable]:
    return [table, *table.companions().values()] if isinstance(table, MultiLevelTable) else [table]  # type: ignore[list-item]


def admit(table: Any, ids: torch.Tensor) -> None:
    for _ in range(2):
        table.lookup(ids)


def do_all(table: Any) -> None:
    """Use all methods that write."""
    for ids in torch.arange(40).split(4):
        admit(table, ids)
    table.insert(batch(1, 100, 1), torch.zeros(3, 3), sum=torch.ones(3, 3))
    table.insert(batch(), torch.zeros(0, 3))
    table.update(table.lookup(batch(1, 2)), lambda rows: rows.embedding.add_(1.0))
    with table.rows(batch(7, 3, 5000)) as rows:
        rows["sum"] += 1.0
    table.remove(batch(5, 6))
    table.lookup(batch(5, 200, 201, 202))
    module = HashEmbedding(table)
    for optimizer in (SparseAdagrad(module, lr=0.1), SparseSGD(module, lr=0.1)):
        module.step = 1
        module(batch(3, 4, 3, 900)).sum().backward()
        optimizer.step()
    module.eval()(batch(3, 950))
    if table._store.place.is_host:  # The simulation cannot read a column of a device as torch does.
        table.evict("count", below=2)
    table.touch(table.lookup(batch(1), insert=False))
    if isinstance(table, MultiLevelTable):
        table.prefetch(torch.arange(10))
        table.read(table.ids()[:2])
        table.reserve(200)
        with pytest.warns(RuntimeWarning, match="cache of table"):
            admit(table, torch.arange(2000, 2010))  # The cache grows.


@pytest.mark.parametrize("initializer", [None, 0.5, Uniform(0.1, seed=1), constant])
@pytest.mark.parametrize("name", TABLES)
def test_the_writes_of_a_table_itself_are_counted(name: str, initializer: Any) -> None:
    table = TABLES[name](initializer=initializer)
    versions = [(each, version_of(each)) for each in with_companions(table)]
    do_all(table)
    for each, version in versions:
        assert touched(each, version)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_on_a_device(name: str, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with tables_on_a_device(monkeypatch, seed=3, pin_host_memory=pinned):
        table = TABLES[name](**({"pin_host_memory": True} if pinned and name == "levels" else {}))
        version = version_of(table)
        do_all(table)
        assert touched(table, version) is not None
        table.embedding.add_(1.0)
        assert touched(table, version) is None


@pytest.mark.parametrize("name", TABLES)
def test_every_column_is_watched(name: str) -> None:
    table = TABLES[name]()
    table.lookup(batch(1, 2))
    table.lookup(batch(1, 2))
    for write in (
        lambda: table.embedding.mul_(2.0),
        lambda: table.slot("sum").__setitem__(0, 1.0),
        lambda: table.slot("count").view(-1)[:1].fill_(3),
        lambda: table.slot("last_seen").detach().zero_(),
    ):
        version = version_of(table)
        table.lookup(batch(1))
        write()
        table.lookup(batch(2))
        newer = version_of(table)
        assert touched(table, version) is None
        assert touched(table, newer) == []
        assert touched(table, version) is None, "a later cut knows no more of it"


@pytest.mark.parametrize("name", TABLES)
def test_a_write_to_a_column_that_growth_replaces_is_seen(name: str) -> None:
    table = TABLES[name]()
    table.lookup(batch(1, 2))
    version = version_of(table)
    table.embedding.mul_(2.0)
    if isinstance(table, MultiLevelTable):
        with pytest.warns(RuntimeWarning, match="cache of table"):
            admit(table, torch.arange(10))
    else:
        table.lookup(torch.arange(100))
    assert touched(table, version) is None


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("name", TABLES)
def test_what_a_load_writes_is_its_own(name: str, ok: bool) -> None:
    table = TABLES[name]()
    table.lookup(batch(1, 2))
    load = table.begin_load(clear=True, rows_count=3, filled={"embedding"})
    rows = load.insert(batch(7, 8, 9))
    load.column("embedding")[rows] = 1.0
    load.end(ok)
    version = version_of(table)
    table.update(table.lookup_rows(np.array([7]), insert=False), lambda values: values.embedding.add_(1.0))
    assert touched(table, version) is not None
