"""Ranges of memory: what devices reach of them, and what the copy engine asks of pinned ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulated_device.memory import Region, is_mapped
from tests.simulated_device.schedule import DeviceSchedule


class InvalidValue(RuntimeError):
    """What CUDA reports for a copy that goes over the border of a pinned range; the device goes on."""

    def __init__(self) -> None:
        super().__init__("CUDA error: invalid argument")


def are_within(spans: NDArray[Any], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which of (address, bytes) [n, 2] lie in one of the ranges (address, bytes): bool [n]."""
    begins, ends = _begins_and_ends(spans)
    found = np.zeros(len(spans), dtype=np.bool_)
    for begin, bytes in ranges:
        found |= (begin <= begins) & (ends <= begin + bytes)
    return found


def are_touched(spans: NDArray[Any], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which of (address, bytes) [n, 2] have a byte in one of the ranges (address, bytes): bool [n]."""
    begins, ends = _begins_and_ends(spans)
    found = np.zeros(len(spans), dtype=np.bool_)
    for begin, bytes in ranges:
        found |= (begins < begin + bytes) & (begin < ends) & (begins < ends)
    return found


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (address, bytes), those that touch as one."""
    found: list[tuple[int, int]] = []
    for begin, bytes in sorted(ranges):
        if found and sum(found[-1]) == begin:
            found[-1] = (found[-1][0], found[-1][1] + bytes)
        else:
            found.append((begin, bytes))
    return found


def _begins_and_ends(spans: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    begins = spans[:, 0].astype(np.int64)
    return begins, begins + spans[:, 1].astype(np.int64)


class Reach:
    """What devices reach of their own memory and of the host's; a part of SimulatedRuntime."""

    schedule: DeviceSchedule
    registered: dict[int, int]
    _regions: list[Region]
    _pinned_region: Region

    def is_on_device(self, spans: NDArray[Any], device: int) -> NDArray[np.bool_]:
        """Which of (address, bytes) [n, 2] lie on a device: bool [n]."""
        return are_within(spans, [(self._regions[device].begin, self._regions[device].bytes)])

    def is_pinned(self, spans: NDArray[Any]) -> bool:
        """Whether all of (address, bytes) [n, 2] are host memory that devices reach."""
        return bool(are_within(spans, joined(self._pinned_ranges())).all())

    def is_pinned_for_engine(self, spans: NDArray[Any]) -> bool:
        """As is_pinned, for copies of the copy engine. Raises InvalidValue for one that a pinned range holds in part.

        Ranges that touch are two to it.
        """
        ranges = self._pinned_ranges()
        is_within = are_within(spans, ranges)
        if (are_touched(spans, ranges) & ~is_within).any():
            raise InvalidValue
        return bool(is_within.all())

    def _pinned_ranges(self) -> list[tuple[int, int]]:
        return [(self._pinned_region.begin, self._pinned_region.bytes), *self.registered.items()]

    def check_reachable(self, spans: NDArray[Any], device: int, what: str) -> None:
        """A fault unless kernels on a device may touch all of (address, bytes) [n, 2]."""
        on_host = spans[~self.is_on_device(spans, device)]
        if not self.is_pinned(on_host):
            raise self.schedule.fault(f"{what} on device {device} touches memory that it cannot reach")
        if len(on_host) and self.registered:
            begin = int(on_host[:, 0].min())
            if not is_mapped(begin, int(on_host[:, 0].max() - on_host[:, 0].min()) + 1):
                raise self.schedule.fault(f"{what} on device {device} touches memory that was unmapped")
