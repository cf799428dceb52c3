"""What marks cost training: the work of a step on tables with marks and without them, beside the whole step.

The steps are those of the other benches, lookups and Adagrad updates of Zipf-distributed ids and matrix products, about
ten milliseconds. Each batch is trained twice, once with marks; of the time between lookup and update of all tables the
median difference is what marks cost, and the matrix products, which clear the caches in between, are left out of it.
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
        self.matmuls, self.table_seconds = matmuls, 0.0
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
        begin = time.perf_counter()
        for table, ids in zip(self.tables, batch, strict=True):
            rows = table.hashtable.lookup(ids)
            gradient = self._gradient[: len(ids)]
            table.update(rows, gradient, lr=LEARNING_RATE)
        self.table_seconds = time.perf_counter() - begin
        for _ in range(self.matmuls):
            torch.mm(self._left, self._left, out=self._product)


def matmuls_of_a_step(work: Work, seconds: float) -> int:
    """How many matrix products fill up a step of so many seconds beside the work on tables; 0 for 0 seconds."""
    if not seconds:
        return 0
    table_seconds = median(step_seconds(work, CALIBRATION_STEPS))
    return calibrate(max(seconds / 20, seconds - table_seconds))


def run_one(spec: MarkingSpec) -> dict[str, Any]:
    from asyncckpt.tables.touched_rows import FREE, TouchedRows

    trainer = ZipfTrainer(spec.state_bytes // TABLES_COUNT // ROW_BYTES)
    trainer.matmuls = matmuls_of_a_step(trainer, spec.step_seconds)
    step_seconds(trainer, spec.steps_count)
    plain = {name: getattr(TouchedRows, name) for name in ("mark", "mark_used", "to_set")}
    without = {
        "mark": lambda self, rows: None,
        "mark_used": lambda self, rows: (self._marks.take(rows) != FREE) & (rows >= 0),
        "to_set": lambda self, rows_count: (np.empty(0, dtype=np.uint8), FREE),
    }

    def step_with(methods: dict[str, Any], index: int) -> tuple[float, float]:
        for name, method in methods.items():
            setattr(TouchedRows, name, method)
        trainer._index = index
        seconds = step_seconds(trainer, 1)[0]
        return seconds, trainer.table_seconds

    steps: list[float] = []
    differences: list[float] = []
    for index in range(spec.steps_count):
        # The same batch on both sides, and each side first as often as the other.
        if index % 2:
            unmarked = step_with(without, index)
            marked = step_with(plain, index)
        else:
            marked = step_with(plain, index)
            unmarked = step_with(without, index)
        steps.append(marked[0])
        differences.append(marked[1] - unmarked[1])
    marking = median(differences)
    return {"step_seconds": median(steps), "marking_seconds": marking, "share": marking / median(steps)}


if __name__ == "__main__":
    child_spec = MarkingSpec(**json.loads(sys.argv[1]))
    Path(child_spec.figures_path).write_text(json.dumps(run_one(child_spec)))
