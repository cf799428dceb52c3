"""Copies of tensors to places in host memory: by address where they have one, by torch where they do not.

For a captured state, for boxes that somebody else has planned, and for a state that DCP stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.devices.host_copies import HostCopies
from asyncckpt.native import U64
from asyncckpt.plan.dense_blocks import BY_HOST, BY_TORCH, CopyWays, TensorPieces
from asyncckpt.plan.leaf_facts import addresses, check_extent, shrunk_storages


@dataclass(frozen=True)
class LiveTensors:
    """Tensors, how they are copied, and the addresses of those that are copied by address; 0 for others."""

    tensors: Sequence[torch.Tensor]
    ways: CopyWays
    begins: U64

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], ways: CopyWays, *, name: Callable[[int], str]) -> LiveTensors:
        """Read the addresses; UsageError naming a tensor whose storage was freed or shrunk."""
        numbers = np.flatnonzero(ways.way != BY_TORCH)
        own = tensors if len(numbers) == len(tensors) else [tensors[number] for number in numbers.tolist()]
        for index in shrunk_storages(own, bytes=ways.bytes[numbers], itemsizes=ways.itemsizes[numbers]):
            check_extent(own[index], name(int(numbers[index])))
        begins = np.zeros(len(tensors), dtype=np.uint64)
        begins[numbers] = addresses(own)
        return LiveTensors(tensors=tensors, ways=ways, begins=begins)


def list_pieces(pieces: TensorPieces, live: LiveTensors, copies: HostCopies, memory: torch.Tensor) -> U64:
    """Return (source, target, bytes) of what the host has to copy by address to places in `memory`, uint8.

    The rest goes to `copies`; what torch has to copy on the host is copied here and now.
    """
    ways, begins = live.ways.way[pieces.tensor], live.begins[pieces.tensor]
    segments = np.empty((len(pieces.tensor), 3), dtype=np.uint64)
    segments[:, 0] = begins + pieces.source_offset.astype(np.uint64)
    segments[:, 1] = pieces.place.astype(np.uint64) + np.uint64(memory.data_ptr())
    segments[:, 2] = pieces.bytes.astype(np.uint64)
    for device in np.unique(ways[ways >= 0]).tolist():
        own = ways == device
        found, stepped = segments[own], copies.is_stepped(begins[own], live.ways.bytes[pieces.tensor[own]])
        copies.on(device).add(found[~stepped], live.tensors)
        copies.on(device).add_later(found[stepped], live.tensors)
    for number in np.flatnonzero(ways == BY_TORCH).tolist():
        rows = pieces.rows(number, live.tensors)
        copies.put(place_of(memory, int(pieces.place[number]), rows), rows)
    return np.ascontiguousarray(segments[(ways == BY_HOST) & (pieces.bytes > 0)])


def place_of(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes from `begin` on as a contiguous tensor of the dtype and shape of another one; no copy."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    end = begin + like.numel() * like.element_size()
    return memory[begin:end].view(like.dtype).view(like.shape)
