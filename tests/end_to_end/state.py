"""A small recommender state, a deep copy of it, and bit-for-bit comparison by id and by name."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from tests.worlds.bits import bits
from tests.worlds.rows import table_image

DIM = 8


def new_table(name: str = "user", *, shard: tuple[int, int] = (0, 1)) -> asyncckpt.HashTable:
    return asyncckpt.HashTable(
        name,
        DIM,
        optimizer_slots={"sum": (), "momentum": torch.float32},
        metadata={"last_seen": torch.int64},
        shard=shard,
        initializer=asyncckpt.nn.Uniform(0.1, seed=7),
    )


def filled_table(name: str, *, rows: int, seed: int, holes: bool = True) -> asyncckpt.HashTable:
    """A table with random ids of any sign; with holes every fifth id has been removed again."""
    generator = torch.Generator().manual_seed(seed)
    table = new_table(name)
    ids = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    found = table.lookup(ids)
    table.slot("sum")[found] = torch.rand(rows, generator=generator)
    table.slot("momentum")[found] = torch.rand(rows, DIM, generator=generator)
    table.slot("last_seen")[found] = torch.arange(rows)
    if holes:
        table.remove(ids[::5])
    return table


@dataclass
class State:
    """What is saved, and empty targets of the same form to load into."""

    tables: dict[str, asyncckpt.HashTable]
    dense: dict[str, Any]

    @staticmethod
    def filled(seed: int = 0, *, rows: int = 500, holes: bool = True) -> State:
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(7, 6, generator=generator)).sum().backward()
            optimizer.step()
        tables = {
            name: filled_table(name, rows=rows, seed=seed + i, holes=holes) for i, name in enumerate(("user", "item"))
        }
        w = torch.randn(64, 33, generator=generator)
        dense = {
            "w": w,
            "half": torch.randn(17, generator=generator).bfloat16(),
            "model": model,
            "optim": optimizer,
            "epoch": seed,
        }
        return State(tables=tables, dense=dense)

    @staticmethod
    def empty() -> State:
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
        dense = {
            "w": torch.zeros(64, 33),
            "half": torch.zeros(17, dtype=torch.bfloat16),
            "model": model,
            "optim": torch.optim.AdamW(model.parameters(), lr=0.5),
            "epoch": -1,
        }
        return State(tables={name: new_table(name) for name in ("user", "item")}, dense=dense)

    def image(self) -> dict[str, Any]:
        """A copy of every bit, comparable with ==."""
        image: dict[str, Any] = {f"table {name}": table_image(table) for name, table in self.tables.items()}
        image["dense"] = bits(
            {
                "w": self.dense["w"],
                "half": self.dense["half"],
                "model": dict(self.dense["model"].state_dict()),
                "optim": self.dense["optim"].state_dict(),
            }
        )
        return image

    def scribble(self) -> None:
        """Change everything in place."""
        with torch.no_grad():
            for table in self.tables.values():
                for name in ("sum", "momentum", "last_seen"):
                    table.slot(name).add_(1)
                table.embedding.mul_(-3)
            self.dense["w"].add_(1)
            self.dense["half"].neg_()
            for parameter in self.dense["model"].parameters():
                parameter.add_(0.5)
            for entry in self.dense["optim"].state.values():
                for value in entry.values():
                    value.add_(1)


def load_image(path: Path, step: int | None = None, **options: Any) -> dict[str, Any]:
    """Load into a fresh state and return its image."""
    target = State.empty()
    asyncckpt.Loader(path, target.tables, target.dense, step=step, **options).load()
    return target.image()


class Scribbler:
    """A thread that changes the whole state in place, over and over, from the moment it is told to."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._stop = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scribbler")

    def _run(self) -> None:
        while not self._stop.is_set():
            self._state.scribble()
            self._begun.set()

    def __enter__(self) -> Scribbler:
        self._thread.start()
        if not self._begun.wait(60):  # No assert: these are left out by python -O.
            raise AssertionError("it was waited for in vain")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
