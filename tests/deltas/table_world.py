"""A small table under all kinds of changes, beside a dict that does the same and says what the table must hold.

Every write brings values that were never there before, so a row that a save takes from an earlier one is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import asyncckpt
from tests.worlds.rows import rows_of
from tests.worlds.table_beside_dict import TableBesideDict

DIM = 2
CACHE_ROWS = 5
GROWTH_IDS = 30
KINDS: dict[str, Any] = {
    "optimizer_slots": {"sum": (torch.float64, ())},
    "metadata": {"last_seen": torch.int64},
}

Row = tuple[float, float, float, int]  # Two numbers of the embedding, sum, last_seen.
Rows = dict[int, Row]

FIRST_ROW: Row = (0.0, 0.0, 0.0, 0)


def new_table(name: str, *, capacity: int = 4) -> asyncckpt.HashTable:
    return asyncckpt.HashTable(name, DIM, capacity=capacity, **KINDS)


def new_levels(name: str, *, policy: Any = "lru") -> asyncckpt.MultiLevelTable:
    return asyncckpt.MultiLevelTable(name, DIM, cache_rows=CACHE_ROWS, policy=policy, capacity=4, **KINDS)


class TableWorld(TableBesideDict):
    """The table and the dict. `rows` is what the table must hold; `number` is the newest value."""

    def __init__(self, table: asyncckpt.HashTable | asyncckpt.MultiLevelTable) -> None:
        super().__init__(table)
        self.number = 0

    @property
    def batch_max(self) -> int:
        """Ids that one lookup may have: more would make the cache larger."""
        return CACHE_ROWS if isinstance(self.table, asyncckpt.MultiLevelTable) else 1 << 20

    def insert(self, ids: Sequence[int]) -> None:
        """Set whole rows, new ones or known ones."""
        rows = self._new_rows(len(ids))
        values = _tensors(rows)
        self.table.insert(np.array(ids, dtype=np.int64), values.pop("embedding"), **values)
        self.rows |= dict(zip(ids, rows, strict=True))

    def insert_embeddings(self, ids: Sequence[int]) -> None:
        """Set the embedding alone; slots of known ids stay."""
        rows = self._new_rows(len(ids))
        self.table.insert(np.array(ids, dtype=np.int64), _tensors(rows)["embedding"])
        for id, row in zip(ids, rows, strict=True):
            self.rows[id] = (*row[:2], *self.rows.get(id, FIRST_ROW)[2:])

    def look_up(self, ids: Sequence[int]) -> None:
        """As a forward in training does: absent ids get a row."""
        for part in self._batches(ids):
            self.table.lookup(part)
        for id in ids:
            self.rows.setdefault(id, FIRST_ROW)

    def train(self, ids: Sequence[int]) -> None:
        """Look up and update in place, as an optimizer does."""
        for part in self._batches(ids):
            self._write(self.table.lookup(part), part.tolist())

    def find_and_touch(self, ids: Sequence[int]) -> None:
        """Update rows past torch, which counts no such write, and say so; absent ids give -1, which is passed over."""
        for part in self._batches(ids):
            rows = self.table.lookup(part, insert=False)
            self.table.touch(rows)
            known, columns = rows >= 0, self._next_values(rows, part.tolist())
            for name, column in self._live().items():
                column.numpy()[rows[known]] = columns[name][known]

    def write_in_place(self, ids: Sequence[int]) -> None:
        """Update rows in place as code does that knows nothing of marks."""
        for part in self._batches(ids):
            rows = self.table.lookup(part, insert=False)
            known, columns = rows >= 0, self._next_values(rows, part.tolist())
            for name, column in self._live().items():
                column[rows[known]] = columns[name][known]

    def see(self, ids: Sequence[int]) -> None:
        """Write one metadata column only."""
        for part in self._batches([id for id in ids if id in self.rows]):
            self.number += 1
            with self.table.rows(part) as rows:
                rows["last_seen"] = self.number
            for id in part.tolist():
                self.rows[id] = (*self.rows[id][:3], self.number)

    def hold(self, ids: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Rows that code keeps across a cut; to be written by `write_held` before anything else is looked up."""
        held = [id for id in ids if id in self.rows][: self.batch_max]
        return self.table.lookup(np.array(held, dtype=np.int64), insert=False), held

    def write_held(self, held: tuple[torch.Tensor, list[int]]) -> None:
        self._write(*held)

    def grow(self) -> None:
        """More new ids than there is room for."""
        begin = 1000 + self.number
        self.insert(range(begin, begin + GROWTH_IDS))

    def was_loaded(self, rows: Rows) -> None:
        """The table was filled by a load."""
        self.rows = dict(rows)

    def check(self) -> None:
        assert rows_of(self.table) == self.rows

    def _new_rows(self, count: int) -> list[Row]:
        numbers = range(self.number + 1, self.number + 1 + count)
        self.number += count
        return [(float(n), -float(n), n + 0.5, n) for n in numbers]

    def _batches(self, ids: Sequence[int]) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        every = self.batch_max
        return [np.array(ids[at : at + every], dtype=np.int64) for at in range(0, len(ids), every)]

    def _write(self, rows: torch.Tensor, ids: Sequence[int]) -> None:
        columns = self._next_values(rows, ids)

        def write(values: Any) -> None:
            for name, column in columns.items():
                values[name] = column

        self.table.update(rows, write)

    def _next_values(self, rows: torch.Tensor, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """New columns for rows of ids; those that are there hold them from now on."""
        values = self._new_rows(len(ids))
        self.rows |= {id: row for id, row, is_there in zip(ids, values, (rows >= 0).tolist(), strict=True) if is_there}
        return _tensors(values)

    def _live(self) -> dict[str, torch.Tensor]:
        return {"embedding": self.table.embedding} | {name: self.table.slot(name) for name in ("sum", "last_seen")}


def _tensors(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    return {
        "embedding": torch.tensor([row[:2] for row in rows], dtype=torch.float32).reshape(len(rows), DIM),
        "sum": torch.tensor([row[2] for row in rows], dtype=torch.float64),
        "last_seen": torch.tensor([row[3] for row in rows], dtype=torch.int64),
    }
