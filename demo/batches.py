"""Batches that depend on the seed and the step alone, so that a resumed run sees what an undisturbed run sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from demo.log import I64, Log

# As in word2vec: very frequent items are thinned out (`self` is one identifier in seven), and negatives are drawn from
# counts to the power of 0.75.
FREQUENT_SHARE = 5e-4
NEGATIVE_POWER = 0.75


@dataclass(frozen=True)
class Batch:
    """Pairs of an item and an item near it, in the same file.

    files, centers    ids of a file and an item in it, int64 [n]
    pair_centers      for each pair the index of its center, int64 [pairs]
    pair_contexts     for each pair the id of the item near it, int64 [pairs]
    negatives         ids of items drawn at random, shared by all centers, int64 [k]
    """

    files: torch.Tensor
    centers: torch.Tensor
    pair_centers: torch.Tensor
    pair_contexts: torch.Tensor
    negatives: torch.Tensor


class BatchSampler:
    """Draws a batch of `size` centers for any step, in any order."""

    def __init__(self, log: Log, *, seed: int, size: int, window: int, negatives_count: int) -> None:
        self._log = log
        self._seed = seed
        self._size = size
        self._negatives_count = negatives_count
        self._offsets = np.array([offset for offset in range(-window, window + 1) if offset], dtype=np.int64)
        share = log.counts / log.counts.sum()
        keep = np.minimum(1.0, np.sqrt(FREQUENT_SHARE / share))
        self._kept: NDArray[np.bool_] = self._random(0).random(log.tokens.size) < keep[log.tokens]
        self._kept_positions = np.flatnonzero(self._kept)
        weights = log.counts**NEGATIVE_POWER
        self._negative_edges = np.cumsum(weights / weights.sum())

    def batch(self, step: int) -> Batch:
        """Draw the batch of a step (from 1)."""
        assert step >= 1  # Step 0 is the thinning out.
        random, log = self._random(step), self._log
        positions = random.choice(self._kept_positions, size=self._size)
        files = np.searchsorted(log.file_begins, positions, side="right") - 1
        near = positions[:, None] + self._offsets
        inside = (near >= log.file_begins[files][:, None]) & (near < log.file_begins[files + 1][:, None])
        near = np.where(inside, near, positions[:, None])
        centers, offsets = np.nonzero(inside & self._kept[near])
        negatives = np.searchsorted(self._negative_edges, random.random(self._negatives_count), side="right")
        negatives = np.minimum(negatives, log.counts.size - 1)  # The last edge may be rounded to below 1.
        return Batch(
            files=torch.from_numpy(log.file_ids[files]),
            centers=self._items(positions),
            pair_centers=torch.from_numpy(centers),
            pair_contexts=self._items(near[centers, offsets]),
            negatives=torch.from_numpy(log.item_ids[negatives]),
        )

    def _items(self, positions: I64) -> torch.Tensor:
        return torch.from_numpy(self._log.item_ids[self._log.tokens[positions]])

    def _random(self, step: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, step])
