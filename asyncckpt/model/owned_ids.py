"""Which of many ids a shard of a table holds: see `table_shard.py`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncckpt.model.table_shard import Shard, buckets_of


def remainders(ids: NDArray[np.int64], *, size: int) -> NDArray[np.uint64]:
    """Return the unsigned values of ids, contiguous int64 [n], modulo size."""
    bits = ids.view(np.uint64)
    # For powers of two, a mask gives the same and is several times faster than the division.
    rest: NDArray[np.uint64] = bits & np.uint64(size - 1) if size & (size - 1) == 0 else bits % np.uint64(size)
    return rest


def owned_mask(ids: NDArray[np.int64], *, shard: Shard) -> NDArray[np.bool_]:
    """Return which of ids, contiguous int64 [n], a shard holds."""
    begin, end, size = buckets_of(shard)
    rest = remainders(ids, size=size)
    # What is below `begin` wraps around to a large number.
    mask: NDArray[np.bool_] = rest - np.uint64(begin) < np.uint64(end - begin)
    return mask
