"""What marks cost training: one process trains, with marks at every other step and without them in between.

The steps are those of the other benches, lookups and Adagrad updates of Zipf-distributed ids and matrix products, about
ten milliseconds. The time inside the marking calls is taken too, for it is a smaller part of a step than steps differ.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.round import step_seconds
from bench.state import DIM, ROW_BYTES, TABLES_COUNT, recommender_tables
from bench.trainer import MATRIX_SIDE, Work, calibrate, zipf

IDS_PER_STEP = 8192
BATCHES_COUNT = 64
CALIBRATION_STEPS = 64
LEARNING_RATE = 0.01
MARKING_METHODS = ("mark", "mark_used")


@dataclass(frozen=True)
class MarkingSpec:
    figures_path: str
    state_bytes: int
    steps_count: int
    step_seconds: float


class ZipfTrainer:
    """One step over all tables: rows of a batch are looked up, Adagrad updates them, matrix products take the rest."""

    def __init__(self, rows_count: int, *, matmuls: int = 0, seed: int = 11) -> None:
        self.tables = recommender_tables(rows_count, hashtables=True, filled=True)
        self.matmuls = matmuls
        generator = np.random.default_rng(seed)
        self._draw = lambda: np.unique(zipf(generator, rows_count, IDS_PER_STEP // TABLES_COUNT))
        self._batches = [[table.ids.numpy()[self._draw()] for table in self.tables] for _ in range(BATCHES_COUNT)]
        self._gradient = torch.randn(IDS_PER_STEP // TABLES_COUNT, DIM)
        self._left = torch.rand(MATRIX_SIDE, MATRIX_SIDE)
        self._product = torch.empty(MATRIX_SIDE, MATRIX_SIDE)
        self._index = 0

    def step(self) -> None:
        self.train(self._batches[self._index % BATCHES_COUNT])
        self._index += 1

    def step_anew(self) -> None:
        """A step with ids drawn just now: so many steps on never see the same batch again."""
        self.train([table.ids.numpy()[self._draw()] for table in self.tables])

    def train(self, batch: list[Any]) -> None:
        for table, ids in zip(self.tables, batch, strict=True):
            rows = table.hashtable.lookup(ids)
            gradient = self._gradient[: len(ids)]
            table.update(rows, gradient, lr=LEARNING_RATE)
        for _ in range(self.matmuls):
            torch.mm(self._left, self._left, out=self._product)


def matmuls_of_a_step(work: Work, seconds: float) -> int:
    """How many matrix products fill up a step of so many seconds beside the work on tables; 0 for 0 seconds."""
    if not seconds:
        return 0
    table_seconds = median(step_seconds(work, CALIBRATION_STEPS))
    return calibrate(max(seconds / 20, seconds - table_seconds))


def run_one(spec: MarkingSpec) -> dict[str, Any]:
    from asyncckpt.tables.touched_rows import TouchedRows

    trainer = ZipfTrainer(spec.state_bytes // TABLES_COUNT // ROW_BYTES)
    trainer.matmuls = matmuls_of_a_step(trainer, spec.step_seconds)
    step_seconds(trainer, spec.steps_count)
    plain = {name: getattr(TouchedRows, name) for name in MARKING_METHODS}
    counts = {"seconds": 0.0, "ids": 0, "depth": 0}

    def timed(name: str) -> Any:
        def method(self: Any, rows: Any) -> None:
            counts["depth"] += 1  # One of them calls the other.
            begin = time.perf_counter()
            plain[name](self, rows)
            counts["depth"] -= 1
            if not counts["depth"]:
                counts["seconds"] += time.perf_counter() - begin
                counts["ids"] += rows.size

        return method

    def steps_with(methods: dict[str, Any], count: int) -> list[float]:
        for name, method in methods.items():
            setattr(TouchedRows, name, method)
        try:
            return step_seconds(trainer, count)
        finally:
            for name, method in plain.items():
                setattr(TouchedRows, name, method)

    marked: list[float] = []
    unmarked: list[float] = []
    without = {name: lambda self, rows: None for name in MARKING_METHODS}
    for index in range(spec.steps_count):
        # The same batch on both sides, and each side first as often as the other.
        trainer._index = index
        for side in ((marked, plain), (unmarked, without))[:: 1 if index % 2 else -1]:
            trainer._index = index
            side[0].extend(steps_with(side[1], 1))
    timed_steps = steps_with({name: timed(name) for name in MARKING_METHODS}, spec.steps_count // 2)
    marking = counts["seconds"] / len(timed_steps)
    return {
        "step_seconds": median(timed_steps),
        "marking_seconds": marking,
        "share": marking / median(timed_steps),
        "ids_per_second": counts["ids"] / counts["seconds"],
        "step_ratio": median(a / b for a, b in zip(marked, unmarked, strict=True)),
    }


if __name__ == "__main__":
    child_spec = MarkingSpec(**json.loads(sys.argv[1]))
    Path(child_spec.figures_path).write_text(json.dumps(run_one(child_spec)))
