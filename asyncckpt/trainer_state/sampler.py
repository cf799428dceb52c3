"""Which samples this rank gets, from any position of an epoch on.

1. The order of an epoch is a permutation of all samples, drawn from the seed and the epoch alone. It is the same on
   every rank.
2. A position is a number of samples that all ranks together have consumed: that many of the order are gone.
3. What is left goes to the ranks in turn, as DistributedSampler does: rank r of n gets every n-th, from the r-th on.
   So a position means the same for any number of ranks, and for any size of batches.

Random augmentation can depend on the sample and the epoch alone, too: see SeededSamples.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from asyncckpt.errors import must_be
from asyncckpt.model.own_rank import own_rank

_TAKEN_AT_ONCE = 1 << 14
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class ResumableSampler(Sampler[Any]):
    """Samples of a map-style data set in an order that can be continued anywhere; used with DataPosition.

    samples         the data set, or how many samples it has
    seed            of the order of every epoch; must be the same on all ranks
    shuffle         False: in order
    rank,           this process and how many take samples together; default: those of torch.distributed where it is
    ranks_count     initialised, else 0 of 1
    drop_last       what is left over when ranks share samples: True: not taken, False: the first samples of the order
                    fill up, so that every rank gets equally many
    sample_seeds    yields (index, seed) instead of index, for SeededSamples

    Draws nothing from torch's global generator.
    """

    def __init__(
        self,
        samples: int | Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        ranks_count: int | None = None,
        drop_last: bool = False,
        sample_seeds: bool = False,
    ) -> None:
        count = samples if isinstance(samples, int) else len(samples)
        if isinstance(samples, bool) or count < 1:
            raise must_be("samples", "a data set, or a count of at least 1", samples)
        if type(seed) is not int or not -(2**63) <= seed < 2**63:
            raise must_be("seed", "an int of 64 bits", seed)
        self.samples_count = count
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.sample_seeds = sample_seeds
        self.rank, self.ranks_count = own_rank(rank, ranks_count)
        self.epoch = 0
        self.samples_consumed = 0

    def set_position(self, *, epoch: int, samples_consumed: int) -> None:
        """Have iterators that begin from now on start there: after `samples_consumed` of all ranks together."""
        self.epoch, self.samples_consumed = epoch, samples_consumed

    def __len__(self) -> int:
        """Return how many samples this rank gets from the position on."""
        left = max(0, self.samples_count - self.samples_consumed)
        return left // self.ranks_count if self.drop_last else -(-left // self.ranks_count)

    def indices(self) -> torch.Tensor:
        """Return the samples that this rank gets from the position on, int64 [len(self)]."""
        order = self._order()
        left = order[self.samples_consumed :]
        total = len(self) * self.ranks_count
        if total > left.numel():
            missing = total - left.numel()
            repeats = -(-missing // order.numel())
            left = torch.cat([left, order.repeat(repeats)[:missing]])
        return left[self.rank : total : self.ranks_count]

    def __iter__(self) -> Iterator[Any]:
        mine, epoch = self.indices().numpy(), self.epoch
        for begin in range(0, len(mine), _TAKEN_AT_ONCE):
            part = mine[begin : begin + _TAKEN_AT_ONCE]
            if self.sample_seeds:
                yield from zip(part.tolist(), sample_seeds(part, seed=self.seed, epoch=epoch), strict=True)
            else:
                yield from part.tolist()

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.samples_count, dtype=torch.int64, device="cpu")
        generator = torch.Generator(device="cpu").manual_seed(epoch_seed(seed=self.seed, epoch=self.epoch))
        return torch.randperm(self.samples_count, generator=generator, dtype=torch.int64, device="cpu")


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


def epoch_seed(*, seed: int, epoch: int) -> int:
    """Return a seed for one epoch, 63 bits. Neighbouring seeds and epochs have nothing in common, unlike their sums."""
    return _mixed(_mixed(seed & _WORD) + epoch) >> 1


def sample_seeds(indices: np.ndarray[Any, np.dtype[np.int64]], *, seed: int, epoch: int) -> list[int]:
    """Return a seed for every sample of an epoch, 63 bits, the same on any rank."""
    first = np.uint64(epoch_seed(seed=seed, epoch=epoch))
    words = first + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    seeds: list[int] = (_finished(words) >> np.uint64(1)).tolist()
    return seeds


def _mixed(word: int) -> int:
    return int(_finished(np.array([(word + _GOLDEN) & _WORD], dtype=np.uint64))[0])


def _finished(words: Any) -> Any:
    """Mix as splitmix64 does (public domain, Sebastiano Vigna)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
