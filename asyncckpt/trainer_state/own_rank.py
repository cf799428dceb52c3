"""Which rank this process is, where the caller does not say."""

from __future__ import annotations

import torch

from asyncckpt.errors import UsageError


def own_rank(rank: int | None, ranks_count: int | None) -> tuple[int, int]:
    """(rank, number of ranks): as given, else those of torch.distributed's default group, else (0, 1)."""
    if (rank is None) != (ranks_count is None):
        raise UsageError("rank and ranks_count are given together or not at all", found=(rank, ranks_count))
    if rank is None or ranks_count is None:
        # The package is there without being built: then it knows nothing but this.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
    if type(rank) is not int or type(ranks_count) is not int or not 0 <= rank < ranks_count:
        raise UsageError("rank is wrong", found=(rank, ranks_count), expected="ints with 0 <= rank < ranks_count")
    return rank, ranks_count
