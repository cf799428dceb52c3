"""The device that `bench gpu` measures, and its clock: events on a stream.

With "cpu" the host stands in for it, so that the bench itself can be tested; its figures mean nothing then.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
SECONDS_MAX = 30
BUSY_CYCLES = 2_000_000  # About a millisecond.
Mark = Any


class NoDevice(Exception):
    """There is no device to measure; the message says why."""


class BenchDevice:
    """`name` is "cuda" or "cpu"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cuda = name == "cuda"
        if self.is_cuda and not torch.cuda.is_available():
            raise NoDevice(f"torch {torch.__version__} finds no CUDA device")

    def facts(self) -> dict[str, Any]:
        """What was measured."""
        if not self.is_cuda:
            return {"device": "the host, in the place of a device", "commit": _commit()}
        properties = torch.cuda.get_device_properties(0)
        return {
            "device": properties.name,
            "device_memory_gib": round(properties.total_memory / GIB, 1),
            "capability": f"sm_{properties.major}{properties.minor}",
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "commit": _commit(),
        }

    def mark(self) -> Mark:
        """A point on the current stream."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Between two marks, by the device's clock; waits for the second one."""
        if not self.is_cuda:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def time(self, work: Callable[[], object]) -> float:
        """Seconds that what `work` queues takes on an idle device; how long it takes to queue it does not count."""
        self.synchronize()
        if self.is_cuda:
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]  # Until all is queued.
        begin = self.mark()
        work()
        return self.seconds(begin, self.mark())

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def empty(self, bytes: int) -> torch.Tensor:
        """Memory of the device, uint8 [bytes]."""
        return torch.empty(bytes, dtype=torch.uint8, device=self.name)

    def pinned(self, bytes: int) -> torch.Tensor:
        """Pinned memory of the host, touched, uint8 [bytes]."""
        return torch.empty(bytes, dtype=torch.uint8, pin_memory=self.is_cuda).fill_(1)

    def stream_handle(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream) if self.is_cuda else 0


def _driver() -> str:
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _commit() -> str:
    return _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")


def _first_line(*command: str) -> str:
    """What a program says; nothing where it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()
