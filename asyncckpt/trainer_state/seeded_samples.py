"""Random augmentation that does not depend on which worker makes a sample, nor on what it made before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info


class SeededSamples(Dataset[Any]):
    """A map-style data set whose samples are made under a seed of their own; for ResumableSampler(sample_seeds=True).

    While a sample is made, Python's `random`, NumPy's global functions and torch's CPU generator are seeded with its
    seed; in the main process they go on afterwards as if nothing had been drawn. So augmentation is the same for any
    number of workers and ranks, and after a resume.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: tuple[int, int]) -> Any:
        index, seed = item
        with _seeded(seed):
            return self.dataset[index]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    is_worker = get_worker_info() is not None
    before = None if is_worker else (random.getstate(), np.random.get_state(), torch.default_generator.get_state())
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.default_generator.set_state(before[2])
