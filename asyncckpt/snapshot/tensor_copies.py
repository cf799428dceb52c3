"""Copies of tensors to places in host memory: by address where they have one, by torch where they do not.

For a captured state, for boxes that somebody else has planned, and for a state that DCP stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.current_runtime import device_of
from asyncckpt.devices.host_copies import HostCopies
from asyncckpt.native import I64, U64
from asyncckpt.plan.dense_blocks import TensorPieces
from asyncckpt.plan.leaf_facts import addresses, check_extent, is_plain, shrunk_storages


def copied_by_address(tensors: Sequence[torch.Tensor], *, bytes: I64, name: Callable[[int], str]) -> NDArray[np.bool_]:
    """Which tensors are copied by address, bool [tensors]; UsageError for one whose storage was freed or shrunk."""
    raw = np.array(
        [(tensor.is_cpu or device_of(tensor) is not None) and is_plain(tensor) for tensor in tensors], dtype=np.bool_
    )
    numbers = np.flatnonzero(raw)
    held = [tensors[number] for number in numbers.tolist()]
    itemsizes = np.array([tensor.element_size() for tensor in held], dtype=np.int64)
    for index in shrunk_storages(held, bytes=bytes[raw], itemsizes=itemsizes):
        check_extent(held[index], name(int(numbers[index])))
    return raw


def list_pieces(
    pieces: TensorPieces,
    tensors: Sequence[torch.Tensor],
    raw: NDArray[np.bool_],
    copies: HostCopies,
    memory: torch.Tensor,
) -> U64:
    """(source, target, bytes) of what the host has to copy by address to places in `memory`; the rest goes to `copies`.

    What torch has to copy on the host is copied here and now. memory: uint8.
    """
    begins = np.zeros(len(tensors), dtype=np.uint64)
    begins[raw] = addresses([tensors[number] for number in np.flatnonzero(raw).tolist()])
    by_address = pieces.only(raw[pieces.tensor] & (pieces.bytes > 0))
    segments = piece_segments(by_address, begins, memory.data_ptr())
    if copies.runtime is not None:
        found = [copies.device_of(tensor) for tensor in tensors]
        of_tensors = np.array([-1 if device is None else device for device in found], dtype=np.int64)
        devices = of_tensors[by_address.tensor]
        for device in set(devices[devices >= 0].tolist()):
            copies.on(device).add(segments[devices == device], tensors)
        segments = np.ascontiguousarray(segments[devices < 0])
    for number in np.flatnonzero(~raw[pieces.tensor]).tolist():
        tensor, size = tensors[int(pieces.tensor[number])].detach(), int(pieces.bytes[number])
        if size != tensor.nbytes:
            row_bytes = tensor.nbytes // len(tensor)
            first = int(pieces.source_offset[number]) // row_bytes
            tensor = tensor[first : first + size // row_bytes]
        copies.put(place_of(memory, int(pieces.place[number]), tensor), tensor)
    return segments


def piece_segments(pieces: TensorPieces, begins: U64, address: int) -> U64:
    """(source, target, bytes) of pieces, uint64 [n, 3]. begins: the addresses of all tensors."""
    segments = np.empty((len(pieces.tensor), 3), dtype=np.uint64)
    segments[:, 0] = begins[pieces.tensor] + pieces.source_offset.astype(np.uint64)
    segments[:, 1] = pieces.place.astype(np.uint64) + np.uint64(address)
    segments[:, 2] = pieces.bytes.astype(np.uint64)
    return segments


def place_of(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes from `begin` on as a contiguous tensor of the dtype and shape of another one; no copy."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    end = begin + like.numel() * like.element_size()
    return memory[begin:end].view(like.dtype).view(like.shape)
