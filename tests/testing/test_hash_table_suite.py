"""HashTable passes the contract suite, in every family of dtypes and with every kind of initializer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.testing import Contents, TableSuite


def random_values(random: np.random.Generator, like: torch.Tensor, rows_count: int) -> torch.Tensor:
    """Random bits for floats (NaNs among them), random numbers for the rest, on the device of `like`."""
    shape = (rows_count, *like.shape[1:])
    if like.dtype is torch.bool:
        return torch.from_numpy(random.integers(0, 2, size=shape)).to(torch.bool).to(like.device)
    if not rows_count:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    raw = random.integers(0, 256, size=(*shape, like.element_size()), dtype=np.uint8)
    return torch.from_numpy(raw).view(like.dtype).reshape(shape).to(like.device)


def ids_of(random: np.random.Generator, count: int, *, distinct: int = 60) -> torch.Tensor:
    """Some ids of a small set, of any sign and size."""
    chosen = random.integers(-distinct // 2, distinct // 2, size=count)
    return torch.from_numpy(np.unique(chosen) * (2**57 + 1))


class HashTableSuite(TableSuite):
    """Inserts, updates in place and by insert, and removes."""

    device = "cpu"

    def make_table(self, shard: tuple[int, int] = (0, 1)) -> asyncckpt.HashTable:
        return asyncckpt.HashTable(
            "user",
            4,
            optimizer_slots={"sum": (), "momentum": torch.float64},
            metadata={"last_seen": torch.int64, "kind": asyncckpt.Slot(torch.uint8, (3,), 7)},
            initializer=asyncckpt.nn.Uniform(0.1, seed=3),
            capacity=16,
            shard=shard,
            device=self.device,
        )

    def make_shard(self, index: int, count: int) -> asyncckpt.HashTable:
        return self.make_table(shard=(index, count))

    def train(self, table: Any, step: int, seed: int) -> None:
        random = np.random.default_rng([seed, step])
        ids = ids_of(random, 20)
        rows = table.lookup(ids)

        def write(values: Any) -> None:
            for column in table.schema().columns[1:]:
                values[column.name] = random_values(random, values[column.name], len(rows))

        table.update(rows, write)
        given = ids_of(random, 5)
        embedding = random_values(random, table.embedding, len(given))
        table.insert(given, embedding)
        table.remove(ids_of(random, 6))

    def contents(self, table: Any) -> Contents:
        rows = table.used_rows()
        columns = [column.name for column in table.schema().columns[2:]]
        found = {name: table.slot(name)[rows] for name in columns}
        return {"id": table.ids(), "embedding": table.embedding[rows], **found}

    def internals(self, table: Any) -> Contents:
        return {"ids by row": table.ids(), "rows": table.used_rows()}


class TestHashTable(HashTableSuite):
    pass


class TestHashTableWithoutSlots(HashTableSuite):
    def make_table(self, shard: tuple[int, int] = (0, 1)) -> asyncckpt.HashTable:
        return asyncckpt.HashTable("plain", 1, shard=shard, initializer=0.5, device=self.device)


class TestHashTableOfBytes(HashTableSuite):
    """Small and odd dtypes in every role."""

    def make_table(self, shard: tuple[int, int] = (0, 1)) -> asyncckpt.HashTable:
        return asyncckpt.HashTable(
            "bytes",
            3,
            dtype=torch.float16,
            optimizer_slots={"half": torch.bfloat16, "bytes": asyncckpt.Slot(torch.int8, (5,), -1)},
            metadata={"flag": torch.bool, "small": asyncckpt.Slot(torch.int16, (2, 2), 3), "int": torch.int32},
            initializer=lambda ids: ids.remainder(7).unsqueeze(1).expand(-1, 3).half(),
            shard=shard,
            device=self.device,
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
class TestHashTableDtypes(HashTableSuite):
    """One round of the suite per weight dtype."""

    @pytest.fixture(autouse=True)
    def _use(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def make_table(self, shard: tuple[int, int] = (0, 1)) -> asyncckpt.HashTable:
        slots = {"v": self.dtype}
        return asyncckpt.HashTable("wide", 5, dtype=self.dtype, optimizer_slots=slots, shard=shard, device=self.device)
