"""MultiLevelTable passes the contract suite: cache sizes from one row to all, both policies, admission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.tables.multi_level import MultiLevelTable
from asyncckpt.tables.touched_rows import RowWatchers
from asyncckpt.testing import Contents, TableSuite
from tests.testing.one_test import FAILURES, run_one
from tests.testing.test_hash_table_suite import ids_of, random_values

# Cache rows from one to all, and host rows to begin with: where there are few, training waits for open cuts to grow.
SLOW = [pytest.param(*level, marks=pytest.mark.slow) for level in [(7, 256, "lfu"), (64, 256, "lfu")]]
LEVELS = [(1, 256, "lfu"), (7, 16, "lru"), *SLOW]


class MultiLevelSuite(TableSuite):
    """Lookups that insert and evict, prefetches, updates of cached and of uncached rows, removals."""

    device = "cpu"
    cache_rows = 8
    capacity = 256
    policy: Any = "lru"
    admit_after = 1

    def make_table(self, shard: tuple[int, int] = (0, 1)) -> MultiLevelTable:
        return MultiLevelTable(
            "user",
            4,
            cache_rows=self.cache_rows,
            optimizer_slots={"sum": (), "momentum": torch.float64},
            metadata={"last_seen": torch.int64},
            initializer=asyncckpt.nn.Uniform(0.1, seed=3),
            capacity=self.capacity,
            policy=self.policy,
            admit_after=self.admit_after,
            shard=shard,
            device=self.device,
        )

    def make_shard(self, index: int, count: int) -> MultiLevelTable:
        return self.make_table(shard=(index, count))

    @pytest.fixture(autouse=True)
    def _quiet(self, recwarn: pytest.WarningsRecorder) -> None:
        """A cache smaller than a batch grows, with a warning."""

    def train(self, table: Any, step: int, seed: int) -> None:
        random = np.random.default_rng([seed, step])
        table.prefetch(ids_of(random, 4))
        for _ in range(3):
            ids = ids_of(random, 5)
            table.lookup(ids)
            with table.rows(ids) as rows:
                for column in table.schema().columns[1:]:
                    rows[column.name] = random_values(random, rows[column.name], len(ids))
        given = ids_of(random, 3)
        table.insert(given, random_values(random, table.embedding, len(given)))
        table.remove(ids_of(random, 5))

    def contents(self, table: Any) -> Contents:
        ids = table.ids()
        return {"id": ids, **table.read(ids)}

    def internals(self, table: Any) -> Contents:
        cut = table.begin_cut()
        try:
            held = cut.cache_map >= 0
            runs = [torch.arange(begin, end) for begin, end in cut.runs.tolist()]
            rows = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)
            found = {"map": cut.cache_map.clone(), "runs": cut.runs}
            for column in table.schema().columns[1:]:
                found[f"host {column.name}"] = cut.column(column.name)[rows]
                cached = cut.cached_column(column.name)
                assert cached is not None
                found[f"cached {column.name}"] = cached[: len(held)][held]
            return found
        finally:
            cut.end(True)


@pytest.mark.parametrize(("cache_rows", "capacity", "policy"), LEVELS)
class TestMultiLevelTable(MultiLevelSuite):
    @pytest.fixture(autouse=True)
    def _use(self, cache_rows: int, capacity: int, policy: str) -> None:
        self.cache_rows = cache_rows
        self.capacity = capacity
        self.policy = policy


class TestAdmission(MultiLevelSuite):
    """An id gets its row at its second lookup; the counts of candidates are in the same checkpoint."""

    admit_after = 2


@pytest.mark.parametrize(
    "test",
    ["test_windows_hold_the_cut_while_training_goes_on", "test_two_cuts_are_open_at_once"],
)
def test_without_first_touch_the_suite_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str) -> None:
    """Switched off: nobody tells an open cut of rows that are about to change."""
    suite = MultiLevelSuite()
    run_one(suite, test, tmp_path / "sound")
    monkeypatch.setattr(RowWatchers, "rows_change", lambda self, rows, columns=None: None)
    with pytest.raises(FAILURES):
        run_one(suite, test, tmp_path / "off")
