"""Remove old checkpoints after each save, on a thread of its own: it delays no save, until it is far behind them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import asyncckpt.commit.retention  # noqa: F401  # The first save imports nothing.
from asyncckpt.commit.chain import newest_verified
from asyncckpt.engine.process.held_directory import start_retention
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.save_job import Committed, SaveJob
from asyncckpt.options import KeepPolicy

BEHIND_MAX = 8
WAIT_S_MAX = 10.0


class Retention(SaveFeature):
    """What a KeepPolicy lets go after the saves of one Saver. A failure is a warning: the new checkpoint stands."""

    def __init__(self, policy: KeepPolicy, *, wait_s_max: float) -> None:
        self._policy = policy
        self._wait_s_max = wait_s_max
        self._behind: deque[Future[None]] = deque()  # Those that have perhaps not ended, the oldest first.

    async def before_files(self, job: SaveJob) -> None:
        """Wait for the oldest of too many: on a disk that saves faster than it removes they would never end."""
        behind = self._behind
        while behind and behind[0].done():
            behind.popleft()
        if len(behind) < BEHIND_MAX:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # The loop has ended before.
                loop.call_soon_threadsafe(ended.set)

        behind[0].add_done_callback(wake)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), self._wait_s_max)

    def committed(self, job: SaveJob, committed: Committed) -> None:
        if not committed.manifest_bytes:  # Another rank has published it, and lets go.
            return
        target, step = job.target, job.step

        def protected() -> set[int]:
            newest = target.memory.newest  # The next delta may build upon it.
            return {
                step,
                *newest_verified(target.root, target.commits.heads),
                *(() if newest is None else (newest.parent.step,)),
            }

        recorder = job.recorder

        @contextmanager
        def noted() -> Iterator[None]:
            begun = time.perf_counter()
            try:
                yield
            finally:
                if recorder is not None:
                    recorder.note("retention", begun)

        started = start_retention(target.commits, self._policy, protected=protected, held=noted())
        if started is not None:
            target.memory.behind["retention"] = started
            self._behind.append(started)
