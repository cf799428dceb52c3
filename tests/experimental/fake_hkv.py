"""A HierarchicalKV table in host memory: buckets of slots, reserved keys, eviction by score.

`export_batch` counts slots, not rows. An insert evicts the row of the lowest score when a bucket is full, and refuses
a row with a lower score than that; the scores that are given are only kept with `ignore_evict_strategy`.
"""

from __future__ import annotations

import torch

EMPTY_KEY = -1
BUCKET_SLOTS = 8


class FakeHkv:
    """`nv::merlin::HashTable<int64, V, uint64>`; buckets by key, capacity up to max_capacity."""

    def __init__(self, width: int, *, dtype: torch.dtype, capacity: int = 64, max_capacity: int = 1024) -> None:
        self.width = width
        self.dtype = dtype
        self.max_capacity = max_capacity
        self.next_score = 1
        self.calls: list[str] = []
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        self.keys = torch.full((capacity,), EMPTY_KEY)
        self.values = torch.zeros((capacity, self.width), dtype=self.dtype)
        self.scores = torch.zeros(capacity, dtype=torch.int64)

    def dim(self) -> int:
        return self.width

    def capacity(self) -> int:
        return len(self.keys)

    def size(self, stream: int) -> int:
        return int((self.keys != EMPTY_KEY).sum())

    def export_batch(
        self,
        n: int,
        offset: int,
        d_counter: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor,
        stream: int,
    ) -> None:
        assert offset + n <= self.capacity()
        assert scores.dtype is torch.uint64
        assert values.shape == (n, self.width)
        self.calls.append("export_batch")
        slots = offset + (self.keys[offset : offset + n] != EMPTY_KEY).nonzero().reshape(-1)
        count = len(slots)
        d_counter += count
        keys[:count] = self.keys[slots]
        values[:count] = self.values[slots]
        scores.view(torch.int64)[:count] = self.scores[slots]

    def insert_or_assign(
        self,
        n: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor,
        stream: int,
        unique_keys: bool,
        ignore_evict_strategy: bool,
    ) -> None:
        assert scores.dtype is torch.uint64
        assert len(keys) == len(values) == len(scores) == n
        assert not unique_keys or len(keys.unique()) == n
        self.calls.append("insert_or_assign")
        while self.size(0) + n > self.capacity() // 2 and self.capacity() * 2 <= self.max_capacity:
            self.reserve(self.capacity() * 2, 0)
        for key, value, score in zip(keys.tolist(), values, scores.view(torch.int64).tolist(), strict=True):
            self._put(key, value, score if ignore_evict_strategy else self.next_score)

    def _put(self, key: int, value: torch.Tensor, score: int) -> None:
        if -4 <= key <= -1:
            return  # A mark, not a key: the row is lost in silence.
        begin = hash(key) % (self.capacity() // BUCKET_SLOTS) * BUCKET_SLOTS
        bucket = slice(begin, begin + BUCKET_SLOTS)
        found = (self.keys[bucket] == key).nonzero()
        if not len(found):
            found = (self.keys[bucket] == EMPTY_KEY).nonzero()
        at = begin + (int(found[0]) if len(found) else self._lowest(begin))
        self.keys[at], self.values[at], self.scores[at] = key, value, score

    def _lowest(self, begin: int) -> int:
        scores = [score % 2**64 for score in self.scores[begin : begin + BUCKET_SLOTS].tolist()]
        return scores.index(min(scores))

    def reserve(self, new_capacity: int, stream: int) -> None:
        capacity = self.capacity()
        while capacity < new_capacity and capacity * 2 <= self.max_capacity:
            capacity *= 2
        used = (self.keys != EMPTY_KEY).nonzero().reshape(-1)
        old = [(int(self.keys[at]), self.values[at].clone(), int(self.scores[at])) for at in used.tolist()]
        self._allocate(capacity)
        for key, value, score in old:
            self._put(key, value, score)

    def clear(self, stream: int) -> None:
        self.calls.append("clear")
        self.keys.fill_(EMPTY_KEY)

    # -- training --

    def find(self, key: int) -> int:
        found = (self.keys == key).nonzero()
        return int(found[0]) if len(found) else -1

    def erase(self, key: int) -> None:
        self.keys[self.find(key)] = EMPTY_KEY


class HkvModule(torch.nn.Module):
    """A torch module over a HierarchicalKV table."""

    def __init__(self, *, shard: tuple[int, int] = (0, 1), dtype: torch.dtype = torch.float32, **options: int) -> None:
        super().__init__()
        self.dim = 3
        self.states = {"exp_avg": 3, "step": 1}
        self.dtype = dtype
        self.device = "cpu"
        self.shard = shard
        self.table = FakeHkv(7, dtype=dtype, **options)


HkvModule.__module__ = "merlin_kv.torch"
HkvModule.__qualname__ = "HashTable"
