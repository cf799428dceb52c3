"""Stage a state for dcp.async_save: one native copy of all of it into an arena, touched once and used again.

Tensors of the staged state are views of the arena. It goes back to the pool when the last of them is gone, so whoever
keeps one (a planner, another library's writer) keeps it valid. Where no arena is to be had at once, tensors are copied
one by one into memory of their own.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.staging import AsyncStager as DcpAsyncStager

from asyncckpt.errors import DeadlineError, UsageError
from asyncckpt.native import core
from asyncckpt.plan.leaf_facts import addresses, check_extent, shrunk_storages
from asyncckpt.staging.arena import Arena
from asyncckpt.staging.pool import pool

_ALIGNMENT = 64
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_ATOMS = (str, int, float, bool, bytes)


class AsyncStager(DcpAsyncStager):
    """An AsyncStager for torch.distributed.checkpoint.async_save on the arenas of this process.

        dcp.async_save(state_dict, storage_writer=..., async_stager=asyncckpt.dcp.AsyncStager())

    A StorageWriter of this package is one itself. When `stage` returns, the state may be changed and freed: every
    tensor is copied, also those on the CPU, and other objects are deep copies.

    host_memory_limit  as of a StorageWriter

    Source of the interface: torch.distributed.checkpoint.staging.AsyncStager.
    """

    # What `stage` returns is complete.
    _synchronize_after_execute = False

    def __init__(self, *, host_memory_limit: int | None = None) -> None:
        if host_memory_limit is not None and (type(host_memory_limit) is not int or host_memory_limit < 0):
            raise UsageError("host_memory_limit is wrong", found=host_memory_limit, expected="bytes, or None")
        self._stage_bytes_max = host_memory_limit

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the state on the CPU, of the same structure."""
        found: dict[int, torch.Tensor] = {}
        _collect(state_dict, found)
        copies = _copy_all(list(found.values()), limit_bytes=self._stage_bytes_max)
        staged: dict[str, Any] = _rebuild(state_dict, dict(zip(found, copies, strict=True)))
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to close: arenas belong to the process."""


def _collect(value: Any, found: dict[int, torch.Tensor]) -> None:
    """Find all tensors with plain storage, each once and by its id: tied ones stay tied."""
    kind = type(value)
    if kind in _PLAIN_TENSORS:
        if value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_nested):
            found[id(value)] = value
    elif isinstance(value, torch.Tensor):
        for inner in _inner_tensors(value):
            _collect(inner, found)
    elif isinstance(value, Mapping):
        for child in value.values():
            _collect(child, found)
    elif kind is list or kind is tuple:
        for child in value:
            _collect(child, found)


def _rebuild(value: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    """The same structure with the copies in the places of the tensors that were found."""
    kind = type(value)
    if value is None or kind in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        copied = copies.get(id(value))
        return _rebuilt_tensor(value, copies) if copied is None else copied
    if isinstance(value, Mapping):
        return {key: _rebuild(child, copies) for key, child in value.items()}
    if kind is list or kind is tuple:
        return kind([_rebuild(child, copies) for child in value])
    return copy.deepcopy(value)


def _inner_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """What a subclass is made of, if that is known: a wrapper's inner tensors (DTensor), a ShardedTensor's shards."""
    if _is_sharded_tensor(value):
        return [shard.tensor for shard in value.local_shards()]
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return [getattr(value, name) for name in names]
    return []


def _rebuilt_tensor(value: torch.Tensor, copies: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if _is_sharded_tensor(value):
        return _rebuilt_sharded_tensor(value, copies)
    if not hasattr(value, "__tensor_flatten__"):
        return value.detach().cpu().clone()
    names, context = value.__tensor_flatten__()
    inner = {name: _rebuild(getattr(value, name), copies) for name in names}
    kind: Any = type(value)
    rebuilt: torch.Tensor = kind.__tensor_unflatten__(inner, context, value.size(), value.stride())
    return rebuilt


def _is_sharded_tensor(value: torch.Tensor) -> TypeGuard[ShardedTensor]:
    return isinstance(value, ShardedTensor)


def _rebuilt_sharded_tensor(value: ShardedTensor, copies: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if any(not shard.tensor.is_cpu for shard in value.local_shards()):
        moved: torch.Tensor = value.cpu()  # With its metadata, which names devices.
        return moved
    shards = [Shard(_rebuild(shard.tensor, copies), shard.metadata) for shard in value.local_shards()]
    rebuilt: torch.Tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, value.metadata(), process_group=value._process_group, init_rrefs=False
    )
    return rebuilt


def _copy_all(tensors: Sequence[torch.Tensor], *, limit_bytes: int | None) -> list[torch.Tensor]:
    """Contiguous copies on the CPU, one behind the other in one piece of memory."""
    sizes = np.array([tensor.numel() * tensor.element_size() for tensor in tensors], dtype=np.int64)
    rounded = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    begins = np.cumsum(rounded) - rounded
    memory = _memory(int(rounded.sum()), limit_bytes=limit_bytes)
    copies = [
        memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        if size
        else torch.empty(tensor.shape, dtype=tensor.dtype)
        for tensor, begin, size in zip(tensors, begins.tolist(), sizes.tolist(), strict=True)
    ]
    raw = [number for number, tensor in enumerate(tensors) if sizes[number] and _has_address(tensor)]
    held = [tensors[number] for number in raw]
    itemsizes = np.array([tensor.element_size() for tensor in held], dtype=np.int64)
    for number in shrunk_storages(held, bytes=sizes[raw], itemsizes=itemsizes):
        check_extent(held[number], f"tensor {raw[number]} of the state")
    segments = np.empty((len(raw), 3), dtype=np.uint64)
    segments[:, 0] = addresses(held)
    segments[:, 1] = begins[raw].astype(np.uint64) + np.uint64(memory.data_ptr())
    segments[:, 2] = sizes[raw].astype(np.uint64)
    core.copy(segments)
    for number in sorted(set(range(len(tensors))) - set(raw)):
        copies[number].copy_(tensors[number].detach())
    return copies


def _has_address(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _memory(bytes: int, *, limit_bytes: int | None) -> torch.Tensor:
    """Memory for copies: an arena if there is one to be had at once, for as long as anything uses it."""
    arena = _arena(bytes, limit_bytes=limit_bytes)
    if arena is None:
        return torch.empty(bytes, dtype=torch.uint8)
    arena.seal()
    pool.lend(arena)
    lease = arena.view()[:bytes]
    # torch keeps the array as long as the storage that is made of it, and so as long as any view of that.
    weakref.finalize(lease, pool.release, arena).atexit = False
    return torch.from_numpy(lease)


def _arena(bytes: int, *, limit_bytes: int | None) -> Arena | None:
    if not pool.fits(bytes, limit_bytes=limit_bytes):
        return None
    try:
        return pool.acquire(bytes, deadline_s=0, limit_bytes=limit_bytes)
    except DeadlineError:
        return None
