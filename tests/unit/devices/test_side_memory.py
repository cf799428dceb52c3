"""Memory for copies is asked for when it is there, and had again out of the cache when it was there once."""

from __future__ import annotations

import weakref

import pytest
import torch

from asyncckpt.devices.side_memory import ROUNDED_BYTES, SideMemory

MIB = 1 << 20
TOTAL = 200 * MIB


class Device:
    """An allocator's view of one device: used by others, cached for the side stream, the rest unused."""

    def __init__(self) -> None:
        self.by_others = self.cached = self.used = self.flushes_count = 0

    @property
    def unused(self) -> int:
        return TOTAL - self.by_others - self.cached - self.used

    def allocate(self, device: int, bytes: int) -> torch.Tensor:
        if bytes > max(self.cached, self.unused):
            self.flushes_count += 1
            self.cached = 0
            if bytes > self.unused:
                raise MemoryError
        self.cached -= bytes if bytes <= self.cached else 0
        self.used += bytes
        memory = torch.empty(0)
        weakref.finalize(memory, self._free, bytes)
        return memory

    def _free(self, bytes: int) -> None:
        self.used -= bytes
        self.cached += bytes


def side_memory(device: Device) -> SideMemory:
    return SideMemory(lambda number: device.unused, device.allocate)


def test_what_does_not_fit_is_not_asked_for() -> None:
    device = Device()
    memory = side_memory(device)
    device.by_others = TOTAL - 30 * MIB
    for bytes in (31 * MIB, 30 * MIB - ROUNDED_BYTES + 1):
        with pytest.raises(MemoryError, match="device 0 has left"):
            memory.new(0, bytes)
    assert memory.new(0, 30 * MIB - ROUNDED_BYTES) is not None
    assert device.flushes_count == 0


def test_what_was_there_once_is_had_again() -> None:
    device = Device()
    memory = side_memory(device)
    one, two = memory.new(0, 50 * MIB), memory.new(0, 60 * MIB)
    del one
    device.by_others = TOTAL - 110 * MIB
    assert memory.new(0, 50 * MIB) is not None
    del two
    again = memory.new(0, 60 * MIB)
    with pytest.raises(MemoryError):
        memory.new(0, 60 * MIB)
    assert again is not None
    assert device.flushes_count == 0


def test_what_others_have_taken_out_of_the_cache_is_missed_once() -> None:
    device = Device()
    memory = side_memory(device)
    memory.new(0, 50 * MIB)
    device.cached, device.by_others = 0, TOTAL
    for _ in range(3):
        with pytest.raises(MemoryError):
            memory.new(0, 50 * MIB)
    assert device.flushes_count == 1
    device.by_others = 0
    assert memory.new(0, 50 * MIB) is not None


def test_a_little_is_always_asked_for() -> None:
    device = Device()
    device.by_others = TOTAL - 1000
    assert side_memory(device).new(0, 1000) is not None
