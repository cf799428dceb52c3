"""The runtime of this process: CUDA once it is in use, else none. Tests put one of their own in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncckpt.devices.contract import Runtime
from asyncckpt.devices.cuda_runtime import CudaRuntime

_cuda = CudaRuntime()
_instead: list[Runtime] = []


def runtime() -> Runtime | None:
    """The runtime whose devices tensors may be on; None while this process uses no device."""
    if _instead:
        return _instead[-1]
    # A tensor can be on a device only in a process that has started CUDA.
    return _cuda if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


@contextmanager
def use(other: Runtime) -> Iterator[None]:
    """Let another runtime own the devices of this process, for tests."""
    _instead.append(other)
    try:
        yield
    finally:
        _instead.remove(other)


def device_of(tensor: torch.Tensor) -> int | None:
    """The number of the device that a tensor's storage is on; None: the host, or a kind of device not known here."""
    found = runtime()
    return None if found is None else found.device_of(tensor)
