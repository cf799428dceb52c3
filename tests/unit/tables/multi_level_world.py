"""A MultiLevelTable beside a dict that does the same, and a cut of it read the way a save reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from asyncckpt.model.table import CacheCopy, DeferredCut
from asyncckpt.tables import HashTable, MultiLevelTable, Slot, Uniform
from tests.worlds.rows import batch
from tests.worlds.table_beside_dict import TableBesideDict

DIM = 3
INITIALIZER = Uniform(0.5, seed=7)
SUM_FILL = 0.25
COLUMNS = ("embedding", "sum", "flags", "last_seen")

# embedding, sum, flags, last_seen of one id.
Row = tuple[tuple[float, ...], float, tuple[int, ...], int]
Rows = dict[int, Row]
Op = tuple[str, Any]

IDS = st.integers(-9, 9)
BATCHES = st.lists(IDS, max_size=10)
OPS = st.one_of(
    st.tuples(st.just("train"), BATCHES),
    st.tuples(st.just("train"), BATCHES),
    st.tuples(st.just("write"), BATCHES),
    st.tuples(st.just("find"), BATCHES),
    st.tuples(st.just("prefetch"), BATCHES),
    st.tuples(st.just("remove"), st.lists(IDS, max_size=4)),
    st.tuples(st.just("evict"), st.integers(0, 12)),
)
CACHE_ROWS = st.integers(1, 12)
POLICIES = st.sampled_from(["lru", "lfu"])


# Rows of 12, 8, 3 and 8 bytes, so that no two of the columns are aligned alike.
ARGUMENTS: Any = {
    "optimizer_slots": {"sum": Slot(torch.float64, (), SUM_FILL), "flags": (torch.int8, (3,))},
    "metadata": {"last_seen": torch.int64},
    "capacity": 1,
    "initializer": INITIALIZER,
}


def new_table(**options: Any) -> MultiLevelTable:
    return MultiLevelTable("user", DIM, **{"cache_rows": 4, **ARGUMENTS, **options})


def new_hash_table(**options: Any) -> HashTable:
    return HashTable("user", DIM, **{**ARGUMENTS, **options})


def first_row(id: int) -> Row:
    embedding = INITIALIZER.rows(np.array([id], dtype=np.int64), dim=DIM)[0]
    return tuple(embedding.tolist()), SUM_FILL, (0, 0, 0), 0


class LevelsBesideDict(TableBesideDict):
    """The table and the dict; `rows` is what the table must hold."""

    def __init__(self, **options: Any) -> None:
        super().__init__(new_table(**options))
        self.step = 0

    def apply(self, op: Op) -> None:
        """Do one thing to both, and compare what can be seen of it."""
        name, argument = op
        getattr(self, name)(argument)

    def train(self, ids: Sequence[int]) -> None:
        """Look ids up, giving absent ones a row, and update their cache rows in place, as an optimizer does."""
        self.step += 1
        for id in ids:
            self.rows.setdefault(id, first_row(id))
        self.table.lookup(batch(ids))
        distinct = sorted(set(ids))
        cache_rows = self.table.lookup(batch(distinct), insert=False)
        assert (cache_rows >= 0).all()
        if self.step % 3 == 0:
            self.table.embedding[cache_rows] += float(self.step)
            self.table.slot("sum")[cache_rows] += 1.0
            self.table.slot("flags")[cache_rows] = self.step % 100
            self.table.slot("last_seen")[cache_rows] = self.step
        else:
            self.table.update(cache_rows, self._train_rows)
        for id in distinct:
            embedding, total, _, _ = self.rows[id]
            moved = np.array(embedding, dtype=np.float32) + np.float32(self.step)
            self.rows[id] = tuple(moved.tolist()), total + 1.0, (self.step % 100,) * 3, self.step

    def _train_rows(self, rows: Any) -> None:
        rows.embedding += float(self.step)
        rows["sum"] += 1.0
        rows["flags"], rows["last_seen"] = self.step % 100, self.step

    def write(self, ids: Sequence[int]) -> None:
        """Insert values; the last of equal ids wins."""
        self.step += 1
        values = torch.arange(len(ids), dtype=torch.float32) + 1000.0 * self.step
        self.table.insert(batch(ids), values.unsqueeze(1).expand(-1, DIM), sum=-values.double())
        for id, value in zip(ids, values.tolist(), strict=True):
            _, _, flags, seen = self.rows.get(id, first_row(id))
            self.rows[id] = (value,) * DIM, -value, flags, seen

    def prefetch(self, ids: Sequence[int]) -> None:
        assert self.table.prefetch(batch(ids)) <= len(set(ids) & set(self.rows))

    def check(self) -> None:
        """The table holds what the dict does, and its cache is sound."""
        assert len(self.table) == len(self.rows)
        assert contents(self.table) == self.rows
        cache_map = self.table._cache.host_rows
        held = cache_map[cache_map >= 0].tolist()
        assert len(set(held)) == len(held) == self.table.statistics().cache.cached_count


def contents(table: MultiLevelTable) -> Rows:
    """All that a table holds, without moving a row."""
    ids = table.ids()
    values = table.read(ids)
    return rows_of(ids, values)


def rows_of(ids: torch.Tensor, values: dict[str, torch.Tensor]) -> Rows:
    rows = zip(*(values[name].tolist() for name in COLUMNS), strict=True)
    found = {
        id: (tuple(embedding), total, tuple(flags), seen)
        for id, (embedding, total, flags, seen) in zip(ids.tolist(), rows, strict=True)
    }
    assert len(found) == len(ids)
    return found


class Saving:
    """An open cut of a table, exported into memory of its own. `expected` is what the cut must come out as."""

    def __init__(self, world: LevelsBesideDict, *, window_rows: int) -> None:
        self.expected = dict(world.rows)
        self.cut: DeferredCut = world.table.begin_cut()
        self.window_rows = window_rows
        rows_count = self.cut.rows_count
        self.left = list(range(-(-rows_count // window_rows)))
        self.ids = torch.zeros(rows_count, dtype=torch.int64)
        self.values = {
            column.name: torch.zeros((rows_count, *column.row_shape), dtype=column.dtype)
            for column in world.table.schema().columns[1:]
        }
        columns = {}
        for name in COLUMNS:
            cached = self.cut.cached_column(name)
            assert cached is not None
            columns[name] = cached.clone()
        copy = CacheCopy(map=self.cut.cache_map.numpy().copy(), columns=columns)
        self.cut.be_deferred(copy, window_rows=window_rows)
        self.cut.fence()

    def export(self, index: int) -> None:
        """Export one window that is left."""
        self.left.remove(index)
        begin = index * self.window_rows
        targets = {name: value[begin:].data_ptr() for name, value in {"id": self.ids, **self.values}.items()}
        self.cut.export(index, targets)

    def export_some(self, choice: int) -> None:
        """Export one of the windows that are left, if there is any: the table's choice at 0."""
        if self.left:
            self.export(self.cut.most_urgent(self.left) if choice == 0 else self.left[choice % len(self.left)])

    def end(self) -> Rows:
        """Export the rest and return the rows that came out."""
        while self.left:
            self.export_some(0)
        self.cut.end(True)
        return rows_of(self.ids, self.values)
