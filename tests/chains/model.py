"""Random chains beside a dict that tells what they must load as."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from tests.chains.written import Layer, Written, write
from tests.worlds.rows import rows_of

Row = tuple[float, ...]
Rows = dict[int, Row]
DIM = 3


def new_table(name: str = "user", shard: tuple[int, int] = (0, 1)) -> asyncckpt.HashTable:
    return asyncckpt.HashTable(name, DIM, optimizer_slots={"sum": ()}, shard=shard, capacity=4)


def row(value: float) -> Row:
    return (value,) * (DIM + 1)


def layer_of(rows: Rows, *, removed: tuple[int, ...] = (), whole: bool = False) -> Layer:
    """A layer whose rows are `embedding` and, last, `sum`."""
    values = torch.tensor(list(rows.values()), dtype=torch.float32).reshape(len(rows), DIM + 1)
    columns = {"id": torch.tensor(list(rows), dtype=torch.int64), "embedding": values[:, :DIM], "sum": values[:, DIM]}
    return Layer(columns=columns, removed=removed, whole=whole)


def load(root: Path, step: int | None = None, *, shard: tuple[int, int] = (0, 1), **options: Any) -> Rows:
    """The rows of the table `user`, loaded into a fresh one."""
    table = new_table(shard=shard)
    report = asyncckpt.Loader(root, {"user": table}, step=step, **options).load()
    assert report.rows == {"user": len(table)}
    return rows_of(table)


@dataclass
class RandomChain:
    """A full checkpoint and deltas on top of it; `states` tells what each step must load as."""

    root: Path
    seed: int
    write_options: dict[str, Any] = field(default_factory=dict)
    states: dict[int, Rows] = field(default_factory=dict)
    written: dict[int, Written] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def grow(self, deltas_count: int, *, ids_count: int = 60) -> None:
        """Write the full checkpoint of step 10 and deltas of steps 11, 12, ..."""
        first = {id: self._row() for id in self.random.sample(range(-ids_count, ids_count), ids_count)}
        self._write(10, layer_of(first, whole=True), first, None)
        for step in range(11, 11 + deltas_count):
            self._delta(step, ids_count)

    def _delta(self, step: int, ids_count: int) -> None:
        before = self.states[step - 1]
        ids = range(-ids_count, ids_count)
        removed = {id for id in self.random.sample(ids, self.random.randrange(0, 12)) if id in before}
        touched = self.random.sample(ids, self.random.randrange(0, 20))  # Changed, new, and born again.
        rows = {id: self._row() for id in touched}
        kept = {id: row for id, row in before.items() if id not in removed}
        if self.random.random() < 0.15:  # The table is saved whole.
            layer = layer_of(kept | rows, whole=True)
        else:
            layer = layer_of(rows, removed=tuple(self.random.sample(sorted(removed), len(removed))))
        self._write(step, layer, kept | rows, self.written[step - 1])

    def _write(self, step: int, layer: Layer, state: Rows, parent: Written | None) -> None:
        parents = parent.chain if parent is not None else ()
        self.states[step] = state
        self.written[step] = write(self.root, step, {"user": layer}, parents=parents, **self.write_options)

    def _row(self) -> Row:
        return tuple(float(self.random.randrange(-1000, 1000)) for _ in range(DIM + 1))
