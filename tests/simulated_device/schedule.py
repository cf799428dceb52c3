"""Streams, events, and who comes when.

Operations of one stream run in the order in which they were queued, those of several streams in any: a seeded choice
among those that are ready. Nothing runs by itself: some operations run whenever the runtime is called, and those that a
wait needs run in it, on the waiting thread.

    pace            how many operations run at a call, on average: from none, so that everything comes as late as it
                    can, to all that are ready
    needed_share    how often a wait runs what it needs, rather than anything that is ready
    weights         of streams: how lively each one is

A stream holds so many operations; the host waits for room for the next one.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.simulated_device.memory import Region

BUSY_S_MAX = 60.0
DEPTH_MAX = 1024
PACES = (0.0, 0.0, 0.1, 0.4, 1.5, 1e9)
NEEDED_SHARES = (0.0, 0.5, 1.0)
WEIGHTS = (0.03, 0.3, 1.0, 3.0)


class SimulationFault(AssertionError):
    """Something that real devices do not allow, or would not notice."""


class DeviceLost(RuntimeError):
    """What CUDA reports when a kernel has failed, and ever after."""

    def __init__(self) -> None:
        super().__init__("CUDA error: an illegal memory access was encountered")


@dataclass(eq=False)
class Stream:
    """Operations of one device, first in, first out."""

    device: int
    name: str
    handle: int
    queue: deque[QueuedWork] = field(default_factory=deque)
    weight: float = 1.0

    def __repr__(self) -> str:
        return f"<stream {self.name} of device {self.device}, {len(self.queue)} queued>"


@dataclass(eq=False)
class Point:
    """A point on a stream, which the device has passed or not."""

    stream: Stream
    is_passed: bool = False


@dataclass(eq=False)
class QueuedWork:
    """Work for a device; or the end of a wait for `awaits`; or a point to pass."""

    name: str
    work: Callable[[], object] | None = None
    awaits: Point | None = None
    passes: Point | None = None

    @property
    def is_ready(self) -> bool:
        return self.awaits is None or self.awaits.is_passed


class DeviceSchedule:
    """All streams of a runtime. Its lock is held around every call; operations run under it."""

    def __init__(self, regions: list[Region], seed: int) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.pace = self.random.choice(PACES)
        self.needed_share = self.random.choice(NEEDED_SHARES)
        self.streams: list[Stream] = []
        self.faults: list[str] = []
        self.lost: set[int] = set()
        self.runs_count = 0
        self.waits: list[int] = []
        self.depth_max = DEPTH_MAX
        self.waits_for_room_count = 0
        self.runs_to_failure: int | None = None
        self._regions = regions
        self._is_running = False
        self._busy_for: int | None = None
        self._is_free = threading.Condition(self.lock)
        self._is_held = threading.Condition(self.lock)
        self._held_count = 0

    def new_stream(self, device: int, name: str) -> Stream:
        with self.lock:
            stream = Stream(device, name, handle=0x1000 + 0x10 * len(self.streams))
            stream.weight = self.random.choice(WEIGHTS)
            self.streams.append(stream)
            return stream

    def push(self, stream: Stream, operation: QueuedWork) -> None:
        with self.lock:
            if self._is_running:
                raise self.fault(f"{operation.name} was queued from within an operation of a device")
            self._wait_for_room(stream)
            stream.queue.append(operation)

    def _wait_for_room(self, stream: Stream) -> None:
        if len(stream.queue) < self.depth_max:
            return
        self.waits_for_room_count += 1
        while len(stream.queue) >= self.depth_max:
            chosen = self._choose()
            if chosen is None:
                raise self.fault(f"{stream} is full, and waits for what is to be queued later")
            self._run_one(chosen)

    def advance(self) -> None:
        """Run some of what is ready."""
        with self.lock:
            if self._is_running:
                return
            while self.random.random() * (1 + self.pace) < self.pace and (stream := self._choose()) is not None:
                self._run_one(stream)

    def pass_point(self, point: Point) -> None:
        """Run what has to run, and perhaps more, until the device has passed a point."""
        with self.lock:
            if self._is_running:
                raise self.fault("an operation of a device waits for a device")
            self.waits.append(threading.get_ident())
            while self._busy_for not in (None, threading.get_ident()):
                self._held_count += 1
                self._is_held.notify_all()
                if not self._is_free.wait(BUSY_S_MAX):
                    raise self.fault("the devices were kept busy for too long")
            while not point.is_passed:
                stream = self._needed(point) if self.random.random() < self.needed_share else self._choose()
                if stream is None:
                    raise self.fault(f"a wait that never ends: {self.streams} wait for each other")
                self._run_one(stream)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Let the devices be busy with something else: waits of other threads last until this one is through."""
        with self.lock:
            self._busy_for, self._held_count = threading.get_ident(), 0
        try:
            yield
        finally:
            with self.lock:
                self._busy_for = None
                self._is_free.notify_all()

    def await_waiter(self) -> None:
        """While the devices are busy: return when another thread waits for them."""
        with self.lock:
            if not self._is_held.wait_for(lambda: self._held_count > 0, BUSY_S_MAX):
                raise self.fault("nobody waits for the devices")

    def run_all(self) -> None:
        with self.lock:
            while (stream := self._choose()) is not None:
                self._run_one(stream)
            left = [stream for stream in self.streams if stream.queue]
            if left:
                raise self.fault(f"operations that never run: {left}")

    def fault(self, what: str) -> SimulationFault:
        """Note a fault, so that the test fails even if somebody catches the error; the error to raise."""
        self.faults.append(what)
        return SimulationFault(what)

    def _choose(self) -> Stream | None:
        ready = [stream for stream in self.streams if stream.queue and stream.queue[0].is_ready]
        if not ready:
            return None
        return self.random.choices(ready, [stream.weight for stream in ready])[0]

    def _needed(self, point: Point) -> Stream | None:
        """The stream whose first operation has to run for a point to be passed."""
        seen: set[int] = set()
        while id(point) not in seen:
            seen.add(id(point))
            if not point.stream.queue:
                return None
            first = point.stream.queue[0]
            if first.is_ready:
                return point.stream
            assert first.awaits is not None
            point = first.awaits
        return None

    def _run_one(self, stream: Stream) -> None:
        operation = stream.queue.popleft()
        if operation.passes is not None:
            operation.passes.is_passed = True
        if operation.work is None or stream.device in self.lost:
            return  # A device that is lost does nothing any more.
        self.runs_count += 1
        if self.runs_to_failure is not None:
            self.runs_to_failure -= 1
            if self.runs_to_failure < 0:
                self.runs_to_failure = None
                self.lost.add(stream.device)
                return
        self._is_running = True
        try:
            with self._regions[stream.device].opened(), _no_modes(), torch.no_grad():
                operation.work()
        except SimulationFault:
            self.lost.add(stream.device)
        except Exception as error:
            self.faults.append(f"{operation.name} on {stream} raised {error!r}")
            self.lost.add(stream.device)
        finally:
            self._is_running = False


class _no_modes:
    """Outside of any torch dispatch mode; free where there is none."""

    def __enter__(self) -> None:
        self._left = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else None
        if self._left is not None:
            self._left.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._left is not None:
            self._left.__exit__(None, None, None)
