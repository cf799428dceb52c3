"""A table as a stranger might write it: a dict of ids over tensors, with or without a small cache level.

It shares no code with the tables of the library. `OpenTinyTable` can stay open: it copies everything at once, which is
slow and right.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.model.table import CacheCopy, Column, Role, TableSchema
from asyncckpt.native import core
from asyncckpt.testing import Contents, TableSuite

ROWS_MAX = 300
LOCK_S_MAX = 60.0
SCHEMA = TableSchema(
    columns=(
        Column(name="id", dtype=torch.int64, row_shape=(), role=Role.ID),
        Column(name="weight", dtype=torch.float32, row_shape=(3,), role=Role.WEIGHT),
        Column(name="momentum", dtype=torch.bfloat16, row_shape=(), role=Role.OPTIMIZER),
        Column(name="seen", dtype=torch.int64, row_shape=(), role=Role.METADATA),
    )
)
VALUE_COLUMNS = [column.name for column in SCHEMA.columns[1:]]


def new_columns(rows_count: int) -> dict[str, torch.Tensor]:
    return {c.name: torch.zeros((rows_count, *c.row_shape), dtype=c.dtype) for c in SCHEMA.columns}


class TinyTable:
    """Rows in tensors of a fixed size; `cache_rows` of them have their newest values in a cache level."""

    def __init__(self, *, cache_rows: int = 0, shard: tuple[int, int] = (0, 1)) -> None:
        self.name = "tiny"
        self.shard = shard
        self.lock = threading.Lock()
        self.rows: dict[int, int] = {}
        self.free = list(range(ROWS_MAX))[::-1]
        self.stored = new_columns(ROWS_MAX)
        self.cached = new_columns(cache_rows)
        self.cache_map = torch.full((cache_rows,), -1)
        self.next_victim = 0
        self.flipped = self.scratch = torch.empty(0)  # For the broken ones.

    def schema(self) -> TableSchema:
        return SCHEMA

    def begin_cut(self) -> Any:
        self.hold()
        return TinyCut(self) if len(self.cache_map) else PlainTinyCut(self)

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> Any:
        self.hold()
        self.flush()
        if clear:
            self.clear()
        return TinyLoad(self)

    def hold(self) -> None:
        if not self.lock.acquire(timeout=LOCK_S_MAX):  # No assert: these are left out by python -O.
            raise AssertionError("it was waited for in vain")

    # -- training; the lock is held --

    def row(self, id: int) -> int:
        """The row of an id, a new one of zeros if need be."""
        if id not in self.rows:
            row = self.rows[id] = self.free.pop()
            for name in VALUE_COLUMNS:
                self.stored[name][row] = 0
            self.stored["id"][row] = id
        return self.rows[id]

    def write(self, id: int, values: Mapping[str, torch.Tensor]) -> None:
        """Set values of an id, in the cache if there is one; the row cached longest makes room."""
        row = self.row(id)
        if not len(self.cache_map):
            for name, value in values.items():
                self.stored[name][row] = value
            return
        if row not in self.cache_map:
            self.write_back(self.next_victim)
            for name in VALUE_COLUMNS:
                self.cached[name][self.next_victim] = self.stored[name][row]
            self.cache_map[self.next_victim] = row
            self.next_victim = (self.next_victim + 1) % len(self.cache_map)
        at = self.cache_map.tolist().index(row)
        for name, value in values.items():
            self.cached[name][at] = value

    def write_back(self, at: int) -> None:
        row = int(self.cache_map[at])
        if row >= 0:
            for name in VALUE_COLUMNS:
                self.stored[name][row] = self.cached[name][at]
        self.cache_map[at] = -1

    def flush(self) -> None:
        for at in range(len(self.cache_map)):
            self.write_back(at)

    def remove(self, id: int) -> None:
        row = self.rows.pop(id)
        self.cache_map[self.cache_map == row] = -1
        self.free.append(row)

    def clear(self) -> None:
        for id in list(self.rows):
            self.remove(id)


class PlainTinyCut:
    """Holds the lock until the fence."""

    def __init__(self, table: TinyTable) -> None:
        self.table = table
        self.fenced = False
        used = sorted(table.rows.values())
        self.runs: NDArray[np.int64] = np.array([[row, row + 1] for row in used], dtype=np.int64).reshape(-1, 2)
        self.rows_count = len(used)

    def column(self, name: str) -> torch.Tensor:
        return self.table.stored[name]

    def fence(self) -> None:
        if not self.fenced:
            self.fenced = True
            self.table.lock.release()

    def end(self, ok: bool) -> None:
        self.fence()


class TinyCut(PlainTinyCut):
    """Has a cache level: an OverlaidCut by its members."""

    @property
    def cache_map(self) -> torch.Tensor:
        return self.table.cache_map

    def cached_column(self, name: str) -> torch.Tensor | None:
        return None if name == "id" else self.table.cached[name]


class OpenTinyCut(TinyCut):
    """Can stay open: an DeferredCut by its members."""

    def be_deferred(self, copy: CacheCopy, *, window_rows: int) -> None:
        self.window_rows = window_rows
        self.kept = {name: column.clone() for name, column in self.table.stored.items()}
        self.copy = copy

    def most_urgent(self, left: Sequence[int]) -> int:
        return left[0]

    def export(self, index: int, targets: Mapping[str, int]) -> None:
        rows = self.runs[index * self.window_rows : (index + 1) * self.window_rows, 0]
        places = {int(row): at for at, row in enumerate(self.copy.map)}
        for name, address in targets.items():
            values = self.kept[name][rows].clone()
            for number, row in enumerate(rows.tolist()):
                if row in places and name in self.copy.columns:
                    values[number] = self.copy.columns[name][places[row]]
            put(values, address)


def put(values: torch.Tensor, address: int) -> None:
    """Copy a tensor to an address."""
    core.copy(np.array([[values.data_ptr(), address, values.nbytes]], dtype=np.uint64))


class OpenTinyTable(TinyTable):
    def begin_cut(self) -> Any:
        self.hold()
        return OpenTinyCut(self)


class TinyLoad:
    def __init__(self, table: TinyTable) -> None:
        self.table = table
        self.ended = False

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.table.row(id) for id in ids.tolist()], dtype=torch.int64)

    def column(self, name: str) -> torch.Tensor:
        return self.table.stored[name]

    def end(self, ok: bool) -> None:
        if self.ended:
            return
        self.ended = True
        if not ok:
            self.table.clear()
        self.table.lock.release()


class TinySuite(TableSuite):
    """The suite of a TinyTable; `table_class` is what the tests of broken tables replace."""

    table_class: type[TinyTable] = TinyTable
    cache_rows = 0

    def make_table(self) -> TinyTable:
        return self.table_class(cache_rows=self.cache_rows)

    def make_shard(self, index: int, count: int) -> TinyTable:
        return self.table_class(cache_rows=self.cache_rows, shard=(index, count))

    def train(self, table: Any, step: int, seed: int) -> None:
        random = np.random.default_rng([seed, step])
        table.hold()
        try:
            for id in random.integers(-30, 30, size=12).tolist():
                values = {
                    "weight": torch.from_numpy(random.standard_normal(3).astype(np.float32)),
                    "momentum": torch.tensor(float(random.standard_normal()), dtype=torch.bfloat16),
                    "seen": torch.tensor(step + 1),
                }
                table.write(id * 2**40 - 7, values)
            for id in sorted(table.rows)[step % 3 :: 9]:
                table.remove(id)
        finally:
            table.lock.release()

    def contents(self, table: Any) -> Contents:
        table.hold()
        try:
            rows = torch.tensor(list(table.rows.values()), dtype=torch.int64)
            found = {name: column[rows] for name, column in table.stored.items()}
            for at, row in enumerate(table.cache_map.tolist()):
                for name in VALUE_COLUMNS if row >= 0 else ():
                    found[name][rows == row] = table.cached[name][at]
            return found
        finally:
            table.lock.release()

    def internals(self, table: Any) -> Contents:
        rows = torch.tensor(sorted(table.rows.values()), dtype=torch.int64)
        held = table.cache_map >= 0
        return {
            "map": table.cache_map,
            **{f"stored {name}": column[rows] for name, column in table.stored.items()},
            **{f"cached {name}": column[held] for name, column in table.cached.items()},
        }
