"""Clocks and gauges: CPU time of the trainer's threads and of everybody else, resident memory, the page cache.

Background CPU is what the process and its children used less what the trainer's own threads used. The kernel counts it
(threads to the nanosecond, children to its tick of 10 ms), so nothing is estimated; what kernel threads do on behalf of
buffered writers is not seen.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
SAMPLE_SECONDS = 0.02
RESIDENCY_PROBES = 64


class CpuClock:
    """Counts CPU seconds of all but the threads that exist when it is made: the trainer's, OpenMP workers included."""

    def __init__(self) -> None:
        self._trainer_threads = sorted(os.listdir("/proc/self/task"))

    def background_seconds(self) -> float:
        trainer = sum(_schedstat_seconds(f"/proc/self/task/{thread}/schedstat") for thread in self._trainer_threads)
        return time.process_time() - trainer + _children_seconds()


def _schedstat_seconds(path: str) -> float:
    return int(Path(path).read_text().split()[0]) * 1e-9


def _children_seconds() -> float:
    times = os.times()
    total = times.children_user + times.children_system  # of those that have ended
    for child in _children(os.getpid()):
        try:
            total += process_seconds(child)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children; pages that the children share are counted once."""
    total = _statm(pid)[0]
    for child in _children(pid):
        try:
            resident, shared = _statm(child)
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += resident - shared
    return total


def _statm(pid: int) -> tuple[int, int]:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * PAGE_BYTES, int(fields[2]) * PAGE_BYTES


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


class MemorySampler:
    """Samples the resident memory of another process, from outside, so that the trainer never waits for the sampler."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler")
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            try:
                self._samples.append((time.monotonic(), resident_bytes(self._pid)))
            except (FileNotFoundError, ProcessLookupError):
                return

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def peak_bytes(self, *, begin: float, end: float) -> int:
        """Return the highest sample between two values of `time.monotonic()`, which all processes share; 0 if none."""
        return max((resident for at, resident in self._samples if begin <= at <= end), default=0)


def drop_page_cache(directory: Path) -> None:
    """Make every file below the directory cold. They are synced already, so no page of them is dirty."""
    for path in _files(directory):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_share(directory: Path) -> float:
    """Return which share of the probed pages of the files is in the page cache: proof that a cold load is cold."""
    hits = probes = 0
    for path in _files(directory):
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        for probe in range(min(RESIDENCY_PROBES, -(-size // PAGE_BYTES))):
            probes += 1
            hits += _is_cached(fd, probe * size // RESIDENCY_PROBES if size > PAGE_BYTES else 0)
        os.close(fd)
    return hits / max(1, probes)


def _is_cached(fd: int, offset: int) -> bool:
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:  # A file system without RWF_NOWAIT; nothing is known.
        return False


def files_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in _files(directory))


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]
