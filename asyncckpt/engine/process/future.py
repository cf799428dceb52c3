"""The future of a save or a load: awaitable from any loop, usable from any thread.

#   from        to          done by
#   staged      filtering   the background, when the save's turn has come
#   filtering   writing     the filter has returned
#   writing     committing  all bytes are on disk; from here cancel() comes too late
#   committing  committed   the manifest is durable
#   any above   failed      an error; before committing also cancelled
#   -           skipped     another save was in flight and on_busy="skip"

An error is raised once: to whoever asks this future, else by the next call on its Saver, else it is printed at exit.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

from asyncckpt.arguments import check_timeout
from asyncckpt.devices.host_copies import Pending
from asyncckpt.engine.process.background import check_may_wait
from asyncckpt.engine.process.log import log_exception
from asyncckpt.errors import CheckpointError, DeadlineError, IOFailedError, SaveCancelledError, UsageError
from asyncckpt.guard import Guard
from asyncckpt.model.result import LoadReport, SaveResult
from asyncckpt.native import Progress
from asyncckpt.pipeline.threads import IdleEndingThreads
from asyncckpt.signals import uninterrupted, wait_in_steps, wait_until_done
from asyncckpt.storage.directory import io_failed

T = TypeVar("T")


class FutureState(str, Enum):
    STAGED = "staged"
    FILTERING = "filtering"
    WRITING = "writing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class SaveProgress:
    """Bytes written so far, of how many."""

    bytes_done: int
    bytes_total: int


class CheckpointFuture(Generic[T]):
    """See the module. Made by save_async and load_async only."""

    def __init__(self, *, step: int | None, path: Path, what: str, pools: Sequence[IdleEndingThreads] = ()) -> None:
        """pools: on which it runs, beside those of all saves and loads; nobody there may wait for it."""
        self._pools = pools
        self.step = step
        self.path = path
        self._what = what
        self._inner: concurrent.futures.Future[T] = concurrent.futures.Future()
        # A running concurrent future cannot be cancelled, so cancelling an `await` never aborts the save.
        self._inner.set_running_or_notify_cancel()
        self._guard = Guard()
        self._pid = os.getpid()
        self._state = FutureState.STAGED
        self._waiters_count = 0
        self._claimed = False
        self.native_progress = Progress()
        self._bytes_total = 0
        self._staged = threading.Event()
        self._staged.set()

    @property
    def state(self) -> FutureState:
        return self._state

    @property
    def progress(self) -> SaveProgress:
        return SaveProgress(bytes_done=self.native_progress.bytes_done, bytes_total=self._bytes_total)

    @uninterrupted
    def done(self) -> bool:
        return self._inner.done()

    @uninterrupted
    def result(self, timeout: float | None = None) -> T:
        """Wait and return the result, or raise what failed. DeadlineError (a TimeoutError) after `timeout` seconds."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._inner.result()

    @uninterrupted
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return the error, None when there is none."""
        check_timeout(timeout)
        self._check_can_end()
        with self._waiting():
            if not wait_until_done(self._inner, timeout):
                raise DeadlineError(f"{self._what} did not end within {timeout} s", found=self._state.value)
            self._claimed = True
            return self._inner.exception()

    @uninterrupted
    def wait_staged(self, timeout: float | None = None) -> None:
        """Block this thread until the state is captured, or the save has failed: anybody may change it. DeadlineError
        after `timeout` seconds.

        With a state on the host that is so as soon as save_async has returned. Of a state on devices, copies may still
        be on their way then: the streams that save_async knows of wait for them, others wait after `fence`.
        """
        check_timeout(timeout)
        if not self._staged.is_set():
            self._check_can_end()
        if not wait_in_steps(self._staged.wait, math.inf if timeout is None else timeout):
            raise DeadlineError(f"the state of the {self._what} was not captured within {timeout} s")

    @uninterrupted
    def cancel(self) -> bool:
        """Abort the save if its commit has not begun; True when it will end (or has ended) as cancelled."""
        with self._guard:
            if self._state in (FutureState.STAGED, FutureState.FILTERING, FutureState.WRITING):
                self.native_progress.cancel()
            return self.native_progress.cancelled

    @uninterrupted
    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call function(self) when done, on the background thread (now, when done). Its errors are only logged."""

        def call(_: object) -> None:
            try:
                function(self)
            except BaseException:
                log_exception("a done callback of %s raised", self._what)

        self._inner.add_done_callback(call)

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        self._check_can_end()
        with self._waiting():
            try:
                return await asyncio.wrap_future(self._inner)
            finally:
                if self._inner.done():
                    self._claimed = True

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count who waits, so that an error on its way to a waiter is not raised elsewhere too."""
        with self._guard:
            self._waiters_count += 1
        try:
            yield
        finally:
            with self._guard.again():  # Also where the coroutine of a waiter is collected.
                self._waiters_count -= 1

    def _check_can_end(self) -> None:
        """Raise UsageError where a wait would have no end."""
        if self.done():
            return
        check_may_wait(self._what, *self._pools)
        if self._pid != os.getpid():
            raise UsageError(f"{self._what} belongs to the parent process", hint="wait for it there")

    # -- for the engine ------------------------------------------------------------------------------------------

    def enter(self, state: FutureState) -> bool:
        """Go to the next state; False when the save was cancelled instead."""
        with self._guard:
            if self.native_progress.cancelled:
                return False
            self._state = state
            return True

    def expect_bytes(self, total: int) -> None:
        self._bytes_total = total

    def resolve(self, result: T, state: FutureState = FutureState.COMMITTED) -> None:
        self._state = state
        self._staged.set()
        self._inner.set_result(result)

    def fail(self, error: BaseException) -> None:
        self._state = FutureState.CANCELLED if isinstance(error, SaveCancelledError) else FutureState.FAILED
        self._staged.set()
        self._inner.set_exception(error)

    def end_with(self, work: Callable[[], T]) -> None:
        """Do the work here, and resolve with its result or fail with its error."""
        try:
            result = work()
        except BaseException as error:
            self.fail(error)
        else:
            self.resolve(result)

    def take_unclaimed_error(self) -> BaseException | None:
        """Return the error if nobody has got it yet, once; None while somebody waits for it."""
        with self._guard:
            if not self._inner.done() or self._claimed or self._waiters_count:
                return None
            self._claimed = True
            return self._inner.exception()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._what}: {self._state.value}>"


class SaveFuture(CheckpointFuture[SaveResult]):
    """The future of one save."""

    _pending: Pending | None = None

    def fence(self, stream: Any = None) -> None:
        """Let a stream (None: the current ones of this thread) wait until the state on devices may be changed.

        stream: a torch.cuda.Stream. The host does not wait. Needed for streams that change the state and that the Saver
        does not know.
        """
        pending = self._pending  # The background takes it away when the copies are done.
        if pending is not None:
            pending.fence(stream)

    # -- for the engine ------------------------------------------------------------------------------------------

    def skip(self, *, seconds: float = 0.0, stall_seconds: float = 0.0) -> None:
        """Resolve without a save."""
        step = -1 if self.step is None else self.step
        result = SaveResult(
            step=step, kind="full", path=self.path, skipped=True, seconds=seconds, stall_seconds=stall_seconds
        )
        self.resolve(result, FutureState.SKIPPED)

    def expect_copies(self, pending: Pending) -> None:
        """Note that devices still copy the state."""
        self._pending = pending
        if pending.devices:
            self._staged.clear()

    def mark_staged(self) -> None:
        """Note that they have ended."""
        self._pending = None
        self._staged.set()


class LoadFuture(CheckpointFuture[LoadReport]):
    """The future of one load."""


def as_checkpoint_error(error: BaseException, step: int | None) -> BaseException:
    """Return an error of the system as one of this library, others as they are."""
    save = "the save" if step is None else f"the save of step {step}"
    if isinstance(error, MemoryError):
        wrapped = IOFailedError(f"{save} ran out of memory", hint="lower host_memory_limit, or use save()")
    elif isinstance(error, OSError) and not isinstance(error, CheckpointError):
        wrapped = io_failed(f"{save} failed", error)
    else:
        return error
    wrapped.__cause__ = error
    return wrapped


class OpenErrors:
    """Futures of one Saver whose outcome was not reported yet."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._futures: list[CheckpointFuture[Any]] = []

    def watch(self, future: CheckpointFuture[Any]) -> None:
        with self._guard:
            self._futures.append(future)
        _reporters.add(self)

    def raise_first(self) -> None:
        """Raise the oldest error that was not reported; it will not be raised again."""
        with self._guard:
            futures = list(self._futures)
        try:
            for future in futures:
                error = future.take_unclaimed_error()
                if error is not None:
                    raise error
        finally:
            self._drop_settled()

    def _drop_settled(self) -> None:
        """Keep no future whose outcome was reported: its error's traceback holds the whole save."""
        with self._guard:
            self._futures = [f for f in self._futures if not f.done() or _is_open(f)]
            if not self._futures:
                _reporters.discard(self)

    def wait(self, timeout: float) -> None:
        """Wait until nothing is in flight, whatever comes of it. DeadlineError."""
        with self._guard:
            in_flight = [future for future in self._futures if not future.done()]
        for future in in_flight:
            future._check_can_end()
        until = time.monotonic() + timeout
        for future in in_flight:
            if not wait_until_done(future._inner, max(0.0, until - time.monotonic())):
                raise DeadlineError(f"{future!r} did not end within {timeout} s")

    def forget(self) -> None:
        """Leave these to the parent, in a forked child."""
        self._futures = []

    def report(self) -> None:
        """Print errors that nobody has got."""
        for future in self._futures:
            error = future.take_unclaimed_error()
            if error is not None:
                print(f"asyncckpt: {future!r} failed and nobody asked: {error}", file=sys.stderr)


_reporters: set[OpenErrors] = set()


def _is_open(future: CheckpointFuture[Any]) -> bool:
    return future._inner.exception() is not None and not future._claimed


def _forget_in_child() -> None:
    for reporter in _reporters:
        reporter.forget()
    _reporters.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _report_all() -> None:
    # Runs after the background thread was joined, so every outcome is known.
    for reporter in _reporters:
        reporter.report()
