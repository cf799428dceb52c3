"""The device runtime of this process: CUDA when it is in use, else none; and the streams of a thread that calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch

from asyncckpt.devices.contract import Runtime
from asyncckpt.devices.cuda_runtime import CudaRuntime
from asyncckpt.errors import UsageError
from asyncckpt.model.torch_use import check_not_traced, instead, uses_devices

_cuda = CudaRuntime()


def runtime() -> Runtime | None:
    """Return the runtime whose devices may hold tensors; None while this process uses no device."""
    if not uses_devices():
        return None
    return cast(Runtime, instead[-1]) if instead else _cuda


@contextmanager
def use(other: Runtime) -> Iterator[None]:
    """Replace the runtime of this process, for tests."""
    instead.append(other)
    try:
        yield
    finally:
        instead.remove(other)


def device_of(tensor: torch.Tensor) -> int | None:
    """Return the index of the device of a tensor's storage; None for the host or an unknown kind of device."""
    found = runtime()
    return None if found is None else found.device_of(tensor)


class CallerStreams:
    """What this thread's streams have queued so far, on every device in use: a thread has current streams of its own.

    A load in the background orders its work after that of its caller: made on the caller's thread, then `follow` and,
    at the end, `wait` on the loading thread. Raises UsageError while a graph is being captured, DeviceError.
    """

    def __init__(self) -> None:
        check_not_capturing("a load")
        self._runtime = found = runtime()
        devices = [] if found is None else found.devices_in_use()
        self._events = [(device, found.record(found.current_stream(device))) for device in devices if found is not None]

    def follow(self) -> None:
        """Make the streams of this thread wait for those of the caller, not the host. Raises DeviceError."""
        for device, event in self._events:
            assert self._runtime is not None
            self._runtime.hold_back(self._runtime.current_stream(device), event)

    def wait(self) -> None:
        """Wait for everything that this thread has queued on these devices. Raises DeviceError."""
        for device, _ in self._events:
            assert self._runtime is not None
            self._runtime.record(self._runtime.current_stream(device)).wait()


def check_not_capturing(what: str) -> None:
    """Raise UsageError, naming the call `what`, if this thread's work is captured into a graph, or traced."""
    found = runtime()
    if found is not None and found.is_capturing():
        raise UsageError(f"{what} was called while a graph is being captured", hint="call it between replays")
    check_not_traced(what)
