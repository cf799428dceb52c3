"""A state of several ranks in one process: what each rank saves, and what ranks of any number load into.

Everything follows from names, ids and versions, so that every bit of a load can be told.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.sharded import Piece, Sharded
from tests.chains.model import DIM, Rows, new_table
from tests.chains.written import Written
from tests.end_to_end.merged_ranks import ALONE, Boxes, as_boxes, merge
from tests.worlds.bits import taken
from tests.worlds.rows import rows_of

SPREAD = {"rows": (11, 3), "boxes": (7, 6), "deep": (3, 4, 5), "thin": (2, 9)}
DTYPES = {"rows": torch.float32, "boxes": torch.bfloat16, "deep": torch.complex64, "thin": torch.bool}
IDS = [*range(-40, 60), -(2**63), 2**63 - 1, 2**40]
REPLICAS = {"replica": 0, "scalar": 1, "model.weight": 1, "model.bias": 0}
ALWAYS = asyncckpt.DeltaPolicy(deltas_max=1000, bytes_share_max=1e9)


def whole(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    values = torch.randn(SPREAD[name], generator=generator)
    return values > 0 if DTYPES[name] is torch.bool else values.to(DTYPES[name])


def box_of(name: str, rank: int, ranks_count: int) -> tuple[tuple[int, int], ...]:
    """What a rank has of a tensor: rows, columns, or both; some ranks have nothing."""
    first, second, *others = SPREAD[name]
    if name == "rows":
        return (chunk(first, rank, ranks_count), (0, second))
    if name == "boxes" and ranks_count % 2 == 0:
        return (chunk(first, rank // 2, ranks_count // 2), chunk(second, rank % 2, 2))
    return ((0, first), chunk(second, rank, ranks_count), *((0, size) for size in others))


def chunk(size: int, index: int, count: int) -> tuple[int, int]:
    """As torch.chunk cuts: equal sizes rounded up, so that the last ones may be empty."""
    step = -(-size // count)
    return min(size, step * index), min(size, step * (index + 1))


def row(id: int, version: int = 0) -> tuple[float, ...]:
    return tuple(float((id * 7 + version * 13 + column) % 1009) for column in range(DIM + 1))


def insert(table: asyncckpt.HashTable, rows: Rows) -> None:
    if rows:
        values = torch.tensor(list(rows.values()))
        table.insert(torch.tensor(list(rows)), values[:, :DIM], sum=values[:, DIM])


def owned(rows: Rows, rank: int, ranks_count: int) -> Rows:
    return {id: values for id, values in rows.items() if id % 2**64 % ranks_count == rank}


def state_of(rank: int, ranks_count: int) -> dict[str, Any]:
    """What a rank gives to its Saver; spread tensors are its boxes."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        **{name: taken(whole(name), box_of(name, rank, ranks_count)).clone() for name in SPREAD},
        "replica": torch.arange(10.0),
        "scalar": torch.tensor(2.5),
        "model": model,
        "optim": optimizer,
        "rank": rank,
        "epoch": 3,
    }


def boxes_of(ranks_count: int) -> Boxes:
    found = {}
    for rank in range(ranks_count):
        for name, shape in SPREAD.items():
            found[rank, name] = (tuple(low for low, _ in box_of(name, rank, ranks_count)), shape)
    return found


def writes(ranks_count: int) -> Callable[[int, BlockSpec], BlockSpec | None]:
    """Spread tensors as boxes, empty ones left out; every replica by one rank."""
    boxes = as_boxes(boxes_of(ranks_count))

    def change(rank: int, spec: BlockSpec) -> BlockSpec | None:
        is_spread = spec.name in SPREAD
        if spec.table is None and not is_spread and rank != REPLICAS.get(spec.name, 0) % ranks_count:
            return None
        if is_spread and not math.prod(spec.shape):
            return None
        return boxes(rank, spec)

    return change


def saved_by(path: Path, ranks_count: int, *, step: int = 5) -> Written:
    """A checkpoint of this many ranks, in path / "all"."""
    for rank in range(ranks_count):
        table = new_table(shard=(rank, ranks_count))
        insert(table, owned({id: row(id) for id in IDS}, rank, ranks_count))
        state = state_of(rank, ranks_count)
        with asyncckpt.Saver(
            path=path / f"{rank}", hashtables={"user": table}, tensors=state, durability="none", ranks=ALONE
        ) as saver:
            saver.save(step, metadata={"loss": 0.5})
    (path / "all").mkdir()
    return merge(path / "all", step, [path / f"{rank}" for rank in range(ranks_count)], change=writes(ranks_count))


class Target:
    """What one rank of a job loads into."""

    def __init__(self, rank: int, ranks_count: int) -> None:
        self.rank, self.ranks_count = rank, ranks_count
        self.table = new_table(shard=(rank, ranks_count))
        insert(self.table, owned({id: row(id, 9) for id in (1, 2, 3, 100, 101)}, rank, ranks_count))
        self.boxes = {name: box_of(name, rank, ranks_count) for name in SPREAD}
        self.pieces = {name: torch.ones_like(taken(whole(name), box)) for name, box in self.boxes.items()}
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.5)
        self.plain = {"replica": torch.zeros(10), "scalar": torch.tensor(0.0)}

    @property
    def state(self) -> dict[str, Any]:
        spread = {
            name: Sharded(SPREAD[name], DTYPES[name], (Piece(piece, tuple(low for low, _ in self.boxes[name])),))
            for name, piece in self.pieces.items()
        }
        own = {"model": self.model, "optim": self.optimizer, "rank": -1, "epoch": -1}
        return {**spread, **self.plain, **own}

    def load(self, path: Path, **options: Any) -> asyncckpt.LoadReport:
        place = {"shard_index": self.rank, "shard_num": self.ranks_count}
        return asyncckpt.Loader(path, {"user": self.table}, self.state, **place, **options).load()

    def check(self, expected: Rows | None = None) -> None:
        rows = {id: row(id) for id in IDS} if expected is None else expected
        assert rows_of(self.table) == owned(rows, self.rank, self.ranks_count)
        for name, piece in self.pieces.items():
            assert torch.equal(piece, taken(whole(name), self.boxes[name])), name
        saved = state_of(0, 1)
        assert torch.equal(self.plain["replica"], saved["replica"])
        assert self.plain["scalar"] == 2.5
        assert torch.equal(self.model.weight, saved["model"].weight)
        for mine, theirs in zip(self.model.parameters(), saved["model"].parameters(), strict=True):
            for key, value in saved["optim"].state[theirs].items():
                assert torch.equal(self.optimizer.state[mine][key], value), key


class TrainedRanks:
    """Ranks that save deltas, each for itself, and the checkpoints that they would have made together."""

    def __init__(self, path: Path, ranks_count: int, *, seed: int = 0) -> None:
        self.path, self.ranks_count = path, ranks_count
        self.random = random.Random(seed)
        self.rows: Rows = {}
        self.written: Written | None = None
        self.tables = [new_table(shard=(rank, ranks_count)) for rank in range(ranks_count)]
        self.states = [state_of(rank, ranks_count) for rank in range(ranks_count)]
        self.savers = [
            asyncckpt.Saver(
                path=path / f"{rank}",
                hashtables={"user": table},
                tensors=state,
                deltas=ALWAYS,
                durability="none",
                ranks=ALONE,
            )
            for rank, (table, state) in enumerate(zip(self.tables, self.states, strict=True))
        ]
        self.root.mkdir()

    @property
    def root(self) -> Path:
        return self.path / "all"

    def save(self, step: int) -> None:
        gone = [id for id in IDS if id in self.rows and self.random.random() < 0.1]
        new = {id: row(id, step) for id in IDS if self.random.random() < (0.2 if self.rows else 0.7)}
        self.rows = {id: values for id, values in self.rows.items() if id not in gone} | new
        for rank, table in enumerate(self.tables):
            table.remove(torch.tensor(gone, dtype=torch.int64))
            insert(table, owned(new, rank, self.ranks_count))
        for saver in self.savers:
            saver.save(step, metadata={"loss": 0.5})
        sources = [self.path / f"{rank}" for rank in range(self.ranks_count)]
        change = writes(self.ranks_count)
        kind = asyncckpt.describe(sources[0], step).kind
        parent = self.written if kind == "delta" else None
        self.written = merge(self.root, step, sources, change=change, parent=parent)

    def __enter__(self) -> TrainedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for saver in self.savers:
            saver.close()
