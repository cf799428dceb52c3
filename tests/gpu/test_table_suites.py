"""Tables on the device pass the contract suite of tables."""

from __future__ import annotations

import pytest
import torch

from asyncckpt.tables.multi_level import MultiLevelTable
from tests.gpu.device import DEVICE
from tests.testing import test_embedding_suite as embedding
from tests.testing import test_hash_table_suite as hash_table
from tests.testing import test_multi_level_suite as multi_level

LEVELS = [(1, 256, "lru", False), (7, 16, "lfu", False), (64, 256, "lru", True)]


class TestHashTable(hash_table.HashTableSuite):
    device = DEVICE


class TestHashTableOfBytes(hash_table.TestHashTableOfBytes):
    device = DEVICE


class TestHashTableOfBfloat16(hash_table.HashTableSuite):
    device = DEVICE
    dtype = torch.bfloat16
    make_table = hash_table.TestHashTableDtypes.make_table


@pytest.mark.parametrize(("cache_rows", "capacity", "policy", "pinned"), LEVELS)
class TestMultiLevelTable(multi_level.MultiLevelSuite):
    """The cache level on the device, the host level in plain or pinned memory."""

    device = DEVICE

    @pytest.fixture(autouse=True)
    def _use(self, cache_rows: int, capacity: int, policy: str, pinned: bool) -> None:
        self.cache_rows = cache_rows
        self.capacity = capacity
        self.policy = policy
        self.pinned = pinned and DEVICE != "cpu"

    def make_table(self, shard: tuple[int, int] = (0, 1)) -> MultiLevelTable:
        if not self.pinned:
            return super().make_table(shard)
        return MultiLevelTable(
            "user",
            4,
            cache_rows=self.cache_rows,
            optimizer_slots={"sum": (), "momentum": torch.float64},
            metadata={"last_seen": torch.int64},
            capacity=self.capacity,
            policy=self.policy,
            shard=shard,
            device=self.device,
            pin_host_memory=True,
        )


class TestEmbedding(embedding.EmbeddingSuite):
    device = DEVICE


class TestEmbeddingOfHalves(embedding.TestEmbeddingOfHalves):
    device = DEVICE
