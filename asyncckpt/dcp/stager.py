"""Stage a state for dcp.async_save: copy its tensors at once (engine/save/staged_tensors.py), and deep-copy the rest.

Tensors of the staged state are views of an arena. It goes back to the pool when the last of them is gone, so whoever
keeps one (a planner, another library's writer) keeps it valid.

DCP reads what `stage` returns at once, in its own thread. So copies of devices are waited for, either in `stage`, or
through a Future, which newer versions of DCP wait for in that thread.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeGuard

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import AsyncStager as DcpAsyncStager

from asyncckpt.arguments import check_type
from asyncckpt.engine.process.background import result_of
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.engine.save.staged_tensors import StagedTensors
from asyncckpt.errors import UnsupportedError, Words
from asyncckpt.options import DEVICE_DEADLINE_S, BusyPolicy, DeviceOptions, SaveOptions
from asyncckpt.signals import uninterrupted

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_ATOMS = (str, int, float, bool, bytes)


class AsyncStager(DcpAsyncStager):
    """An AsyncStager for torch.distributed.checkpoint.async_save on the arenas of this process.

        dcp.async_save(state_dict, storage_writer=..., async_stager=asyncckpt.dcp.AsyncStager())

    A StorageWriter of this package is one itself. When `stage` returns, the state may be changed and freed: every
    tensor is copied, also those on the CPU, and other objects are deep copies.

    host_memory_limit     see StorageWriter
    device                see Saver: scratch_bytes (of use with use_async_staging only), pinned_memory_limit and
                          streams; the rest of DeviceOptions has no effect here
    use_async_staging     `stage` does not wait for the copies of tensors on devices: the streams that are current do,
                          before they change the state, and other streams must not change it before the staging is
                          completed. dcp.async_save returns an AsyncSaveResponse then. Needs a torch whose DCP has that

    Source of the interface: torch.distributed.checkpoint.staging.AsyncStager.
    """

    # Whoever reads what `stage` returns need not wait for more.
    _synchronize_after_execute = False

    def __init__(
        self,
        *,
        host_memory_limit: int | None = None,
        device: DeviceOptions = DeviceOptions(),
        use_async_staging: bool = False,
    ) -> None:
        check_type("use_async_staging", use_async_staging, bool)
        if use_async_staging and not hasattr(state_dict_saver, "AsyncSaveResponse"):
            raise UnsupportedError(
                "use_async_staging needs a newer DCP", found=Words(f"torch {torch.__version__}"), hint="leave it out"
            )
        self._uses_async_staging = use_async_staging
        self._staging_options = SaveOptions(host_memory_limit=host_memory_limit, device=device)
        # Resolved when the newest staged state is complete; without that, which would keep its arena.
        self._newest: Future[None] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    @uninterrupted
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Return a copy of the state on the CPU, of the same structure; with use_async_staging a Future of it.

        Waits for loads in flight, and not for saves whose state is captured. UsageError for a tensor without storage,
        DeviceError.
        """
        found: dict[int, torch.Tensor] = {}
        with save_lock.held("staging", None, None, busy=BusyPolicy("queue")):
            _collect(state_dict, found)
            copied = StagedTensors(list(found.values()), self._staging_options)
            try:
                staged: dict[str, Any] = _rebuild(state_dict, dict(zip(found, copied.tensors, strict=True)))
            except BaseException:
                copied.settle()
                raise
        if self._uses_async_staging:
            self._newest = Future()
            return _when_settled(copied, staged, self._newest)
        copied.settle()
        return staged

    @uninterrupted
    def synchronize_staging(self) -> None:
        """Wait until the newest staged state is complete. DeviceError, DeadlineError."""
        if self._newest is not None:
            result_of(self._newest, "the staging", DEVICE_DEADLINE_S)

    def close(self) -> None:
        """Nothing to close: arenas belong to the process."""


def _when_settled(copied: StagedTensors, staged: dict[str, Any], done: Future[None]) -> Future[dict[str, Any]]:
    """Return a Future of a staged state; a thread of its own resolves it, and `done`, when all copies have arrived."""
    future: Future[dict[str, Any]] = Future()

    def settle() -> None:
        try:
            copied.settle()
        except BaseException as error:
            done.set_exception(error)
            future.set_exception(error)
        else:
            done.set_result(None)
            future.set_result(staged)

    if copied.is_settled:
        settle()
    else:
        threading.Thread(target=settle, name="asyncckpt-staging").start()
    return future


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
    """Return the same structure with the copies in place of the tensors that were found."""
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
    """Return the parts of a subclass, if known: a wrapper's inner tensors (DTensor), a ShardedTensor's shards."""
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
    """Rebuild it with its metadata, which names devices, as ShardedTensor.cpu does."""
    shards = [Shard(_rebuild(shard.tensor, copies), _on_cpu(shard.metadata)) for shard in value.local_shards()]
    metadata = copy.copy(value.metadata())
    metadata.shards_metadata = [_on_cpu(shard) for shard in metadata.shards_metadata]
    rebuilt: torch.Tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=value._process_group, init_rrefs=False
    )
    return rebuilt


def _on_cpu(shard: ShardMetadata) -> ShardMetadata:
    """Return a shard's metadata, with a placement on the CPU."""
    placement = shard.placement
    if placement is None or placement.device().type == "cpu":
        return shard
    moved = copy.copy(placement)
    moved._device = torch.device("cpu")
    return ShardMetadata(shard.shard_offsets, shard.shard_sizes, moved)
