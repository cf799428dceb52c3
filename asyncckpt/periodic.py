"""Fire-and-forget checkpoints from a training loop.

    with asyncckpt.Saver(path=..., tensors=...) as saver, asyncckpt.PeriodicSaver(saver, every_steps=500) as periodic:
        for step in range(steps):
            train(step)
            periodic.step(step)

A checkpoint that is due while another save is in flight is skipped and counted. The next `.step` raises errors of
background saves. However the `with` block is left, the last step that has ended is saved then, unless it was already.
If an exception has ended it, the save's metadata tells, for the state may be half a step further:

    {"asyncckpt.interrupted": "KeyboardInterrupt", "asyncckpt.half_way": True}

half_way: an optimizer has begun another step, or nobody can tell. Retention does not count such a checkpoint. With
several ranks none saves after an exception other than SystemExit: the others are within a step, and would not come.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from asyncckpt.arguments import INT_MAX, check_seconds, check_type
from asyncckpt.commit.discover import is_committed
from asyncckpt.engine.features.step_watch import StepWatch
from asyncckpt.engine.process.future import FutureState, SaveFuture
from asyncckpt.engine.process.log import log_warning
from asyncckpt.engine.save.start_save import encode_metadata
from asyncckpt.errors import (
    CheckpointError,
    IOFailedError,
    SaveCancelledError,
    UsageError,
    closing_beside,
    must_be,
    warn,
    with_earlier,
)
from asyncckpt.format.names import check_step
from asyncckpt.model.result import SaveResult
from asyncckpt.options import HALF_WAY, INTERRUPTED, SAVE_DEADLINE_S, OnBusy
from asyncckpt.saver import Saver
from asyncckpt.signals import check_timeout, uninterrupted

ErrorHandler = Literal["raise", "warn"] | Callable[[BaseException], object]


@dataclass(frozen=True)
class PeriodicStatistics:
    """How many saves were begun, skipped because one was in flight, or failed; and the newest committed one."""

    begun_count: int = 0
    skipped_count: int = 0
    failed_count: int = 0
    last_result: SaveResult | None = None


@dataclass(frozen=True)
class _Ended:
    """A step of training that has ended."""

    step: int
    metadata: Mapping[str, Any] | None


class PeriodicSaver:
    """Saves every `every_steps` steps or `every_seconds` seconds. Used by one thread: the training loop's.

    With every_steps=math.inf only those steps that somebody else chooses: `.step(step, save=True)`.
    With several ranks, every rank has one with the same `every_steps`; they share no clock.
    """

    def __init__(
        self,
        saver: Saver,
        *,
        every_steps: float | None = None,
        every_seconds: float | None = None,
        on_error: ErrorHandler = "raise",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_type("saver", saver, Saver)
        check_every("every_steps", every_steps, every_seconds)
        if every_seconds is not None:
            check_seconds("every_seconds", every_seconds, above_zero=True)
        if not callable(clock):
            raise must_be("clock", "a callable that returns seconds", clock)
        if on_error not in ("raise", "warn") and not callable(on_error):
            raise must_be("on_error", "'raise', 'warn' or a callable", on_error)
        if every_seconds is not None and saver.ranks_count > 1:
            raise UsageError(
                f"every_seconds is for one rank: the clocks of {saver.ranks_count} would not save in the same steps",
                hint="use every_steps",
            )
        ranks = saver._ranks
        if ranks is not None and ranks.in_turn:
            raise UsageError("ranks in turn cannot save periodically: none can wait for the others", hint="call save()")
        self._saver = saver
        saver._target.memory.is_of_loop = True
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._on_error = on_error
        self._clock = clock
        self._last_time = clock()
        self._future: SaveFuture | None = None
        self._last: _Ended | None = None
        self._own_step: int | None = None  # That of the last save of this loop.
        self._watch = StepWatch(saver._target.state, saver._target.tables)
        self._statistics = PeriodicStatistics()
        self._longest_save_s = 0.0

    @uninterrupted
    def step(
        self, step: int, *, metadata: Mapping[str, Any] | None = None, save: bool | None = None
    ) -> SaveFuture | None:
        """Note that a training step has ended; return the future if a save was begun.

        save: whether this step is saved; None: if it is due. One that is asked for is never skipped: it is captured
        now, and written after the one in flight.
        """
        step = check_step(step, or_none=False)
        if save is not None:
            check_type("save", save, bool)
        self._note_end(step, metadata)
        is_due = self._is_due(step) if save is None else save
        is_whole = False
        try:
            if is_due:  # Whatever becomes of errors of saves: this one would not be of any step.
                self._saver._target.check_whole()
            is_whole = True
            self._handle_all(self._take_errors())
        except BaseException as error:
            if is_due:
                self._saver._leave_out_call(None if is_whole else error)
            raise
        if not is_due:
            return None
        if self._is_last_saved():  # By save_now.
            return None
        # Restart the clock even if the save is skipped, so that a slow disk does not make every step try again.
        self._last_time = self._clock()
        return self._save(step, metadata, "skip" if save is None else "queue")

    def _save(self, step: int, metadata: Mapping[str, Any] | None, on_busy: OnBusy) -> SaveFuture | None:
        """Begin a save and return its future, None if it was skipped or failed."""
        try:
            future = self._saver.save_async(step, metadata=metadata, on_busy=on_busy)
        except CheckpointError as error:
            earlier = self._future
            is_earlier = earlier is not None and earlier.done() and earlier._inner.exception(0) is error
            if is_earlier:  # It has failed since it was looked at.
                self._future = None
            self._count(failed_count=1)
            self._handle(error)
            # Ranks count their calls alike, so of several none makes another one.
            return self._save(step, metadata, on_busy) if is_earlier and self._saver.ranks_count == 1 else None
        if future.state is FutureState.SKIPPED:
            self._count(skipped_count=1)
            return None
        self._count(begun_count=1)
        self._future = future
        return future

    @uninterrupted
    def save_now(self, step: int | None = None, *, metadata: Mapping[str, Any] | None = None) -> SaveResult:
        """Save the state as it is now, whether or not it is due, and return when the checkpoint is durable.

        step None: that of the last `.step`; if it is being saved, or is saved, its result is returned. Waits for what
        is in flight. Every rank calls it. Raises as Saver.save, and errors of earlier saves after it.
        """
        step = check_step(step)
        if step is not None:
            if self._last is not None and step < self._last.step:
                raise must_be("step", f"at least {self._last.step}, the last one", step)
            self._note_end(step, metadata)
        if self._last is None:
            raise UsageError("no step has ended yet", hint="pass its number: save_now(step)")
        return self._save_last(self._last_with({**(self._last.metadata or {}), **(metadata or {})}))

    @uninterrupted
    def drain(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and report its error. DeadlineError after `timeout` seconds."""
        check_timeout(timeout)
        self._wait(SAVE_DEADLINE_S if timeout is None else timeout)
        self._handle_all(self._take_errors())

    def statistics(self) -> PeriodicStatistics:
        return self._statistics

    def __enter__(self) -> PeriodicSaver:
        return self

    @uninterrupted
    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with closing_beside(error, "the last periodic save failed"):
            self._finish(error)

    async def __aenter__(self) -> PeriodicSaver:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        with closing_beside(error, "the last periodic save failed"):
            await asyncio.to_thread(self._wait, SAVE_DEADLINE_S)
            if not self._is_last_to_save(error):
                self._handle_all(self._take_errors())
                return
            with self._handling():
                await self._saver.when_free()  # Errors of saves that the program has made itself are known then.
                with self._reporting():
                    last = self._last_of_loop(self._interruption(error))
                    self._saved(await self._saver.save_async(last.step, metadata=last.metadata))

    def _finish(self, error: BaseException | None) -> None:
        """Wait for what is in flight, and save the last step unless that has done so. error: what ends the loop."""
        self._wait(SAVE_DEADLINE_S)
        if not self._is_last_to_save(error):
            self._handle_all(self._take_errors())
            return
        with self._handling():
            self._save_last(self._last_of_loop(self._interruption(error)))

    def _forget_last(self) -> None:
        """Note that the state is that of another step now, which is saved: nothing is left to be saved."""
        self._last = self._own_step = None
        self._watch.step_ended()

    def _note_end(self, step: int, metadata: Mapping[str, Any] | None) -> None:
        self._last = _Ended(step, metadata)
        self._watch.step_ended()

    def _is_last_to_save(self, error: BaseException | None) -> bool:
        """Return whether the last step has to be saved at the end, when nothing is in flight any more."""
        is_alone = self._saver.ranks_count == 1 or error is None or isinstance(error, SystemExit)
        return is_alone and self._last is not None and not self._is_last_saved()

    def _is_last_saved(self) -> bool:
        target, last, future = self._saver._target, self._last, self._future
        newest = target.memory.newest
        saved = {self._own_step, None if newest is None else newest.parent.step}  # By itself, or by others after that.
        if future is not None and future.done() and future._inner.exception(0) is None:
            saved.add(None if future.result().skipped else future.result().step)
        if last is None or last.step not in saved:
            return False
        # Somebody may have removed it. Ranks that look at different times would not save alike.
        with suppress(IOFailedError):  # It was acknowledged, and nobody says that it is gone.
            return self._saver.ranks_count > 1 or is_committed(target.root, last.step)
        return True

    def _interruption(self, error: BaseException | None) -> Mapping[str, Any]:
        """Return the metadata of a save at the end of a loop."""
        is_changed = self._watch.is_changed
        if error is None:
            return {HALF_WAY: True} if is_changed else {}
        return {INTERRUPTED: type(error).__name__, HALF_WAY: is_changed is not False}

    @uninterrupted
    def _save_and_leave(self, step: int, metadata: Mapping[str, Any] | None) -> SaveResult:
        """Save this step as the last one of a loop that is about to be left, and return when it is durable."""
        self._note_end(step, metadata)
        return self._save_last(self._last_of_loop({}))

    def _save_last(self, last: _Ended) -> SaveResult:
        """Save the last step, blocking, unless it is saved."""
        self._wait(SAVE_DEADLINE_S)
        with self._reporting():
            result = self._statistics.last_result
            if not self._is_last_saved():
                result = self._saver.save(last.step, metadata=last.metadata, on_busy="wait")
                self._saved(result)
            elif result is None or result.step != last.step:  # By somebody else who has the Saver.
                result = SaveResult(step=last.step, kind="full", path=self._saver._target.root.path)
        return result

    def _last_of_loop(self, more: Mapping[str, Any]) -> _Ended:
        """Return the last step with metadata that no save refuses: it is too late to say that they are wrong."""
        assert self._last is not None
        metadata: Mapping[str, Any] = {}
        try:
            encode_metadata(self._last.metadata)
            metadata = self._last.metadata or {}
        except Exception as error:
            log_warning("metadata of the last step, %d, were left out: %s", self._last.step, error)
        return self._last_with({**metadata, **more})

    def _last_with(self, metadata: Mapping[str, Any]) -> _Ended:
        assert self._last is not None
        keep = self._saver._target.options.keep
        return replace(self._last, metadata=metadata if keep is None else keep.with_metric(metadata))

    def _saved(self, result: SaveResult) -> None:
        if result.skipped:  # By another rank.
            self._count(skipped_count=1)
            return
        self._count(begun_count=1)
        self._committed(result)

    def _committed(self, result: SaveResult) -> None:
        self._own_step = result.step
        self._statistics = replace(self._statistics, last_result=result)
        self._longest_save_s = max(self._longest_save_s, result.seconds)

    @contextmanager
    def _handling(self) -> Iterator[None]:
        """Handle the error of a save of the last step as that of any other."""
        try:
            yield
        except CheckpointError as failed:
            self._handle(failed)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report errors of earlier saves after this block, which makes another one; or as causes of its error."""
        earlier = self._take_errors()
        try:
            yield
        except BaseException as error:
            self._count(failed_count=isinstance(error, CheckpointError))
            _chain(error, *earlier)  # Also of a Ctrl-C: nobody else tells of them.
            raise
        self._handle_all(earlier)

    def _take_errors(self) -> list[BaseException]:
        """Return the errors of saves that nobody has got: the next call on the Saver would raise the first."""
        self._note_outcome()
        return list(iter(self._saver._errors.take_error, None))

    def _wait(self, timeout: float) -> None:
        if self._future is not None:
            self._future._wait_done(timeout)

    def _is_due(self, step: int) -> bool:
        if self._every_steps is not None:
            return step > 0 and step % self._every_steps == 0
        assert self._every_seconds is not None
        return self._clock() - self._last_time >= self._every_seconds

    def _note_outcome(self) -> None:
        """Count the last save if it is done."""
        future = self._future
        if future is None or not future.done():
            return
        self._future = None
        error = future._inner.exception(0)
        if isinstance(error, SaveCancelledError):
            return  # By whoever has the future; that is no failure.
        if error is not None:
            self._count(failed_count=1)
        elif future.result().skipped:  # By another rank.
            self._count(begun_count=-1, skipped_count=1)
        else:
            self._committed(future.result())

    def _handle_all(self, errors: Sequence[BaseException]) -> None:
        for number, error in enumerate(errors, 1):
            try:
                self._handle(error)
            except BaseException as raised:  # Nobody hears of the others but by it.
                _chain(raised, *errors[number:])
                raise

    def _handle(self, error: BaseException) -> None:
        if self._on_error == "raise":
            raise error
        if self._on_error == "warn":
            warn(f"asyncckpt: periodic save failed: {with_earlier(error)}", RuntimeWarning)
        elif callable(self._on_error):
            self._on_error(error)

    def _count(self, **more: int) -> None:
        old = self._statistics
        self._statistics = replace(old, **{name: getattr(old, name) + count for name, count in more.items()})


def check_every(name: str, every_steps: float | None, every_seconds: float | None) -> None:
    """Check that steps between saves, an argument of this name, or else seconds are given."""
    if (every_steps is None) == (every_seconds is None):
        raise UsageError(f"say when to save: {name}=STEPS or every_seconds=SECONDS", found=(every_steps, every_seconds))
    if every_steps is None or (isinstance(every_steps, float) and every_steps == math.inf):
        return
    if type(every_steps) is not int or not 1 <= every_steps <= INT_MAX:
        raise must_be(name, "an int of at least 1, or math.inf to save only on request", every_steps)


def _chain(*errors: BaseException) -> None:
    """Put each error at the end of the causes of the one before it."""
    for error, earlier in itertools.pairwise(errors):
        causes = [error]
        while (cause := causes[-1].__cause__) is not None and cause not in causes:
            causes.append(cause)
        if earlier not in causes and earlier.__cause__ not in causes:
            causes[-1].__cause__ = earlier
