"""Torch's operations on tensors of simulated devices are queued on the current stream, as CUDA's are.

Operations hold no reference to the tensors that they work on, only addresses, because neither do CUDA's: what is
dropped too early is used by somebody else then. Copies from and to the host follow aten/src/ATen/native/cuda/Copy.cu.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from asyncckpt.devices.cuda_runtime import host_view

if TYPE_CHECKING:
    from tests.simulated_device.runtime import SimulatedRuntime


class QueueingMode(TorchDispatchMode):
    """While it is entered, operations of this thread on tensors of devices are queued."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = {self._runtime.device_of(tensor) for tensor in _tensors([*args, *kwargs.values()])} - {None}
        if not devices or _is_view(func):
            return func(*args, **kwargs)
        if len(devices) > 1:
            raise self._runtime.schedule.fault(f"{func} of tensors on several devices")
        (device,) = devices
        assert device is not None
        self._runtime.call(device)
        if func is torch.ops.aten.copy_.default:
            return self._copy(*args, **kwargs, device=device)
        return self._compute(func, args, kwargs, device)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False, *, device: int) -> Any:
        runtime = self._runtime
        if runtime.device_of(target) is None:
            self._to_host(target, source, non_blocking, device)
        else:
            from_host = runtime.device_of(source) is None
            if from_host and not (non_blocking and _is_pinned(runtime, source)):
                given = source.clone()  # CUDA has its own copy of it when the call returns.
            else:
                given = alias(source)
            runtime.queue(runtime.current_stream(device), partial(alias(target).copy_, given), name="copy_")
        return target

    def _to_host(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool, device: int) -> None:
        runtime = self._runtime
        if not target.is_contiguous() or target.dtype != source.dtype:
            raise runtime.schedule.fault("a copy to the host that torch makes in two steps, the second one too early")
        stream = runtime.current_stream(device)
        is_waited_for = not _is_pinned(runtime, target) or not non_blocking
        differs = target.is_conj() != source.is_conj(), target.is_neg() != source.is_neg()
        runtime.queue(stream, partial(_copy_bits, alias(target), alias(source)), name="copy_ to the host")
        if is_waited_for:
            runtime.record(stream).wait()
        # So does torch, whether the copy has arrived or not.
        if differs[0]:
            alias(target).conj_physical_()
        if differs[1]:
            alias(target).neg_()

    def _compute(self, func: Any, args: Any, kwargs: Any, device: int) -> Any:
        runtime = self._runtime
        stream = runtime.current_stream(device)

        def seen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if runtime.device_of(tensor) is None else alias(tensor)

        own_args, own_kwargs = tree_map_only(torch.Tensor, seen, (args, kwargs))
        work = partial(func, *own_args, **own_kwargs)
        if func._schema.is_mutable:
            self._check_mutated(func, args, kwargs)
            runtime.queue(stream, work, name=str(func))
            return args[0] if func._schema.returns else None
        try:
            shaped = func(*tree_map_only(torch.Tensor, _on_meta, args), **tree_map_only(torch.Tensor, _on_meta, kwargs))
            assert isinstance(shaped, torch.Tensor)
        except (NotImplementedError, AssertionError, RuntimeError):
            # A number, or something whose shape depends on values: the host waits for it.
            found: list[Any] = []
            runtime.queue(stream, lambda: found.append(work()), name=str(func))
            runtime.record(stream).wait()
            return tree_map_only(
                torch.Tensor, lambda t: runtime.new_tensor(t.shape, t.dtype, device, values=t), found[0]
            )
        result = runtime.new_strided(shaped, device)
        target = alias(result)
        runtime.queue(stream, lambda: target.copy_(work()), name=str(func))
        return result

    def _check_mutated(self, func: Any, args: Any, kwargs: Any) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[index] if index < len(args) else kwargs[argument.name]
                for tensor in tree_leaves(given):
                    if self._runtime.device_of(tensor) is None:
                        raise self._runtime.schedule.fault(f"{func} on the host with an operand on a device")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that keeps nothing alive."""
    storage = tensor.untyped_storage()
    whole = host_view(storage.data_ptr(), storage.nbytes())
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


def _tensors(operands: Iterable[Any]) -> Iterator[torch.Tensor]:
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            yield operand
        elif isinstance(operand, (list, tuple)):
            yield from _tensors(operand)


def _copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Without regard to conjugate and negative bits."""
    bare = torch.empty(0, dtype=source.dtype)
    bare.set_(source.untyped_storage(), source.storage_offset(), source.size(), source.stride())
    flat = bare.contiguous().reshape(-1).view(torch.uint8)
    host_view(target.data_ptr(), flat.numel()).copy_(flat)


def _is_pinned(runtime: SimulatedRuntime, tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    begin = tensor.data_ptr()
    return runtime.is_pinned_for_engine(
        np.array([[begin, min(tensor.nbytes, storage.data_ptr() + storage.nbytes() - begin)]])
    )


def _is_view(func: Any) -> bool:
    """Whether results are other views of the operands, so that nothing is read."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
