"""The training loop: sparse Adagrad on Zipf-distributed rows, matrix products, dense tensors; all updates in place.

The loop draws all its batches ahead, so a step does the same work for every peer and nothing but the work.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bench.state import DIM, State

UPDATES_PER_STEP = 16384
ZIPF_EXPONENT = 1.05
BATCHES_COUNT = 16
DENSE_PER_STEP = 10
MATRIX_SIDE = 384
LEARNING_RATE = 0.01
PYTHON_LOOP_COUNT = 2000
CALIBRATION_COUNT = 400


class Work(Protocol):
    """What the training thread does between saves."""

    def step(self) -> None: ...


class Trainer:
    """One step: updates of at most 16k rows over all tables, `matmuls` products, ten of the dense tensors."""

    def __init__(self, state: State, *, matmuls: int, seed: int = 7) -> None:
        self._state, self._matmuls = state, matmuls
        self._dense = list(state.dense.values())
        generator = np.random.default_rng(seed)
        count = max(1, UPDATES_PER_STEP // max(1, len(state.tables)))
        self._batches = [
            [
                table.rows[torch.from_numpy(np.unique(zipf(generator, len(table.ids), count)))]
                for _ in range(BATCHES_COUNT)
            ]
            for table in state.tables
        ]
        self._gradient = torch.randn(count, DIM)
        self._left, self._right = torch.rand(MATRIX_SIDE, MATRIX_SIDE), torch.rand(MATRIX_SIDE, MATRIX_SIDE)
        self._product = torch.empty(MATRIX_SIDE, MATRIX_SIDE)
        self._index = 0

    def step(self) -> None:
        for table, batches in zip(self._state.tables, self._batches, strict=True):
            rows = batches[self._index % BATCHES_COUNT]
            table.update(rows, self._gradient[: len(rows)], lr=LEARNING_RATE)
        for _ in range(self._matmuls):
            torch.mm(self._left, self._right, out=self._product)
        begin = self._index * DENSE_PER_STEP % max(1, len(self._dense))
        for tensor in self._dense[begin : begin + DENSE_PER_STEP]:
            tensor.add_(1e-3)
        self._index += 1


class PhasedTrainer:
    """Forward and backward, which only read, as `matmuls` products; then a step of the optimizers, over all tensors."""

    def __init__(self, state: State, *, matmuls: int) -> None:
        self._optimizers, self._matmuls = state.optimizers, matmuls
        self._left, self._product = torch.rand(MATRIX_SIDE, MATRIX_SIDE), torch.empty(MATRIX_SIDE, MATRIX_SIDE)

    def step(self) -> None:
        for _ in range(self._matmuls):
            torch.mm(self._left, self._left, out=self._product)
        for optimizer in self._optimizers:
            optimizer.step()


def phases_matmuls(state: State) -> int:
    """Return with how many products the step of the optimizers takes a quarter of the time."""
    counted = []
    for _ in range(5):
        begin = time.perf_counter()
        PhasedTrainer(state, matmuls=0).step()
        counted.append(time.perf_counter() - begin)
    return calibrate(3 * min(counted))


class PythonLoop:
    """A step of nothing but bytecode: how much of the interpreter does a save in the background take away?"""

    def step(self) -> None:
        total = 0
        for number in range(PYTHON_LOOP_COUNT):
            total += number * number


def zipf(generator: np.random.Generator, rows_count: int, count: int) -> NDArray[np.int64]:
    """Draw row numbers below rows_count whose frequency falls as rank ** -ZIPF_EXPONENT; hot rows lie scattered."""
    # The inverse of the continuous distribution function; exact enough, and no table of all rows is needed.
    power = 1 - ZIPF_EXPONENT
    ranks = ((rows_count**power - 1) * generator.random(count) + 1) ** (1 / power)
    rows: NDArray[np.int64] = (np.minimum(ranks.astype(np.int64), rows_count) - 1) * 2654435761 % rows_count
    return rows


def calibrate(seconds: float) -> int:
    """Return how many products take this long with the present number of threads."""
    left = torch.rand(MATRIX_SIDE, MATRIX_SIDE)
    product = torch.empty_like(left)
    counted = []
    for _ in range(CALIBRATION_COUNT):
        begin = time.perf_counter()
        torch.mm(left, left, out=product)
        counted.append(time.perf_counter() - begin)
    # A low quantile: what else runs on the machine just now shall not make the steps of the whole bench shorter.
    return max(1, round(seconds / float(np.quantile(counted, 0.1))))
