"""The device runtime of this process: CUDA when it is in use, else none; and the streams of a thread that calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from asyncckpt.devices.contract import Runtime
from asyncckpt.devices.cuda_runtime import CudaRuntime
from asyncckpt.errors import UsageError

_cuda = CudaRuntime()
_instead: list[Runtime] = []
_MEMORY = np.zeros(1, dtype=np.uint8)
_ADDRESS = _MEMORY.ctypes.data


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
    if not _takes_memory():
        raise UsageError(f"{what} was called in a function that torch traces or transforms", hint="call it outside")


def _takes_memory() -> bool:
    """Return whether torch's tensors are over the memory that they are given: where it traces they are copies of it."""
    made = torch.from_numpy(_MEMORY)
    try:
        return type(made) is torch.Tensor and made.data_ptr() == _ADDRESS
    except RuntimeError:  # It has none: torch.func.grad.
        return False
