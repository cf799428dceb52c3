"""torch.cuda in small, for CudaRuntime: contexts, streams out of pools, and captures of graphs.

It keeps a device's rules, and does no work: there is no memory behind it, and nothing is queued.

    contexts    a call that works on a device makes a context there; so does setting the device of a thread, which is 0
                in a thread that has set none. `torch.cuda.device` goes back without one, `torch.cuda.stream` does not
    streams     torch hands out 32 of each priority and device, in turn: the 33rd is the first once more
    captures    while one thread captures a graph in torch's default mode, a wait or an allocation of any other thread
                ends it, unless that thread goes beside captures

Sources: torch/cuda/__init__.py (StreamContext, device), c10/cuda/CUDAFunctions.cpp (MaybeSetDevice),
c10/cuda/CUDAStream.cpp (kStreamsPerPool), and CUDA's pages on cudaThreadExchangeStreamCaptureMode.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

STREAMS_PER_POOL = 32
GLOBAL_MODE = 0


@dataclass(frozen=True)
class PlainStream:
    """A torch.cuda.Stream. Two with one handle are one stream."""

    device: int
    cuda_stream: int

    @property
    def device_index(self) -> int:
        return self.device

    def wait_event(self, event: Any) -> None:
        """Guards its device, as torch does."""


class SimulatedTorch:
    """Stands in for the module torch in cuda_runtime.py."""

    uint8, no_grad = torch.uint8, torch.no_grad

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.capturing: int | None = None  # The thread that captures.
        self.is_capture_ended = False
        self._here = threading.local()
        self._taken: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._own_streams = 0
        self._guard = threading.Lock()
        self.cuda = SimpleNamespace(
            Stream=self._pooled,
            ExternalStream=lambda handle, device: PlainStream(device, handle),
            Event=lambda: _Event(self),
            OutOfMemoryError=torch.cuda.OutOfMemoryError,
            device=self._on_device,
            stream=self._on_stream,
            current_stream=lambda device=None: self._current(self.device if device is None else device),
            current_device=lambda: self.device,
            is_current_stream_capturing=lambda: self.capturing == threading.get_ident(),
        )

    # -- what a test looks at and arranges -----------------------------------------------------------------------

    @property
    def device(self) -> int:
        """This thread's device."""
        return getattr(self._here, "device", 0)

    @property
    def mode(self) -> int:
        """How this thread goes beside captures."""
        return getattr(self._here, "mode", GLOBAL_MODE)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph in this thread; AssertionError if another one ended that."""
        self.capturing, self.is_capture_ended = threading.get_ident(), False
        try:
            yield
        finally:
            self.capturing = None
        assert not self.is_capture_ended, "another thread ended the capture of a graph"

    # -- what happens --------------------------------------------------------------------------------------------

    def work(self) -> None:
        """A call that works on this thread's device."""
        self.contexts.add(self.device)

    def unsafe(self) -> None:
        """A call that waits or allocates."""
        self.work()
        if self.capturing is not None and self.mode == GLOBAL_MODE:
            self.is_capture_ended = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def set_device(self, device: int) -> None:
        self._here.device = device
        self.contexts.add(device)

    def exchange_mode(self, mode: int) -> int:
        before, self._here.mode = self.mode, mode
        return before

    def new_stream(self) -> int:
        """A stream that nobody else has."""
        self.work()
        with self._guard:
            self._own_streams += 1
            return 0x1000_0000 + self._own_streams

    def empty(self, bytes: int, *, dtype: torch.dtype, device: str, pin_memory: bool = False) -> torch.Tensor:
        """On the host in any case. torch's allocator of devices goes beside captures by itself, that of pinned memory
        does not."""
        if pin_memory:
            self.unsafe()
        else:
            before, number = self.device, int(device.removeprefix("cuda:"))
            self.set_device(number)
            self._go_back(before)
        return torch.empty(bytes, dtype=dtype)

    def _go_back(self, device: int) -> None:
        """As MaybeSetDevice: no context is made for it."""
        self._here.device = device

    @contextmanager
    def _on_device(self, device: int) -> Iterator[None]:
        before = self.device
        if device != before:
            self.set_device(device)
        try:
            yield
        finally:
            self._go_back(before)

    @contextmanager
    def _on_stream(self, stream: PlainStream) -> Iterator[None]:
        before = self._current(self.device)
        there = self._current(stream.device)
        self._set_stream(stream)
        try:
            yield
        finally:
            if before.device != stream.device:
                self._set_stream(there)
            self._set_stream(before)

    def _set_stream(self, stream: PlainStream) -> None:
        if stream.device != self.device:
            self.set_device(stream.device)
        self._streams()[stream.device] = stream

    def _current(self, device: int) -> PlainStream:
        return self._streams().get(device, PlainStream(device, 0))

    def _streams(self) -> dict[int, PlainStream]:
        if not hasattr(self._here, "streams"):
            self._here.streams = {}
        found: dict[int, PlainStream] = self._here.streams
        return found

    def _pooled(self, device: int, priority: int = 0) -> PlainStream:
        with self._on_device(device), self._guard:
            number = self._taken[device, priority] % STREAMS_PER_POOL
            self._taken[device, priority] += 1
            return PlainStream(device, 0x100 + 0x1000 * device + 0x100 * -priority + number)


class _Event:
    def __init__(self, torch: SimulatedTorch) -> None:
        self._torch = torch

    def record(self, stream: PlainStream) -> None:
        with self._torch._on_device(stream.device):
            self._torch.work()

    def query(self) -> bool:
        self._torch.unsafe()
        return True


class SimulatedLibrary:
    """Stands in for native.cuda.CudaLibrary: its calls restore this thread's device, and go beside captures."""

    def __init__(self, torch: SimulatedTorch) -> None:
        self._torch = torch
        self.is_usable = True

    def check_usable(self, device: int) -> None:
        self._call(device)

    def host_register(self, device: int, address: int, bytes: int) -> None:
        self._call(device)

    def host_unregister(self, device: int, address: int) -> None:
        self._call(device)

    def new_stream(self, device: int) -> int:
        with self._torch._on_device(device), self.beside_captures():
            return self._torch.new_stream()

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        before = self._torch.exchange_mode(2)
        try:
            yield
        finally:
            self._torch.exchange_mode(before)

    def _call(self, device: int) -> None:
        with self._torch._on_device(device), self.beside_captures():
            self._torch.unsafe()
