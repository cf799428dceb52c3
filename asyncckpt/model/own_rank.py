"""Which rank of a job this process is: the only place that asks torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

from asyncckpt.errors import UsageError, must_be


def rank_in_group(process_group: Any = None) -> tuple[int, int] | None:
    """Return (rank, number of ranks) in a process group of torch.distributed, by default in the default group.

    None without a group, where torch.distributed is not initialised. UsageError when this process is not in the group.
    """
    dist = torch.distributed
    # The package is there without being built: then it knows nothing but this.
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise UsageError("a process group is given, but torch.distributed is not initialised")
        return None
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise UsageError("this process is not in the process group", found=dist.get_rank())
    return rank, dist.get_world_size(process_group)


def own_rank(
    rank: int | None,
    ranks_count: int | None,
    process_group: Any = None,
    *,
    names: tuple[str, str] = ("rank", "ranks_count"),
) -> tuple[int, int]:
    """Return (rank, number of ranks): as given, else those of the group, or of the default group, else (0, 1).

    names: of both arguments, for errors. UsageError for numbers that cannot be, or are not those of a group given.
    """
    both = f"{names[0]} and {names[1]}"
    if (rank is None) != (ranks_count is None):
        raise UsageError(f"{both} are given together or not at all", found=(rank, ranks_count))
    if rank is None or ranks_count is None:
        return rank_in_group(process_group) or (0, 1)
    if type(rank) is not int or type(ranks_count) is not int or not 0 <= rank < ranks_count:
        raise must_be(both, f"ints with 0 <= {names[0]} < {names[1]}", (rank, ranks_count))
    if process_group is not None and (of_group := rank_in_group(process_group)) != (rank, ranks_count):
        raise UsageError(
            f"{both} are not those of the process group",
            found=(rank, ranks_count),
            expected=of_group,
            hint="leave them out, or leave out the group",
        )
    return rank, ranks_count
