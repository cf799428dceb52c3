"""Several fork servers side by side, and a queue of work for them. Used by the tests; see fork_server.py."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from fork_server import ChildEnd, framed, read_message, write_all

T = TypeVar("T")
SERVER = Path(__file__).with_name("fork_server.py")
# One thread in the server: see fork_server.py.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
FAILURES_SHOWN_MAX = 5
STOP_SECONDS_MAX = 10.0


class ChildFailed(AssertionError):
    """A child raised, or died in a way that was not asked for."""


class Lane:
    """One fork server."""

    def __init__(self, shim_library: Path, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **ONE_THREAD, "LD_PRELOAD": str(shim_library)},
            )
        self._is_ready = False

    def call(self, function: Callable[..., None], *arguments: Any, kill_after_s: float | None = None) -> ChildEnd:
        """Run function(channel, *arguments) in a new child and return how it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if not self._is_ready:
                assert read_message(self._process.stdout) == "ready"
                self._is_ready = True
            write_all(self._process.stdin.fileno(), framed((function, arguments, kill_after_s)))
            end = read_message(self._process.stdout)
        except (EOFError, BrokenPipeError):
            raise ChildFailed(f"the fork server is gone: {self._log.read_text()[-4000:]}") from None
        assert isinstance(end, ChildEnd)
        return end

    def messages(self, function: Callable[..., None], *arguments: Any) -> tuple[Any, ...]:
        """Like `call`, for a child that shall end well; returns what it sent."""
        end = self.call(function, *arguments)
        if end.error is not None:
            raise ChildFailed(end.error)
        if end.killed_by is not None:
            raise ChildFailed(f"killed by {signal.Signals(end.killed_by).name}: {self._log.read_text()[-4000:]}")
        return end.messages

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class ForkLanes:
    """All fork servers; they start together and are ready when first asked."""

    def __init__(self, shim_library: Path, *, count: int, folder: Path) -> None:
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        self._lanes = [Lane(shim_library, folder / f"lane-{number}.log") for number in range(count)]
        for lane in self._lanes:
            self._free.put(lane)

    def __enter__(self) -> ForkLanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for lane in self._lanes:
            lane.stop()

    def run(self, work: Callable[[Lane], T]) -> T:
        """Do `work` with the next free lane."""
        lane = self._free.get()
        try:
            return work(lane)
        finally:
            self._free.put(lane)

    def run_all(self, works: Iterable[tuple[str, Callable[[Lane], T]]]) -> list[T]:
        """Do all works, side by side; AssertionError naming those that failed."""
        with ThreadPoolExecutor(len(self._lanes)) as threads:
            futures = [(label, threads.submit(self.run, work)) for label, work in works]
        failures = [f"{label}: {error}" for label, future in futures if (error := future.exception()) is not None]
        assert not failures, f"{len(failures)} of {len(futures)} failed:\n" + "\n".join(failures[:FAILURES_SHOWN_MAX])
        return [future.result() for _, future in futures]
