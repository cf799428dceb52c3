"""CUDA devices through torch.cuda: its streams, events and allocators, so that torch knows all queued work.

Nothing here starts CUDA: it is used only for tensors that are already on a device. On ROCm the same calls reach HIP.

Kernels are those of the CUDA library if they run, else torch's own operations. ASYNCCKPT_CUDA=0 chooses torch's;
ASYNCCKPT_CUDA=1 makes it an error when the library cannot be used.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from asyncckpt.devices.batch import failing, not_pinned
from asyncckpt.devices.contract import Event, Kernels, Runtime, Stream
from asyncckpt.devices.library_kernels import LibraryKernels
from asyncckpt.devices.side_memory import SideMemory
from asyncckpt.devices.torch_kernels import TorchKernels
from asyncckpt.errors import DeadlineError, UnsupportedError, Words, must_be
from asyncckpt.native import UnusableLibrary
from asyncckpt.native.cuda import DeviceFailure, load_cuda_library
from asyncckpt.options import DEVICE_DEADLINE_S
from asyncckpt.signals import Guard

ENVIRONMENT_VARIABLE = "ASYNCCKPT_CUDA"
PAUSE_S_MIN, PAUSE_S_MAX = 50e-6, 2e-3
SIDE_PRIORITY = -1
"""The priority of side streams: the trainer waits for their kernels, so these run before its own."""

_PORTABLE, _MAPPED, _ALREADY_REGISTERED = 1, 2, 712

_log = logging.getLogger("asyncckpt")


class CudaEvent:
    """Implements contract.Event."""

    def __init__(self, runtime: CudaRuntime, stream: torch.cuda.Stream) -> None:
        self._runtime, self._device = runtime, int(stream.device_index)
        with runtime.calling(self._device, "recording an event"):
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record(stream)

    def is_done(self) -> bool:
        with self._runtime.calling(self._device, "a copy"):
            return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        wait_until(self.is_done)


class CudaRuntime:
    """Implements contract.Runtime."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._side_streams: dict[int, torch.cuda.Stream] = {}
        self._kernels: dict[int, Kernels] = {}
        self._side_memory = SideMemory(lambda device: int(torch.cuda.mem_get_info(device)[0]), self._allocate)
        self._home = 0  # A device that this process uses, for calls without a device.

    def device_of(self, tensor: torch.Tensor) -> int | None:
        if not tensor.is_cuda:
            return None
        self._home = tensor.get_device()
        return self._home

    def devices_in_use(self) -> list[int]:
        # A stream on another device would create a context there, which takes hundreds of megabytes of its memory.
        has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        if has_context is None:
            return [torch.cuda.current_device()]
        return [device for device in range(torch.cuda.device_count()) if has_context(device)]

    @contextmanager
    def calling(self, device: int, what: str) -> Iterator[None]:
        """Call torch for a device, without ending the capture of a graph by another thread.

        The device of a background thread is 0, which other ranks may use. torch.cuda.device goes back to it without
        making a context there, which torch.cuda.stream does.
        """
        kernels = self.kernels(device)
        beside = kernels.beside_captures() if isinstance(kernels, LibraryKernels) else nullcontext()
        with failing(what), torch.cuda.device(device), beside:
            yield

    def side_stream(self, device: int) -> Stream:
        if device not in self._side_streams:
            with self.calling(device, "making a stream"):
                made = self._new_stream(device)
            with self._guard:
                self._side_streams.setdefault(device, made)
        return self._side_streams[device]

    def _new_stream(self, device: int) -> torch.cuda.Stream:
        kernels = self.kernels(device)
        if isinstance(kernels, LibraryKernels):
            return torch.cuda.ExternalStream(kernels.new_stream(), device)  # type: ignore[no-untyped-call]
        # Of 32 that torch hands out in turn, so a trainer with as many may get the same one.
        return torch.cuda.Stream(device, priority=SIDE_PRIORITY)  # type: ignore[no-untyped-call]

    def current_stream(self, device: int) -> Stream:
        return torch.cuda.current_stream(device)

    def device_of_stream(self, stream: Stream) -> int:
        return int(stream.device_index)

    def is_capturing(self) -> bool:
        try:
            return torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # The device is lost. What is on the host can still be saved.
            return False

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        with self.calling(int(stream.device_index), "queueing a copy"), torch.no_grad(), torch.cuda.stream(stream):
            work()

    def handle(self, stream: Stream) -> int:
        return int(stream.cuda_stream)

    def record(self, stream: Stream) -> Event:
        return CudaEvent(self, stream)

    def hold_back(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        with failing("ordering a stream"):
            stream.wait_event(event.event)

    def new_pinned(self, bytes: int) -> torch.Tensor:
        with self.calling(self._home, "allocating pinned memory"):
            return torch.empty(bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def new_memory(self, device: int, bytes: int) -> torch.Tensor:
        return self._side_memory.new(device, bytes)

    def _allocate(self, device: int, bytes: int) -> torch.Tensor:
        stream = self.side_stream(device)
        with self.calling(device, f"allocating memory on device {device}"), torch.cuda.stream(stream):
            return torch.empty(bytes, dtype=torch.uint8, device=f"cuda:{device}")

    def view(self, address: int, bytes: int, device: int | None) -> torch.Tensor:
        if device is None:
            return host_view(address, bytes)
        with torch.cuda.device(device):
            return torch.as_tensor(_OnDevice(address, bytes), device=f"cuda:{device}")

    def register(self, address: int, bytes: int) -> None:
        kernels = self.kernels(self._home)
        if isinstance(kernels, LibraryKernels):  # It ensures that kernels can use the memory at this address.
            kernels.register(address, bytes)
            return
        with failing("pinning host memory"), torch.cuda.device(self._home):
            code = int(torch.cuda.cudart().cudaHostRegister(address, bytes, _PORTABLE | _MAPPED))  # type: ignore[no-untyped-call]
        if code not in (0, _ALREADY_REGISTERED):
            raise not_pinned(bytes, found=Words(f"CUDA error {code}"))

    def unregister(self, address: int) -> None:
        kernels = self.kernels(self._home)
        if isinstance(kernels, LibraryKernels):
            kernels.unregister(address)
            return
        with failing("unpinning host memory"), torch.cuda.device(self._home):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def kernels(self, device: int) -> Kernels:
        with self._guard:
            if device not in self._kernels:
                self._kernels[device] = choose_kernels(self, device)
            return self._kernels[device]


class _OnDevice:
    def __init__(self, address: int, bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {**_described(address, bytes), "strides": None}


class _OnHost:
    def __init__(self, address: int, bytes: int) -> None:
        self.__array_interface__ = _described(address, bytes)


def _described(address: int, bytes: int) -> dict[str, Any]:
    return {"version": 3, "data": (address, False), "shape": (bytes,), "typestr": "|u1"}


def host_view(address: int, bytes: int) -> torch.Tensor:
    """Return host memory at an address, uint8 [bytes]; the caller keeps it alive."""
    if not bytes:  # Before 2.3, NumPy takes no array at address 0.
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_numpy(np.asarray(_OnHost(address, bytes)))


def choose_kernels(runtime: Runtime, device: int) -> Kernels:
    """Return the kernels for a device. Raises UsageError for a wrong variable, UnsupportedError if 1 is impossible."""
    wish = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if wish not in ("", "0", "1"):
        raise must_be(ENVIRONMENT_VARIABLE, "0, 1 or unset", wish)
    if wish == "0":
        return TorchKernels(runtime, device)
    try:
        library = load_cuda_library()
        library.check_usable(device)
    except (UnusableLibrary, DeviceFailure) as error:
        if wish == "1":
            raise UnsupportedError(
                f"{ENVIRONMENT_VARIABLE}=1 but the CUDA library cannot be used on device {device}", found=Words(error)
            ) from error
        _log.warning("asyncckpt: torch copies on device %d, slower for small tensors and rows: %s", device, error)
        return TorchKernels(runtime, device)
    return LibraryKernels(runtime, device, library)


def wait_until(is_done: Callable[[], bool], *, deadline_s: float = DEVICE_DEADLINE_S) -> None:
    """Block this thread, not the interpreter, until `is_done`. Raises DeadlineError after deadline_s seconds.

    A hanging stream of the trainer would block all saves.
    """
    until = time.monotonic() + deadline_s
    pause = PAUSE_S_MIN
    while not is_done():
        if time.monotonic() >= until:
            raise DeadlineError(
                f"a device was not done with its copies after {deadline_s} s",
                hint="a stream of the trainer may hang: copies wait for what was queued before them",
            )
        time.sleep(pause)
        pause = min(2 * pause, PAUSE_S_MAX)
