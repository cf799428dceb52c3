"""dynamicemb without a GPU: the classes that hold rows, behaving as the library documents them, on the CPU.

What a careless reader would trip over is here too: `flush` changes the storage, `export_keys_values` of a hybrid
storage erases keys of its host level while it runs, `split_embedding_weights` returns dummies, `reset_cache_states`
drops the rows of all tables, `erase` does not reach the overflow of a cache, tables evict the row of the lowest score
when they are full, the rows of a table that never evicts are its scores, and timestamps are those of a clock.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

EMPTY = -(2**63)
CPU = torch.device("cpu")


class Clock:
    """The clock of the device."""

    now = 1000


def device_timestamp() -> int:
    return Clock.now


@dataclass
class ScoreSpec:
    name: str


class Optimizer:
    """`width` elements of state a row, of which the first `ckpt_width` are saved; the rest is padding."""

    def __init__(self, width: int, ckpt_width: int | None = None) -> None:
        self.width = width
        self.ckpt_width = width if ckpt_width is None else ckpt_width

    def get_state_dim(self, emb_dim: int) -> int:
        return self.width

    def get_ckpt_state_dim(self, emb_dim: int) -> int:
        return self.ckpt_width


@dataclass
class FakeOptions:
    dim: int
    dist_type: str = "roundrobin"


class KeyIndexMap:
    """Slots of several logical tables: key and score words. A cache has an overflow behind its main slots."""

    def __init__(self, capacities: list[int], *, words: int, overflow: int = 0) -> None:
        self.capacities = list(capacities)
        self.overflow = overflow
        self.num_scores_ = words
        self.reset()

    def reset(self) -> None:
        sizes = [capacity + self.overflow for capacity in self.capacities]
        self.keys = [torch.full((size,), EMPTY) for size in sizes]
        self.scores = [torch.zeros((size, self.num_scores_), dtype=torch.int64) for size in sizes]

    def size(self, table_id: int | None = None) -> int:
        tables = range(len(self.keys)) if table_id is None else [table_id]
        return sum(int((self.keys[number] != EMPTY).sum()) for number in tables)

    def capacity(self, table_id: int) -> int:
        return self.capacities[table_id]

    def slot(self, table_id: int, key: int) -> int:
        found = (self.keys[table_id] == key).nonzero()
        return int(found[0]) if len(found) else -1

    def place(self, table_id: int, key: int) -> tuple[int, int]:
        """The slot for a key and the key that has to go for it, EMPTY if none."""
        slot = self.slot(table_id, key)
        if slot >= 0:
            return slot, EMPTY
        free = (self.keys[table_id] == EMPTY).nonzero()
        # Some free slot, as a hash would have it: not the next one.
        slot = int(free[key % len(free)]) if len(free) else int(self.scores[table_id][:, 0].argmin())
        victim = int(self.keys[table_id][slot])
        self.keys[table_id][slot] = key
        return slot, victim

    def erase(self, keys: torch.Tensor, table_ids: torch.Tensor) -> None:
        for key, table_id in zip(keys.tolist(), table_ids.tolist(), strict=True):
            slot = self.slot(table_id, key)
            if 0 <= slot < self.capacities[table_id]:
                self.keys[table_id][slot] = EMPTY

    def gather_score_blocks(self, table_id: int, slots: torch.Tensor) -> torch.Tensor:
        return self.scores[table_id][slots]

    def _batched_export_keys_scores(
        self,
        score_names: list[str],
        target_device: torch.device,
        table_id: int,
        thresholds: list[int] | None = None,
        batch_size: int = 65536,
        return_index: bool = False,
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]]:
        for begin in range(0, len(self.keys[table_id]), min(batch_size, 7)):
            keys = self.keys[table_id][begin : begin + min(batch_size, 7)]
            slots = (keys != EMPTY).nonzero().reshape(-1)
            if len(slots):
                scores = {name: self.scores[table_id][begin + slots, 0] for name in score_names}
                yield keys[slots], scores, begin + slots if return_index else None


@dataclass
class DynamicEmbTableState:
    """One level: its keys and its value rows `[embedding | optimizer state]`."""

    options_list: list[FakeOptions]
    score_policy: ScoreSpec
    key_index_map: KeyIndexMap
    optimizer: Optimizer
    emb_dtype: torch.dtype
    initial_optim_state: float = 0.25
    device: torch.device = CPU
    no_eviction_next_index: torch.Tensor | None = None
    no_eviction_next_index_dev: torch.Tensor | None = None
    tables: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tables = len(self.options_list)
        self.table_emb_dims_cpu = [options.dim for options in self.options_list]
        self.table_value_dims_cpu = [dim + self.optimizer.get_state_dim(dim) for dim in self.table_emb_dims_cpu]
        sizes = [len(keys) for keys in self.key_index_map.keys]
        self.tables = [
            torch.full((size, width), torch.nan, dtype=self.emb_dtype)
            for size, width in zip(sizes, self.table_value_dims_cpu, strict=True)
        ]

    def value_row(self, table_id: int, slot: int) -> int:
        never_evicts = self.no_eviction_next_index is not None
        return int(self.key_index_map.scores[table_id][slot, 0]) if never_evicts else slot

    def put(self, table_id: int, key: int, value: torch.Tensor, score: torch.Tensor) -> tuple[int, Any, Any]:
        """Set the row and the score words of a key. Returns what had to go: (key or EMPTY, value, score)."""
        keys = self.key_index_map
        is_new = keys.slot(table_id, key) < 0
        slot, victim = keys.place(table_id, key)
        gone = (victim, self.tables[table_id][slot].clone(), keys.scores[table_id][slot].clone())
        if self.no_eviction_next_index is None:
            keys.scores[table_id][slot] = score
        elif is_new:
            assert victim == EMPTY, "a table that never evicts is full"
            keys.scores[table_id][slot] = self.no_eviction_next_index[table_id]
            for index in (self.no_eviction_next_index, self.no_eviction_next_index_dev):
                index[table_id] += 1
        self.tables[table_id][self.value_row(table_id, slot)] = value
        return gone

    def take(self, table_id: int, key: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A copy of the row and the score words of a key."""
        slot = self.key_index_map.slot(table_id, key)
        if slot < 0:
            return None
        row = self.value_row(table_id, slot)
        return self.tables[table_id][row].clone(), self.key_index_map.scores[table_id][slot].clone()


def load_from_flat_single_table(state: DynamicEmbTableState, indices: torch.Tensor, table_id: int) -> torch.Tensor:
    assert indices.dtype is torch.int64
    assert indices.device == state.device
    return state.tables[table_id][indices]


def truncate_optimizer_states_for_checkpoint(optimizer: Optimizer, emb_dim: int, states: torch.Tensor) -> torch.Tensor:
    return states[:, : optimizer.get_ckpt_state_dim(emb_dim)].contiguous()


def pad_optimizer_states_from_checkpoint(
    optimizer: Optimizer, emb_dim: int, states: torch.Tensor, initial: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    padded = torch.full((len(states), optimizer.get_state_dim(emb_dim)), initial, dtype=dtype, device=device)
    padded[:, : states.shape[1]] = states.to(dtype)
    return padded


def _load_key_values(
    state: DynamicEmbTableState,
    keys: torch.Tensor,
    embeddings: torch.Tensor,
    scores: torch.Tensor | None = None,
    opt_states: torch.Tensor | None = None,
    table_id: int = 0,
) -> None:
    for tensor in (keys, embeddings, scores, opt_states):
        assert tensor is None or tensor.device == state.device, "must be on the table's device"
    dim = state.table_emb_dims_cpu[table_id]
    if opt_states is None:
        opt_states = torch.full((len(keys), state.optimizer.get_state_dim(dim)), state.initial_optim_state)
    padded = pad_optimizer_states_from_checkpoint(
        state.optimizer, dim, opt_states, state.initial_optim_state, state.emb_dtype, state.device
    )
    values = torch.cat([embeddings.to(state.emb_dtype), padded], dim=1)
    words = state.key_index_map.num_scores_
    if state.no_eviction_next_index is not None:
        scores = torch.zeros(len(keys), words, dtype=torch.int64)
    assert scores is not None
    assert scores.shape == ((len(keys),) if words == 1 else (len(keys), words)) or words == 1
    for key, value, score in zip(keys.tolist(), values, scores.reshape(len(keys), words), strict=True):
        state.put(table_id, key, value, score)


class DynamicEmbStorage:
    """A storage of one level."""

    def __init__(self, state: DynamicEmbTableState, *, max_capacity: int) -> None:
        self._state = state
        self.max_capacity = max_capacity

    @property
    def tables(self) -> list[DynamicEmbTableState]:
        return [self._state]

    def collect_table_sizes(self, non_blocking: bool = True) -> None:
        pass

    def expand_if_need(self, unique_size_per_table: torch.Tensor) -> None:
        assert unique_size_per_table.device == CPU
        for table_id, count in enumerate(unique_size_per_table.tolist()):
            _expand(self._state, table_id, self._state.key_index_map.size(table_id) + count, self.max_capacity)

    def insert(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        unique_values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        assert scores is not None
        words = self._state.key_index_map.num_scores_
        scores = scores.reshape(len(unique_keys), -1)[:, :words]
        for key, table_id, value, score in zip(
            unique_keys.tolist(), table_ids.tolist(), unique_values, scores, strict=True
        ):
            self._state.put(table_id, key, value, score)

    def export_keys_values(self, device: Any, batch_size: int = 65536, table_id: int = 0) -> Any:
        raise AssertionError("exports float32 copies; the table's own dtype is wanted")


class HybridStorage:
    """A storage of two levels; what has to leave the device goes to the host."""

    def __init__(self, hbm: DynamicEmbTableState, host: DynamicEmbTableState, *, max_capacity: int) -> None:
        self._hbm = hbm
        self._host = host
        self.max_capacity = max_capacity

    @property
    def tables(self) -> list[DynamicEmbTableState]:
        return [self._hbm, self._host]

    def collect_table_sizes(self, non_blocking: bool = True) -> None:
        pass

    def expand_if_need(self, unique_size_per_table: torch.Tensor) -> None:
        for table_id, count in enumerate(unique_size_per_table.tolist()):
            _expand(self._host, table_id, self._host.key_index_map.size(table_id) + count, self.max_capacity)

    def insert(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        unique_values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        assert scores is not None
        for key, table_id, value, score in zip(
            unique_keys.tolist(), table_ids.tolist(), unique_values, scores.reshape(-1, 1), strict=True
        ):
            gone_key, gone_value, gone_score = self._hbm.put(table_id, key, value, score)
            if gone_key != EMPTY:
                self._host.put(table_id, gone_key, gone_value, gone_score)

    def export_keys_values(self, device: Any, batch_size: int = 65536, table_id: int = 0) -> Any:
        keys = self._hbm.key_index_map.keys[table_id]
        self._host.key_index_map.erase(keys[keys != EMPTY], torch.full((int((keys != EMPTY).sum()),), table_id))
        raise AssertionError("it erased keys of the host level: this must not be called by a save")


def _expand(state: DynamicEmbTableState, table_id: int, rows_count: int, max_capacity: int) -> None:
    keys = state.key_index_map
    added = min(max_capacity, rows_count) - keys.capacities[table_id]
    if added <= 0:
        return
    assert not keys.overflow, "caches do not grow"
    keys.capacities[table_id] += added
    width = state.table_value_dims_cpu[table_id]
    keys.keys[table_id] = torch.cat([keys.keys[table_id], torch.full((added,), EMPTY)])
    keys.scores[table_id] = torch.cat([keys.scores[table_id], torch.zeros((added, keys.num_scores_)).long()])
    more = torch.full((added, width), torch.nan, dtype=state.emb_dtype)
    state.tables[table_id] = torch.cat([state.tables[table_id], more])


class DynamicEmbCache:
    def __init__(self, state: DynamicEmbTableState) -> None:
        self._state = state

    @property
    def key_index_map(self) -> KeyIndexMap:
        return self._state.key_index_map

    def reset(self) -> None:
        self._state.key_index_map.reset()


class BatchedDynamicEmbeddingTablesV2(torch.nn.Module):
    """The module. `touch` and `forget` stand for training."""

    def __init__(self, table_names: list[str], storage: Any, cache: DynamicEmbCache | None = None) -> None:
        super().__init__()
        self._table_names = table_names
        self._storage = storage
        self._cache = cache
        self._dynamicemb_options = storage.tables[-1].options_list
        self._scores = {name: 1 for name in table_names}
        self.prefetch_stream = None
        self.flushes_count = 0

    @property
    def table_names(self) -> list[str]:
        return self._table_names

    @property
    def tables(self) -> Any:
        return self._storage

    @property
    def cache(self) -> DynamicEmbCache | None:
        return self._cache

    def split_embedding_weights(self) -> list[torch.Tensor]:
        return [torch.empty(1, 1) for _ in self._table_names]

    def flush(self) -> None:
        self.flushes_count += 1
        if self._cache is None:
            return
        state = self._cache._state
        for table_id in range(state.num_tables):
            for keys, _, slots in state.key_index_map._batched_export_keys_scores(
                [state.score_policy.name], CPU, table_id, return_index=True
            ):
                scores = state.key_index_map.scores[table_id][slots]
                counts = torch.zeros(state.num_tables, dtype=torch.int64)
                counts[table_id] = len(keys)
                self._storage.expand_if_need(counts)
                ids = torch.full((len(keys),), table_id)
                self._storage.insert(keys, ids, state.tables[table_id][slots], scores)

    def reset_cache_states(self) -> None:
        if self._cache is not None:
            self._cache.reset()

    def levels(self) -> list[DynamicEmbTableState]:
        """Newest first."""
        return [*([self._cache._state] if self._cache is not None else []), *self._storage.tables]

    def find(self, table_id: int, key: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return next((row for row in (level.take(table_id, key) for level in self.levels()) if row is not None), None)

    def touch(self, table_id: int, key: int, value: torch.Tensor) -> None:
        """Train one row: it gets into the newest level, with a new score; what has to leave a cache is written back."""
        top = self.levels()[0]
        old = self.find(table_id, key)
        score = self._new_score(top, table_id, None if old is None else old[1])
        if self._cache is None:
            counts = torch.zeros(top.num_tables, dtype=torch.int64)
            counts[table_id] = 1
            self._storage.expand_if_need(counts)
            self._storage.insert(torch.tensor([key]), torch.tensor([table_id]), value[None], score[None])
            return
        gone_key, gone_value, gone_score = top.put(table_id, key, value, score)
        if gone_key != EMPTY:
            counts = torch.zeros(top.num_tables, dtype=torch.int64)
            counts[table_id] = 1
            self._storage.expand_if_need(counts)
            self._storage.insert(torch.tensor([gone_key]), torch.tensor([table_id]), gone_value[None], gone_score[None])

    def forget(self, table_id: int, key: int) -> None:
        for level in self.levels():
            slot = level.key_index_map.slot(table_id, key)
            if slot >= 0:
                level.key_index_map.keys[table_id][slot] = EMPTY

    def _new_score(self, level: DynamicEmbTableState, table_id: int, old: torch.Tensor | None) -> torch.Tensor:
        frequency = 1 if old is None else int(old[-1]) + 1
        match level.score_policy.name:
            case "timestamp":
                words = [Clock.now]
            case "lru_lfu":
                words = [Clock.now, frequency]
            case "frequency":
                words = [frequency]
            case "step":
                words = [self._scores[self._table_names[table_id]]]
            case "customized":
                words = [3 * Clock.now]
            case _:
                words = [0]
        return torch.tensor(words)


LIBRARY = types.ModuleType("dynamicemb.key_value_table")
for name in ("DynamicEmbTableState", "DynamicEmbStorage", "HybridStorage", "DynamicEmbCache"):
    globals()[name].__module__ = LIBRARY.__name__
    setattr(LIBRARY, name, globals()[name])
for function in (
    device_timestamp,
    load_from_flat_single_table,
    truncate_optimizer_states_for_checkpoint,
    pad_optimizer_states_from_checkpoint,
    _load_key_values,
):
    setattr(LIBRARY, function.__name__, function)
BatchedDynamicEmbeddingTablesV2.__module__ = "dynamicemb.batched_dynamicemb_tables"


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake be found as the library is; the clock begins anew."""
    monkeypatch.setitem(sys.modules, LIBRARY.__name__, LIBRARY)
    monkeypatch.setattr(Clock, "now", 1000)


def new_module(
    *,
    policy: str = "timestamp",
    layout: str = "single",
    optimizer: Optimizer | None = None,
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, ...] = (4, 3),
    max_capacity: int = 400,
    cache_rows: int = 6,
) -> BatchedDynamicEmbeddingTablesV2:
    """A module of logical tables t0, t1, ...; layout is "single", "cached" or "hybrid"."""
    optimizer = optimizer or Optimizer(4, ckpt_width=1)
    options = [FakeOptions(dim) for dim in dims]

    def state(rows_count: int, policy: str, *, overflow: int = 0) -> DynamicEmbTableState:
        words = 2 if policy == "lru_lfu" else 1
        return DynamicEmbTableState(
            options_list=options,
            score_policy=ScoreSpec(policy),
            key_index_map=KeyIndexMap([rows_count] * len(dims), words=words, overflow=overflow),
            optimizer=optimizer,
            emb_dtype=dtype,
            no_eviction_next_index=torch.zeros(len(dims), dtype=torch.int64) if policy == "index" else None,
            no_eviction_next_index_dev=torch.zeros(len(dims), dtype=torch.int64) if policy == "index" else None,
        )

    names = [f"t{number}" for number in range(len(dims))]
    if layout == "hybrid":
        hybrid = HybridStorage(state(8, policy), state(8, policy), max_capacity=max_capacity)
        return BatchedDynamicEmbeddingTablesV2(names, hybrid)
    storage = DynamicEmbStorage(state(8, policy), max_capacity=max_capacity)
    if layout == "single":
        return BatchedDynamicEmbeddingTablesV2(names, storage)
    # A cache never uses rows as scores: it must evict.
    cache_policy = "timestamp" if policy == "index" else policy
    cache = DynamicEmbCache(state(cache_rows - 2, cache_policy, overflow=2))
    return BatchedDynamicEmbeddingTablesV2(names, storage, cache)
