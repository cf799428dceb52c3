"""The small training state that the fault tests save: its content is a function of the step alone.

So what a load gives can be told apart: it is the state of one step, byte for byte, or of none. From one step to the
next a part of the rows gets new values, some go and some come back, so that deltas have all of this to tell.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import asyncckpt
from tests.worlds.bits import raw_of

SEED = 20250117
IDS_COUNT = 90
CACHE_ROWS = 20
LIFE_STEPS = 6  # A row keeps its values for as many steps; of every eight lives one is spent away.
SLOTS: tuple[tuple[str, ...], ...] = (("sum", "step_filter"), ())


@dataclass(frozen=True, eq=False)
class SampleRow:
    """One row of a table; the same object at all steps that share it."""

    embedding: torch.Tensor
    slots: dict[str, torch.Tensor]


class SampleState:
    """Two hash tables with free rows in between, and a few dense tensors and values."""

    def __init__(self) -> None:
        self.tables = {
            "user": asyncckpt.HashTable(
                "user",
                6,
                optimizer_slots={"sum": torch.float32},
                metadata={"step_filter": torch.int64},
                capacity=IDS_COUNT,
            ),
            "item": asyncckpt.HashTable("item", 3, dtype=torch.bfloat16, capacity=IDS_COUNT),
        }
        self._step: int | None = None
        self.levels: dict[str, asyncckpt.MultiLevelTable] = {}
        self.tensors: dict[str, Any] = {
            "model": {"weight": torch.zeros(33, 50), "bias": torch.zeros(50, dtype=torch.bfloat16)},
            "counts": torch.zeros(70, dtype=torch.int64),
            "mask": torch.zeros(11, dtype=torch.bool),
            "loss": torch.zeros((), dtype=torch.float64),
            "progress": {"epoch": -1},
        }

    def with_levels(self) -> dict[str, asyncckpt.MultiLevelTable]:
        """Multi-level tables that hold the same as `tables` from the next `fill` on, some rows in their cache only."""
        self.levels = {
            "user": asyncckpt.MultiLevelTable(
                "user",
                6,
                cache_rows=CACHE_ROWS,
                optimizer_slots={"sum": torch.float32},
                metadata={"step_filter": torch.int64},
                capacity=2 * IDS_COUNT,
            ),
            "item": asyncckpt.MultiLevelTable(
                "item", 3, cache_rows=CACHE_ROWS, dtype=torch.bfloat16, capacity=2 * IDS_COUNT
            ),
        }
        return self.levels

    def _fill_levels(self) -> None:
        for name, levelled in self.levels.items():
            table = self.tables[name]
            ids, rows = table.ids(), table.used_rows()
            values = {slot: table.slot(slot)[rows] for slot in (("sum", "step_filter") if name == "user" else ())}
            levelled.remove(levelled.ids())
            levelled.insert(ids, torch.zeros_like(table.embedding[rows]))
            levelled.lookup(ids[:CACHE_ROWS])
            levelled.insert(ids, table.embedding[rows], **values)

    def fill(self, step: int) -> None:
        """Change the state in place to that of a step. Rows that the present step and this one share stay untouched."""
        for number, table in enumerate(self.tables.values() if step != self._step else ()):
            before = rows_of_step(number, table, self._step) if self._step is not None else {}
            after = rows_of_step(number, table, step)
            gone = [id for id in before if id not in after]
            table.remove(np.array(gone, dtype=np.int64))
            changed = [id for id, row in after.items() if before.get(id) is not row]
            table.insert(
                np.array(changed, dtype=np.int64),
                torch.stack([after[id].embedding for id in changed]),
                **{slot: torch.stack([after[id].slots[slot] for id in changed]) for slot in SLOTS[number]},
            )
        rng = np.random.default_rng([SEED, step])
        for tensor in self._dense():
            tensor.copy_(_random(rng, tuple(tensor.shape), tensor.dtype))
        self.tensors["progress"]["epoch"] = step
        self._step = step
        self._fill_levels()

    def digest(self) -> str:
        """Equal for equal states: ids with their rows whatever their order, every dense byte, every value."""
        hasher = hashlib.sha256()
        for name, table in self.tables.items():
            ids, rows = table.ids(), table.used_rows()
            order = torch.argsort(ids)
            hasher.update(repr((name, len(ids))).encode())
            hasher.update(raw_of(ids[order]))
            columns = [table.embedding, *(table.slot(slot) for slot in ("sum", "step_filter") if name == "user")]
            for column in columns:
                hasher.update(raw_of(column[rows[order]]))
        for tensor in self._dense():
            hasher.update(raw_of(tensor))
        hasher.update(repr(self.tensors["progress"]).encode())
        return hasher.hexdigest()

    def load(self, path: Path, step: int | None = None) -> int:
        """Load a step (default: the newest) into this state; returns which one it was."""
        report = asyncckpt.Loader(path, hashtables=self.tables, tensors=self.tensors, step=step).load()
        self.tensors["progress"]["epoch"] = report.values["progress.epoch"]
        self._step = int(report.step)
        return self._step

    def _dense(self) -> list[torch.Tensor]:
        model = self.tensors["model"]
        return [model["weight"], model["bias"], *(self.tensors[name] for name in ("counts", "mask", "loss"))]


def digest_of_step(step: int) -> str:
    """The digest that the state of a step has."""
    state = SampleState()
    state.fill(step)
    return state.digest()


@cache
def _row(number: int, index: int, life: int, *, dim: int, dtype: torch.dtype) -> SampleRow | None:
    """The values of a row in one of its lives; None: it is away."""
    rng = np.random.default_rng([SEED, number, index, life])
    if (index + life) % 8 == 0:
        return None
    slots = {"sum": _random(rng, (dim,), torch.float32), "step_filter": _random(rng, (), torch.int64)}
    return SampleRow(_random(rng, (dim,), dtype), {slot: slots[slot] for slot in SLOTS[number]})


@cache
def _rows_of_step(number: int, step: int, *, dim: int, dtype: torch.dtype) -> dict[int, SampleRow]:
    ids = np.random.default_rng([SEED, number]).integers(-(2**63), 2**63 - 1, IDS_COUNT - number).tolist()
    rows = [
        _row(number, index, (step + index) // LIFE_STEPS, dim=dim, dtype=dtype) for index in range(IDS_COUNT - number)
    ]
    return {id: row for id, row in zip(ids, rows, strict=True) if row is not None}


def rows_of_step(number: int, table: asyncckpt.HashTable, step: int) -> dict[int, SampleRow]:
    """What the table of this number holds at a step, by id."""
    return _rows_of_step(number, step, dim=table.dim, dtype=table.dtype)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape)).to(dtype)
    if dtype.is_floating_point:
        return torch.from_numpy(np.asarray(rng.standard_normal(shape))).to(dtype)
    return torch.from_numpy(np.asarray(rng.integers(-(2**62), 2**62, shape))).to(dtype)
