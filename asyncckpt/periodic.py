"""Fire-and-forget checkpoints from a training loop.

    with asyncckpt.Saver(path=..., tensors=..., keep_latest=3) as saver:
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=500)
        for step in range(steps):
            train(step)
            periodic.step(step)

A checkpoint that is due while another save is in flight is skipped and counted. The next `.step` raises errors of
background saves; the end of the `with` block of the Saver (or `drain`) waits for everything in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from asyncckpt.arguments import check_int, check_seconds, check_timeout
from asyncckpt.engine.process.future import FutureState, SaveFuture
from asyncckpt.errors import CheckpointError, SaveCancelledError, UsageError, closing_beside, warn
from asyncckpt.format.limits import check_step
from asyncckpt.model.result import SaveResult
from asyncckpt.options import SAVE_DEADLINE_S
from asyncckpt.saver import Saver
from asyncckpt.signals import uninterrupted

ErrorHandler = Literal["raise", "warn"] | Callable[[BaseException], object]


@dataclass(frozen=True)
class PeriodicStatistics:
    """How many saves were begun, skipped because one was in flight, or failed; and the newest committed one."""

    begun_count: int = 0
    skipped_count: int = 0
    failed_count: int = 0
    last_result: SaveResult | None = None


class PeriodicSaver:
    """Saves every `every_steps` steps or `every_seconds` seconds. Used by one thread: the training loop's.

    With several ranks, every rank has one with the same `every_steps`; they share no clock.
    """

    def __init__(
        self,
        saver: Saver,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        on_error: ErrorHandler = "raise",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (every_steps is None) == (every_seconds is None):
            raise UsageError(
                "exactly one of every_steps and every_seconds is needed", found=(every_steps, every_seconds)
            )
        check_int("every_steps", every_steps, at_least=1, optional=True)
        if every_seconds is not None:
            check_seconds("every_seconds", every_seconds, above_zero=True)
        if not callable(clock):
            raise UsageError("clock is wrong", found=clock, expected="a callable that returns seconds")
        if on_error not in ("raise", "warn") and not callable(on_error):
            raise UsageError("on_error is wrong", found=on_error, expected="'raise', 'warn' or a callable")
        if every_seconds is not None and saver.ranks_count > 1:
            raise UsageError(
                "every_seconds is for one rank: the clocks of several would not save in the same steps",
                found=f"{saver.ranks_count} ranks",
                hint="give every_steps",
            )
        self._saver = saver
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._on_error = on_error
        self._clock = clock
        self._last_time = clock()
        self._future: SaveFuture | None = None
        self._statistics = PeriodicStatistics()

    @uninterrupted
    def step(self, step: int, *, metadata: Mapping[str, Any] | None = None) -> SaveFuture | None:
        """Note that a training step has ended; return the future if a save was begun."""
        step = check_step(step, or_none=False)
        is_due = self._is_due(step)
        try:
            self._collect()
        except BaseException as error:
            if is_due:
                self._saver._leave_out_call(error)
            raise
        if not is_due:
            return None
        # Restart the clock even if the save is skipped, so that a slow disk does not make every step try again.
        self._last_time = self._clock()
        return self._save(step, metadata)

    def _save(self, step: int, metadata: Mapping[str, Any] | None) -> SaveFuture | None:
        """Begin a save and return its future, None if it was skipped or failed."""
        try:
            future = self._saver.save_async(step, metadata=metadata, on_busy="skip")
        except CheckpointError as error:
            earlier = self._future
            is_earlier = earlier is not None and earlier.done() and earlier._inner.exception(0) is error
            if is_earlier:  # It has failed since it was looked at.
                self._future = None
            self._count(failed_count=1)
            self._handle(error)
            # Ranks count their calls alike, so of several none makes another one.
            return self._save(step, metadata) if is_earlier and self._saver.ranks_count == 1 else None
        if future.state is FutureState.SKIPPED:
            self._count(skipped_count=1)
            return None
        self._count(begun_count=1)
        self._future = future
        return future

    @uninterrupted
    def drain(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and report its error. DeadlineError after `timeout` seconds."""
        check_timeout(timeout)
        self._wait(SAVE_DEADLINE_S if timeout is None else timeout)
        self._collect()

    def statistics(self) -> PeriodicStatistics:
        return self._statistics

    def __enter__(self) -> PeriodicSaver:
        return self

    @uninterrupted
    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with closing_beside(error, "the last periodic save failed"):
            self.drain()

    async def __aenter__(self) -> PeriodicSaver:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        with closing_beside(error, "the last periodic save failed"):
            await asyncio.to_thread(self._wait, SAVE_DEADLINE_S)
            self._collect()

    def _wait(self, timeout: float) -> None:
        if self._future is not None:
            self._future._check_can_end()
            self._future._wait_done(timeout)

    def _is_due(self, step: int) -> bool:
        if self._every_steps is not None:
            return step > 0 and step % self._every_steps == 0
        assert self._every_seconds is not None
        return self._clock() - self._last_time >= self._every_seconds

    def _collect(self) -> None:
        """Take the outcome of the last save if it is done."""
        future = self._future
        if future is None or not future.done():
            return
        self._future = None
        error = future._inner.exception(0)
        if isinstance(error, SaveCancelledError):
            return  # By whoever has the future; that is no failure.
        if error is not None:
            self._count(failed_count=1)
            if future._claim.take() is not None:  # Else somebody has it already.
                self._handle(error)
        elif future.result().skipped:  # By another rank.
            self._count(begun_count=-1, skipped_count=1)
        else:
            self._statistics = replace(self._statistics, last_result=future.result())

    def _handle(self, error: BaseException) -> None:
        if self._on_error == "raise":
            raise error
        if self._on_error == "warn":
            warn(f"asyncckpt: periodic save failed: {error}", RuntimeWarning)
        elif callable(self._on_error):
            self._on_error(error)

    def _count(self, **more: int) -> None:
        old = self._statistics
        self._statistics = replace(old, **{name: getattr(old, name) + count for name, count in more.items()})
