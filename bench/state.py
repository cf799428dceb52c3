"""The state that is saved: hash tables (ids, embedding rows, Adagrad rows) and dense tensors.

Peers see plain tensors; asyncckpt sees the same tables as `asyncckpt.HashTable`. Shapes, bytes and updates are the same
for all. Everything is touched when it is made: first touch of memory would otherwise be measured instead of the save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

GIB = 1 << 30
TABLES_COUNT = 8
DENSE_COUNT = 200
DIM = 32
ROW_BYTES = 8 + 2 * 4 * DIM  # id, embedding row, Adagrad row
DENSE_SHARE = 1 / 8
FILL_BLOCK_COUNT = 1 << 20
RANDOM_SHIFT_MAX = 4096
EPS = 1e-8


@dataclass(frozen=True)
class Table:
    """One table. `rows[i]` is the row of `ids[i]`; a plain table keeps row i at i."""

    name: str
    ids: torch.Tensor
    rows: torch.Tensor
    embedding: torch.Tensor
    adagrad: torch.Tensor
    hashtable: Any = None  # asyncckpt.HashTable, which owns embedding and adagrad, or None

    def update(self, rows: Any, gradient: torch.Tensor, *, lr: float) -> None:
        """Do a step of Adagrad on distinct rows: by the table, or in place on plain tensors."""
        if self.hashtable is not None:
            self.hashtable.update(rows, adagrad(gradient, lr=lr))
            return
        sums = self.adagrad.index_select(0, rows).addcmul_(gradient, gradient)
        self.adagrad.index_copy_(0, rows, sums)
        values = self.embedding.index_select(0, rows)
        self.embedding.index_copy_(0, rows, values.addcdiv_(gradient, sums.sqrt_().add_(EPS), value=-lr))

    def columns(self) -> dict[str, torch.Tensor]:
        return {"id": self.ids, "embedding": self.embedding, "adagrad": self.adagrad}

    def content(self) -> dict[str, torch.Tensor]:
        """Return a copy of the columns; those of a HashTable in the order of the ids, since a load may move rows."""
        if self.hashtable is None:
            return {name: column.clone() for name, column in self.columns().items()}
        ids = torch.as_tensor(self.hashtable.ids()).sort().values
        rows = torch.as_tensor(self.hashtable.lookup(ids, insert=False))
        return {"id": ids, "embedding": self.embedding[rows], "adagrad": self.adagrad[rows]}


def adagrad(gradient: torch.Tensor, *, lr: float) -> Callable[[Any], object]:
    """Return a step of Adagrad for `update` of a table with the slot `sum`."""

    def step(rows: Any) -> None:
        sums = rows["sum"].addcmul_(gradient, gradient)
        rows.embedding.addcdiv_(gradient, sums.sqrt().add_(EPS), value=-lr)

    return step


@dataclass(frozen=True)
class State:
    """Everything that one checkpoint holds. optimizers: nothing but their steps changes the dense tensors."""

    tables: tuple[Table, ...]
    dense: Mapping[str, torch.Tensor]
    bytes: int
    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def hashtables(self) -> dict[str, Any]:
        return {table.name: table.hashtable for table in self.tables if table.hashtable is not None}

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """Return what is not in a HashTable, by name."""
        plain = [table for table in self.tables if table.hashtable is None]
        columns = {f"{table.name}.{name}": column for table in plain for name, column in table.columns().items()}
        return columns | dict(self.dense)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all of it as plain tensors; only for a state without HashTable."""
        assert not self.hashtables()
        return self.plain_tensors()

    def copy(self) -> dict[str, torch.Tensor]:
        """Return a copy of the whole content by name, independent of where rows lie: the reference of a cut."""
        columns = {f"{table.name}.{name}": data for table in self.tables for name, data in table.content().items()}
        return columns | {name: tensor.clone() for name, tensor in self.dense.items()}

    def clear(self) -> None:
        """Overwrite the rows and tensors, so that a load that fills nothing is seen."""
        for table in self.tables:
            table.embedding.fill_(-1)
            table.adagrad.fill_(-1)
        for tensor in self.dense.values():
            tensor.fill_(-1)


def differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Name the tensors that are not bit for bit the same."""
    same = {
        name: tensor.shape == expected[name].shape and torch.equal(_bits(tensor), _bits(expected[name]))
        for name, tensor in found.items()
        if name in expected
    }
    return sorted(name for name in found.keys() | expected.keys() if not same.get(name, False))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)  # NaN is equal to itself here


def recommender_state(state_bytes: int, *, hashtables: bool, filled: bool = True) -> State:
    """Make the 8 tables and 200 dense tensors. `filled=False` makes a target to load into: same shapes, no ids yet."""
    rows_count = max(64, int(state_bytes * (1 - DENSE_SHARE)) // TABLES_COUNT // ROW_BYTES)
    tables = recommender_tables(rows_count, hashtables=hashtables, filled=filled)
    dense_numbers = max(64, int(state_bytes * DENSE_SHARE) // DENSE_COUNT // 4)
    dense = dense_tensors(DENSE_COUNT, dense_numbers * 4)
    total = TABLES_COUNT * rows_count * ROW_BYTES + DENSE_COUNT * dense_numbers * 4
    return State(tables=tables, dense=dense, bytes=total)


def recommender_tables(rows_count: int, *, hashtables: bool, filled: bool) -> tuple[Table, ...]:
    """Make the 8 tables, of `rows_count` rows each."""
    make = _hashtable if hashtables else _plain_table
    return tuple(make(f"table{index}", index, rows_count, filled) for index in range(TABLES_COUNT))


def tensors_state(count: int, tensor_bytes: int) -> State:
    """Make a state of `count` equal tensors and no tables."""
    return State(tables=(), dense=dense_tensors(count, tensor_bytes), bytes=count * tensor_bytes)


class Nudge(torch.optim.Optimizer):
    """Adds to every parameter: a step that reads and writes all of the state, and needs no gradients."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            torch._foreach_add_(group["params"], 1e-3)


def stepped_state(count: int, tensor_bytes: int) -> State:
    """Make a state of `count` equal tensors that one optimizer changes."""
    dense = dense_tensors(count, tensor_bytes)
    optimizer = Nudge(list(dense.values()))
    return State(tables=(), dense=dense, bytes=count * tensor_bytes, optimizers=(optimizer,))


def dense_tensors(count: int, tensor_bytes: int) -> dict[str, torch.Tensor]:
    return {f"dense{index:05d}": _fill(torch.empty(tensor_bytes // 4), seed=index) for index in range(count)}


def _plain_table(name: str, index: int, rows_count: int, filled: bool) -> Table:
    ids = _ids(rows_count, seed=index)
    embedding = _fill(torch.empty(rows_count, DIM), seed=index)
    adagrad = _fill(torch.empty(rows_count, DIM), seed=1000 + index).abs_()
    if not filled:
        ids.zero_()
    return Table(name=name, ids=ids, rows=torch.arange(rows_count), embedding=embedding, adagrad=adagrad)


def _hashtable(name: str, index: int, rows_count: int, filled: bool) -> Table:
    import asyncckpt  # Late: only this peer needs the library.

    ids = _ids(rows_count, seed=index)
    table = asyncckpt.HashTable(name, DIM, optimizer_slots={"sum": (DIM,)}, capacity=rows_count)
    rows = torch.as_tensor(table.lookup(ids))
    if not filled:
        table.clear()  # Its id map is touched, like every other target's memory.
    embedding, adagrad = table.embedding, table.slot("sum")
    _fill(embedding, seed=index)
    _fill(adagrad, seed=1000 + index).abs_()
    return Table(name=name, ids=ids, rows=rows, embedding=embedding, adagrad=adagrad, hashtable=table)


def _ids(count: int, *, seed: int) -> torch.Tensor:
    """Make `count` distinct ids that look like 64-bit hashes, negative ones among them."""
    # An odd factor permutes the integers modulo 2**64, so no id comes twice.
    return (torch.arange(count) + seed * count) * -7046029254386353131 + 1


def _fill(tensor: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Fill with numbers that no disk can compress: one random block, scaled anew for every block of the tensor."""
    # A view: a rolled copy per tensor would leave a hole of its size in the heap behind each of thousands of tensors.
    block = _RANDOM_BLOCK[seed % RANDOM_SHIFT_MAX :]
    for index, part in enumerate(torch.split(tensor.view(-1), FILL_BLOCK_COUNT)):
        torch.mul(block[: part.numel()], 0.01 + 0.001 * (index + seed % 7), out=part)
    return tensor


_RANDOM_BLOCK = torch.randn(FILL_BLOCK_COUNT + RANDOM_SHIFT_MAX, generator=torch.Generator().manual_seed(1))
