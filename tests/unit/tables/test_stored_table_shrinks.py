"""Shrinking after many ids were removed: memory goes, rows and saves stay right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.tables import HashEmbedding, HashTable, MultiLevelTable, SparseAdagrad, Uniform
from asyncckpt.tables.row_device import RowDevice
from asyncckpt.tables.trained_table import TrainedTable
from tests.worlds.rows import named_rows

IDS_COUNT, KEPT_COUNT = 3000, 40
OPTIONS: dict[str, Any] = {
    "optimizer_slots": SparseAdagrad.optimizer_slots(),
    "metadata": {"last_seen": torch.int64},
    "initializer": Uniform(0.5, seed=1),
}
KINDS: dict[str, Callable[[], TrainedTable]] = {
    "hash": lambda: HashTable("user", 4, **OPTIONS),
    "levels": lambda: MultiLevelTable("user", 4, cache_rows=KEPT_COUNT, **OPTIONS),
}


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest) -> TrainedTable:
    return KINDS[request.param]()


def train(table: TrainedTable, ids: torch.Tensor, step: int) -> None:
    module = HashEmbedding(table)
    module.step = step
    optimizer = SparseAdagrad(module, lr=0.1)
    for part in ids.split(KEPT_COUNT):
        module(part).square().sum().backward()
        optimizer.step()


def test_rows_stay_and_memory_goes(table: TrainedTable) -> None:
    train(table, torch.arange(IDS_COUNT), 1)
    train(table, torch.arange(0, IDS_COUNT, IDS_COUNT // KEPT_COUNT), 9)
    table.evict("last_seen", older_than=5)
    before, bytes_before = named_rows(table), table.statistics().bytes
    assert len(before) == KEPT_COUNT
    freed_bytes = table.shrink()
    assert named_rows(table) == before
    assert (table.capacity, table.statistics().bytes) == (KEPT_COUNT, bytes_before - freed_bytes)
    assert freed_bytes > 0
    assert table.shrink() == 0
    # Training goes on, as if nothing had been.
    other = KINDS["hash"]()
    ids = torch.tensor(list(before))
    columns = {name: torch.tensor([row[name] for row in before.values()]) for name in ("embedding", "sum", "last_seen")}
    other.insert(ids, columns.pop("embedding"), **columns)
    for each in (table, other):
        train(each, torch.arange(0, IDS_COUNT, 7), 10)
        each.remove(torch.arange(50))
    assert named_rows(table) == named_rows(other)


def test_an_empty_table_shrinks(table: TrainedTable) -> None:
    table.lookup(torch.arange(KEPT_COUNT))
    table.clear()
    assert table.shrink() > 0
    assert (table.capacity, len(table), named_rows(table)) == (1, 0, {})
    table.lookup(torch.arange(5))
    assert sorted(named_rows(table)) == list(range(5))


def test_every_kind_of_save_is_right_after_it(table: TrainedTable, tmp_path: Path) -> None:
    train(table, torch.arange(IDS_COUNT), 1)
    kinds = iter(("full", "delta", "full", "delta", "auto"))
    policy = asyncckpt.DeltaPolicy()
    with asyncckpt.Saver(path=tmp_path, hashtables={"user": table}, deltas=policy) as saver:
        for step, kind in enumerate(kinds, start=1):
            saver.save_async(step, kind=kind).result(60)  # type: ignore[arg-type]
            other = KINDS["hash"]()
            asyncckpt.Loader(tmp_path, hashtables={"user": other}).load()
            assert named_rows(other) == named_rows(table)
            table.remove(np.arange(IDS_COUNT - 100 * step, IDS_COUNT - 100 * (step - 1)))
            train(table, torch.arange(0, 60), step)
            table.shrink()


def test_rows_are_where_they_were_when_memory_runs_out(table: TrainedTable, monkeypatch: pytest.MonkeyPatch) -> None:
    train(table, torch.arange(IDS_COUNT), 1)
    table.remove(torch.arange(100, IDS_COUNT))
    before, capacity = named_rows(table), table.capacity
    made = iter(range(2))

    def new_column(self: RowDevice, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        if next(made, None) is None:
            raise MemoryError("no room")
        return torch.empty(shape, dtype=dtype)

    with monkeypatch.context() as patch:
        patch.setattr(RowDevice, "new_column", new_column)
        with pytest.raises(MemoryError):
            table.shrink()
    assert (named_rows(table), table.capacity) == (before, capacity)
    table.shrink()
    assert (named_rows(table), table.capacity) == (before, 100)
