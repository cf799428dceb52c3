"""Which rank of a job a reader is: that tells which plain values are its own. Ranks that load do not talk."""

from __future__ import annotations

import sys
from typing import Any

from asyncckpt.errors import UsageError


def reader_rank(shard_index: int | None, shard_num: int | None, process_group: Any) -> tuple[int, int]:
    """(rank, number of ranks): as given, of the process group, else of torch.distributed's default group, else (0, 1).

    UsageError for numbers that cannot be, or are not those of the group.
    """
    if (shard_index is None) != (shard_num is None):
        raise UsageError("shard_index and shard_num are given together or not at all", found=(shard_index, shard_num))
    of_group = _rank_in(process_group)
    if shard_index is None or shard_num is None:
        return of_group or (0, 1)
    if type(shard_index) is not int or type(shard_num) is not int or not 0 <= shard_index < shard_num:
        raise UsageError(
            "shard_index is wrong", found=(shard_index, shard_num), expected="ints with 0 <= shard_index < shard_num"
        )
    if process_group is not None and (shard_index, shard_num) != of_group:
        raise UsageError(
            "shard_index and shard_num are not those of the process group",
            found=(shard_index, shard_num),
            expected=of_group,
            hint="leave them out, or leave out the group",
        )
    return shard_index, shard_num


def _rank_in(process_group: Any) -> tuple[int, int] | None:
    """Of the group, or the default one; None where torch.distributed was not initialised."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise UsageError("a process group is given, but torch.distributed is not initialised")
        return None
    index, count = dist.get_rank(process_group), dist.get_world_size(process_group)
    if index < 0:
        raise UsageError("this process is not in the process group", found=dist.get_rank())
    return index, count
