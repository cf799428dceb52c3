"""Initial values of the embedding of a new id.

`Uniform` is a counter hash, not a random stream: the initial row of an id depends only on the seed, the id and the
column index. So a run that was resumed, or has another number of shards, gives every id the same initial row.

1. key = splitmix64(id + splitmix64(seed)).
2. One 64-bit word serves two columns: word p = splitmix64(key + (p + 1) * GOLDEN); its low half is column 2p, its high
   half column 2p + 1.
3. The upper 24 bits of a half, times 2 * bound / 2**24, minus bound: every step is exact or rounded once, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import must_be
from asyncckpt.native import I64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
# Two word buffers of this size stay in the second-level cache, and nothing larger than the result is allocated.
WORDS_PER_CHUNK = 1 << 14
MANTISSA_BITS = 24

FloatRows: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Uniform:
    """Initial rows uniform over [-bound, bound], at the resolution of float32.

    Tables of one model should have different seeds: with the same seed, the same id gets the same initial row.
    """

    bound: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.bound, (int, float)) or not math.isfinite(self.bound) or self.bound < 0:
            raise must_be("bound of Uniform", "a finite number >= 0", self.bound)
        if not isinstance(self.seed, int):
            raise must_be("seed of Uniform", "an int", self.seed)

    def rows(self, ids: I64, *, dim: int) -> FloatRows:
        """Return the initial rows, float32 [n, dim], of ids, int64 [n]."""
        seed_key = _splitmix64(np.array([self.seed % 2**64], dtype=np.uint64))
        keys = _splitmix64(ids.view(np.uint64) + seed_key)
        words_per_row = (dim + 1) // 2
        steps = np.arange(1, words_per_row + 1, dtype=np.uint64) * GOLDEN
        rows = np.empty((ids.size, dim), dtype=np.float32)
        chunk_rows_count = max(1, WORDS_PER_CHUNK // words_per_row)
        for begin in range(0, ids.size, chunk_rows_count):
            end = min(begin + chunk_rows_count, ids.size)
            rows[begin:end] = self._chunk(keys[begin:end], steps)[:, :dim]
        return rows

    def _chunk(self, keys: NDArray[np.uint64], steps: NDArray[np.uint64]) -> FloatRows:
        words = _splitmix64(keys[:, None] + steps[None, :])
        # "<u4" and not uint32: which half is the even column is part of the definition.
        halves = words.astype("<u8", copy=False).view("<u4")
        values: FloatRows = (halves >> np.uint32(32 - MANTISSA_BITS)).astype(np.float32)
        values *= np.float32(self.bound) * np.float32(2.0 ** (1 - MANTISSA_BITS))
        values -= np.float32(self.bound)
        return values


Initializer: TypeAlias = float | Uniform | Callable[[torch.Tensor], torch.Tensor] | None
"""Zeros, one constant, hashed rows, or a function of new ids (int64 [n], CPU) to rows ([n, dim]).

A function is called with a bounded number of ids under the table's lock; it must not use the table.
"""


def check_initializer(initializer: object, *, table: str) -> None:
    """Raise UsageError unless initializer is one of the four kinds."""
    if initializer is None or isinstance(initializer, Uniform) or callable(initializer):
        return
    if isinstance(initializer, (int, float)) and not isinstance(initializer, bool):
        return
    rule = "None, a number, a Uniform or a function of ids to rows"
    raise must_be(f"initializer of table {table!r}", rule, initializer)


def _splitmix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix words in place (David Stafford's mix 13, the finalizer of splitmix64) and return them."""
    shifted = np.empty_like(words)
    for shift, factor in ((30, _FIRST_FACTOR), (27, _SECOND_FACTOR)):
        np.right_shift(words, np.uint64(shift), out=shifted)
        words ^= shifted
        words *= factor
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted
    return words
