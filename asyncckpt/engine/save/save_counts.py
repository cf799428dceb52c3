"""Counts and sums over the saves of one Saver."""

from __future__ import annotations

import threading
from dataclasses import replace

from asyncckpt.engine.process.future import CheckpointFuture
from asyncckpt.errors import SaveCancelledError
from asyncckpt.model.result import SaveResult, SaverStatistics
from asyncckpt.staging.pool import pool


class SaveCounts:
    """The statistics of one Saver. Futures hold it, and not the Saver, which would keep the user's state alive."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._counted = SaverStatistics()

    def now(self, *, plans_made_count: int) -> SaverStatistics:
        """What was counted so far, with the plans made and the arenas of the process."""
        arenas = pool.statistics()
        return replace(
            self._counted,
            plans_made_count=plans_made_count,
            arenas_count=arenas.arenas_count,
            arena_bytes=arenas.touched_bytes,
            arena_touches_count=arenas.touches_count,
        )

    def add(self, future: CheckpointFuture[SaveResult]) -> None:
        """Count the outcome of a save that is done."""
        error = future._inner.exception()
        with self._guard:
            counted = self._counted
            if error is not None:
                cancelled = isinstance(error, SaveCancelledError)
                field = "cancelled_count" if cancelled else "failed_count"
                self._counted = replace(counted, **{field: getattr(counted, field) + 1})
                return
            result = future._inner.result()
            self._counted = replace(
                counted,
                saves_count=counted.saves_count + (not result.skipped),
                skipped_count=counted.skipped_count + result.skipped,
                fallback_count=counted.fallback_count + (result.fallback is not None),
                deltas_count=counted.deltas_count + (result.kind == "delta"),
                bytes_written=counted.bytes_written + result.bytes_written,
                rows_count=counted.rows_count + result.rows_count,
                rows_copied=counted.rows_copied + result.rows_copied,
                stall_seconds=counted.stall_seconds + result.stall_seconds,
            )
