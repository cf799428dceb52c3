"""Lines in the log of a Saver that is opened while INFO of the logger `asyncckpt` is on: opened, committed.

With several ranks, rank 0 logs them; of ranks in turn, the one that saves the last part logs the commit. Warnings need
no feature: they are logged where they arise.
"""

from __future__ import annotations

import time
from contextlib import suppress

from asyncckpt.commit.discover import committed_steps
from asyncckpt.commit.root import WriteRoot
from asyncckpt.engine.process.log import log_info
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.save_job import Committed, SaveJob
from asyncckpt.errors import CheckpointError


class LogLines(SaveFeature):
    """See the module."""

    def opened(self, root: WriteRoot, *, is_locked: bool) -> None:
        """Log what is there."""
        steps = list[int]()
        with suppress(CheckpointError):  # Saves will say it.
            steps = committed_steps(root)
        newest, lock = steps[-1] if steps else None, "locked" if is_locked else "not locked"
        there = "no checkpoint" if newest is None else f"{len(steps)} checkpoints, the newest of step {newest}"
        log_info("%s is open and %s: %s", root.path, lock, there, event="opened", path=str(root.path), step=newest)

    def committed(self, job: SaveJob, committed: Committed) -> None:
        if committed.waits_for:  # The part of one rank, of several in turn.
            return
        seconds, kind = time.perf_counter() - job.begun, "delta" if committed.parents else "full"
        stall = job.stall_seconds if job.staged is not None else seconds
        log_info(
            "step %d of %s is committed: %s, %.1f MiB in %.2f s, training waited %.1f ms",
            job.step, job.target.root.path, kind, committed.bytes_written / 2**20, seconds, 1e3 * stall,
            event="committed", path=str(job.target.root.path), step=job.step, kind=kind,
            bytes=committed.bytes_written, seconds=seconds, stall_seconds=stall,
        )  # fmt: skip
