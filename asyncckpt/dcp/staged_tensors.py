"""Copies of many tensors in one piece of host memory: of those on the CPU at once, of those on devices behind a fence.

The memory is an arena, if there is one to be had at once, pinned for the devices that write to it. It goes back to the
pool when the last tensor over it is gone. Else it is memory of its own.

#   arena        by                 when
#   lent         StagedTensors      it was filled, or copies to it are on their way
#   given back   weakref.finalize   nobody holds a tensor over it any more
#   discarded    settle             a device has failed and may still write to it
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.caller_streams import check_not_capturing
from asyncckpt.devices.chosen import device_of
from asyncckpt.devices.host_copies import HostCopies, Pending
from asyncckpt.engine.device_stage import host_copies, launch
from asyncckpt.errors import DeadlineError, DeviceError
from asyncckpt.native import U8, core
from asyncckpt.options import SaveOptions
from asyncckpt.plan.leaf_facts import addresses, check_extent, shrunk_storages
from asyncckpt.staging.arena import Arena
from asyncckpt.staging.pool import pool

_ALIGNMENT = 64


class StagedTensors:
    """Contiguous copies on the CPU of tensors on any device, in their order.

    When it is made, the host has copied its own; of devices, the streams that are current wait until theirs are copied.
    `settle` must be called before anything is read, and before the last reference to `tensors` goes. UsageError for a
    tensor whose storage is gone, and inside the capture of a graph; DeviceError.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], options: SaveOptions) -> None:
        check_not_capturing("a save")
        sizes = np.array([tensor.numel() * tensor.element_size() for tensor in tensors], dtype=np.int64)
        rounded = -(-sizes // _ALIGNMENT) * _ALIGNMENT
        begins = np.cumsum(rounded) - rounded
        raw = _check(tensors, sizes)
        bytes = int(rounded.sum())
        arena = _arena(bytes, limit_bytes=options.host_memory_limit)
        self._lease: weakref.finalize[[Arena], U8] | None = None
        memory = torch.empty(bytes, dtype=torch.uint8) if arena is None else self._lend(arena, bytes)
        self.tensors = [
            memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)
            if size
            else torch.empty(tensor.shape, dtype=tensor.dtype)
            for tensor, begin, size in zip(tensors, begins.tolist(), sizes.tolist(), strict=True)
        ]
        segments = np.empty((len(raw), 3), dtype=np.uint64)
        segments[:, 0] = addresses([tensors[number] for number in raw])
        segments[:, 1] = begins[raw].astype(np.uint64) + np.uint64(memory.data_ptr())
        segments[:, 2] = sizes[raw].astype(np.uint64)
        copies = host_copies(options)
        own = _list_segments(copies, tensors, raw, segments)
        for number in sorted(set(range(len(tensors))) - set(raw)):
            copies.put(self.tensors[number], tensors[number].detach())
        self._pending = Pending()
        try:
            self._pending = copies.launch() if arena is None else launch(copies, arena, options)
        except DeviceError:
            self._discard()
            raise
        try:
            core.copy(own)
        except BaseException:
            self.settle()
            raise

    @property
    def is_settled(self) -> bool:
        """Whether nothing is on its way."""
        return not self._pending.devices

    def settle(self) -> None:
        """Wait until all copies are there; from any thread. DeviceError."""
        try:
            self._pending.settle()
        except (DeviceError, DeadlineError):
            self._discard()
            raise

    def _lend(self, arena: Arena, bytes: int) -> torch.Tensor:
        """The first bytes of an arena, for as long as anything uses them."""
        arena.seal()
        pool.lend(arena)
        view = arena.view()[:bytes]
        # torch keeps the array as long as the storage that is made of it, and so as long as any view of that.
        self._lease = weakref.finalize(view, pool.release, arena)
        self._lease.atexit = False
        return torch.from_numpy(view)

    def _discard(self) -> None:
        detached = None if self._lease is None else self._lease.detach()
        if detached is not None:
            pool.discard(detached[2][0])


def _check(tensors: Sequence[torch.Tensor], sizes: NDArray[np.int64]) -> list[int]:
    """The numbers of the tensors that are copied by address; UsageError for one whose storage is gone."""
    found = [number for number, tensor in enumerate(tensors) if sizes[number] and _is_plain(tensor)]
    held = [tensors[number] for number in found]
    itemsizes = np.array([tensor.element_size() for tensor in held], dtype=np.int64)
    for index in shrunk_storages(held, bytes=sizes[found], itemsizes=itemsizes):
        check_extent(held[index], f"tensor {found[index]} of the state")
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    is_known = tensor.is_cpu or device_of(tensor) is not None
    return is_known and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _list_segments(
    copies: HostCopies, tensors: Sequence[torch.Tensor], raw: Sequence[int], segments: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Add the segments of tensors on devices to `copies`; return those of the host."""
    if copies.runtime is None:
        return segments
    by_device: dict[int | None, list[int]] = {None: []}
    for index, number in enumerate(raw):
        by_device.setdefault(copies.device_of(tensors[number]), []).append(index)
    for device, indices in by_device.items():
        if device is not None:
            copies.on(device).add(segments[indices], [tensors[raw[index]] for index in indices])
    return np.ascontiguousarray(segments[by_device[None]])


def _arena(bytes: int, *, limit_bytes: int | None) -> Arena | None:
    """An arena, if there is one to be had at once."""
    if not pool.fits(bytes, limit_bytes=limit_bytes):
        return None
    try:
        return pool.acquire(bytes, deadline_s=0, limit_bytes=limit_bytes)
    except DeadlineError:
        return None
