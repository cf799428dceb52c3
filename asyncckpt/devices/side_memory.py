"""Memory of a device for copies, asked of torch's allocator only when it is surely there.

An allocator that finds none gives back all that it has cached, waits for the device, and asks again: at each save,
where the scratch memory does not fit. So we look first at what is unused. What an allocation has got before stays in
the cache of the side stream when it is freed, for the next one.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from asyncckpt.signals import Guard

ASKED_FIRST_BYTES = 1 << 20
"""What is smaller comes out of pieces that an allocator has at hand."""
ROUNDED_BYTES = 20 << 20
"""An allocator takes its memory in pieces of up to this size."""


class SideMemory:
    """Thread-safe.

    unused: returns the bytes of a device that nobody has taken, also not to cache them. allocate: returns memory for a
    device's side stream, uint8 [bytes]; raises MemoryError.
    """

    def __init__(self, unused: Callable[[int], int], allocate: Callable[[int, int], torch.Tensor]) -> None:
        self._unused, self._allocate = unused, allocate
        self._guard = Guard()
        self._used: defaultdict[int, int] = defaultdict(int)
        self._most: defaultdict[int, int] = defaultdict(int)  # Used at once, so it is used or cached now.
        self._freed: deque[tuple[int, int]] = deque()  # Finalizers run anywhere, so they only leave a note.

    def new(self, device: int, bytes: int) -> torch.Tensor:
        """Return new memory of a device. Raises MemoryError."""
        if bytes < ASKED_FIRST_BYTES:
            return self._allocate(device, bytes)
        with self._guard:
            self._count_freed()
            cached = self._most[device] - self._used[device]
        if bytes > cached and bytes + ROUNDED_BYTES > (unused := self._unused(device)):
            raise MemoryError(f"{bytes} bytes are more than the {unused} that device {device} has left")
        try:
            memory = self._allocate(device, bytes)
        except MemoryError:
            with self._guard:
                self._most[device] = self._used[device]  # Nothing is cached any more.
            raise
        weakref.finalize(memory, self._freed.append, (device, bytes)).atexit = False
        with self._guard:
            self._used[device] += bytes
            self._most[device] = max(self._most[device], self._used[device])
        return memory

    def _count_freed(self) -> None:
        while self._freed:
            device, bytes = self._freed.popleft()
            self._used[device] -= bytes
