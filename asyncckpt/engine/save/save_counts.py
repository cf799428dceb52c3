"""The statistics of a Saver."""

from __future__ import annotations

from collections import Counter
from typing import Any

from asyncckpt.errors import SaveCancelledError
from asyncckpt.guard import Guard
from asyncckpt.model.result import SaveResult, SaverStatistics
from asyncckpt.staging.pool import pool


class SaveCounts:
    """The statistics of one Saver. Futures hold it, and not the Saver, which would keep the user's state alive."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._sums: Counter[str] = Counter()

    def now(self, plans_made_count: int) -> SaverStatistics:
        """Return what was counted so far, with the plans made and the arenas of the process."""
        arenas = pool.statistics()
        with self._guard:
            sums: dict[str, Any] = dict(self._sums)
        return SaverStatistics(
            **sums,
            plans_made_count=plans_made_count,
            arenas_count=arenas.arenas_count,
            arena_bytes=arenas.touched_bytes,
            arena_touches_count=arenas.touches_count,
        )

    def add(self, result: SaveResult | None, error: BaseException | None) -> None:
        """Count the outcome of a save."""
        if result is None:
            added: dict[str, Any] = {"cancelled_count" if isinstance(error, SaveCancelledError) else "failed_count": 1}
        else:
            added = {
                "saves_count": not result.skipped,
                "skipped_count": result.skipped,
                "fallback_count": result.fallback is not None,
                "deltas_count": result.kind == "delta",
                "bytes_written": result.bytes_written,
                "rows_count": result.rows_count,
                "rows_copied": result.rows_copied,
                "stall_seconds": result.stall_seconds,
                "step_wait_seconds": result.step_wait_seconds,
            }
        with self._guard:
            for name, value in added.items():
                self._sums[name] += value
