"""The device runtime of this process: CUDA when it is in use, else none. Tests replace it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncckpt.devices.contract import Runtime
from asyncckpt.devices.cuda_runtime import CudaRuntime
from asyncckpt.errors import UsageError

_cuda = CudaRuntime()
_instead: list[Runtime] = []


def runtime() -> Runtime | None:
    """Return the runtime whose devices may hold tensors; None while this process uses no device."""
    if _instead:
        return _instead[-1]
    # A tensor can be on a device only in a process that has started CUDA.
    return _cuda if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


@contextmanager
def use(other: Runtime) -> Iterator[None]:
    """Replace the runtime of this process, for tests."""
    _instead.append(other)
    try:
        yield
    finally:
        _instead.remove(other)


def device_of(tensor: torch.Tensor) -> int | None:
    """Return the index of the device of a tensor's storage; None for the host or an unknown kind of device."""
    found = runtime()
    return None if found is None else found.device_of(tensor)


def check_not_capturing(what: str) -> None:
    """Raise UsageError, naming the call `what`, if this thread's work is being captured into a graph."""
    found = runtime()
    if found is not None and found.is_capturing():
        raise UsageError(f"{what} was called while a graph is being captured", hint="call it between replays")
