"""The future of a save or a load: awaitable from any loop, usable from any thread.

#   from        to          done by
#   staged      filtering   the background, when the save's turn has come
#   filtering   writing     the filter has returned
#   writing     committing  all bytes are on disk; from here cancel() comes too late. A load: all are read
#   committing  committed   the manifest is durable
#   any above   failed      an error; before committing also cancelled
#   -           skipped     another save was in flight and on_busy="skip"

A future raises its error whenever it is asked. One that nobody has got is raised once by the Saver's next call, and
otherwise printed, when the future is collected or the interpreter ends (docs/decisions/0039).
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import errno
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from asyncckpt.devices.host_copies import Pending
from asyncckpt.engine.process.background import check_may_wait
from asyncckpt.engine.process.log import log_exception
from asyncckpt.errors import CheckpointError, DeadlineError, IOFailedError, SaveCancelledError, UsageError
from asyncckpt.model.result import LoadReport, SaveResult
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.native import Progress
from asyncckpt.options import DEVICE_DEADLINE_S, SAVE_DEADLINE_S
from asyncckpt.pipeline.threads import IdleEndingThreads
from asyncckpt.signals import Guard, check_timeout, uninterrupted, wait_in_steps, wait_until_done
from asyncckpt.staging.limits import spare_bytes
from asyncckpt.storage.directory import io_failed

T = TypeVar("T")
EndFunction = Callable[[Any, BaseException | None], object]


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


class CheckpointFuture(Coroutine[Any, Any, T]):
    """See the module. Made by save_async and load_async only.

    To await it, or a task made of it, any number of times, on any loop, waits for the outcome and changes nothing else:
    the save goes on when that is cancelled. A coroutine in form, so that asyncio.create_task takes it; it needs neither
    be awaited nor closed.
    """

    _pid = 0  # Until it is made.
    _unseen: BaseException | None = None  # The error until somebody has got it; none of a cancelled save.
    _pending: Pending | None = None  # Of a save, what still copies the state.

    def __init__(self, *, step: int | None, path: Place, what: str, pools: Sequence[IdleEndingThreads] = ()) -> None:
        """pools: on which it runs, beside those of all saves and loads; nobody there may wait for it."""
        self._pools = pools
        self.step = step
        self.path = path
        self._what = self.__name__ = what  # As which asyncio shows a task of it.
        self._inner: concurrent.futures.Future[T] = concurrent.futures.Future()
        # A running concurrent future cannot be cancelled, so cancelling an `await` never aborts the save.
        self._inner.set_running_or_notify_cancel()
        self._guard = Guard()
        self._state = FutureState.STAGED
        self._end: tuple[T | None, BaseException | None] | None = None
        self._before_done: list[EndFunction] = []
        self._driven: dict[asyncio.Task[Any] | None, Coroutine[Any, Any, T]] = {}
        self.native_progress = Progress()
        self.bytes_total = 0
        self._staged = threading.Event()
        self._staged.set()
        self._pid = os.getpid()

    @property
    def state(self) -> FutureState:
        return self._state

    @property
    def progress(self) -> SaveProgress:
        return SaveProgress(bytes_done=self.native_progress.bytes_done, bytes_total=self.bytes_total)

    @uninterrupted
    def done(self) -> bool:
        return self._inner.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait and return the result, or raise what failed. DeadlineError (a TimeoutError) after `timeout` seconds.

        None: SAVE_DEADLINE_S.
        """
        result, error = self._wait_done(timeout)
        self._unseen = None  # No signal handler runs from here on: one that has ended the wait has left the error.
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # Without an error it is there.

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return the error, None when there is none. DeadlineError as `result`."""
        _, error = self._wait_done(timeout)
        self._unseen = None  # As in `result`.
        return error

    @uninterrupted
    def wait_staged(self, timeout: float | None = None) -> None:
        """Block this thread until the state is captured, or the save has failed. After that, the state may be changed.
        DeadlineError after `timeout` seconds (None: DEVICE_DEADLINE_S).

        A state on the host is captured as soon as save_async has returned, except what only steps of `optimizers=`
        change. Copies of a state on devices may still be on their way then: the streams that save_async knows of wait
        for them, others wait after `fence`.
        """
        check_timeout(timeout)
        timeout = DEVICE_DEADLINE_S if timeout is None else timeout
        if not self._staged.is_set():
            self._check_can_end()
        if not wait_in_steps(self._staged.wait, timeout):
            raise DeadlineError(f"the state of the {self._what} was not captured within {timeout} s")
        pending = self._pending
        if pending is not None:
            pending.steps.close()

    @uninterrupted
    def cancel(self) -> bool:
        """Abort the save if its commit has not begun, the load if it still reads; True when it will end so, or has."""
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
        if not self.done():
            woken = asyncio.get_running_loop().create_future()  # It holds no error that nobody might retrieve.
            self._wake_when_done(woken)
            await asyncio.wait({woken}, timeout=SAVE_DEADLINE_S)
        self._wait_done(None, until=0.0)
        return self.result(0)

    @uninterrupted
    def _wake_when_done(self, woken: asyncio.Future[None]) -> None:
        def wake(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # Its loop is closed.
                woken.get_loop().call_soon_threadsafe(_wake, woken)

        self._inner.add_done_callback(wake)

    def send(self, value: Any) -> Any:
        """For asyncio: go on with the wait of the current task."""
        return self._drive("send", value)

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        """For asyncio: end the wait of the current task with an error."""
        return self._drive("throw", typ if val is None else val)

    def close(self) -> None:
        """For asyncio: nothing is to close, and the save goes on."""

    def _drive(self, way: str, value: Any) -> Any:
        """Let each task have a wait of its own."""
        task = asyncio.current_task()
        waiting = self._driven.get(task)
        if waiting is None:
            waiting = self._driven[task] = self._wait()
        try:
            return getattr(waiting, way)(value)
        except BaseException:  # It has ended; its result is a StopIteration.
            self._driven.pop(task, None)
            raise

    @uninterrupted
    def _wait_done(self, timeout: float | None, *, until: float | None = None) -> tuple[T | None, BaseException | None]:
        """Wait for the end; return the result and the error, without noting that somebody has got it.

        DeadlineError after `timeout` seconds (None: SAVE_DEADLINE_S), which may have begun before: they end at `until`.
        """
        check_timeout(timeout)
        timeout = SAVE_DEADLINE_S if timeout is None else timeout
        self._check_can_end()
        if not wait_until_done(self._inner, timeout if until is None else max(0.0, until - time.monotonic())):
            raise DeadlineError(f"{self._what} did not end within {timeout} s", found=self._state.value)
        assert self._end is not None
        return self._end

    def _check_can_end(self) -> None:
        """Raise UsageError where a wait would have no end."""
        if self._inner.done():
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

    def before_done(self, function: EndFunction) -> None:
        """Call function(result, error) before anybody gets these; now, when they are there. Its errors are logged."""
        with self._guard:
            end = self._end
            if end is None:
                self._before_done.append(function)
        if end is not None:
            self._tell(function, end)

    def _tell(self, function: EndFunction, end: tuple[T | None, BaseException | None]) -> None:
        try:
            function(*end)
        except BaseException:
            log_exception("what follows the end of %s raised", self._what)

    def resolve(self, result: T, state: FutureState = FutureState.COMMITTED) -> None:
        self._note_end(state, result, None)
        self._inner.set_result(result)

    def fail(self, error: BaseException) -> None:
        is_cancelled = isinstance(error, SaveCancelledError)
        self._note_end(FutureState.CANCELLED if is_cancelled else FutureState.FAILED, None, error)
        if not is_cancelled:
            _failed.add(self)
            self._unseen = error
        self._inner.set_exception(error)

    def _note_end(self, state: FutureState, result: T | None, error: BaseException | None) -> None:
        self._state = state
        self._staged.set()
        self._pending = None
        with self._guard:
            end = self._end = result, error
        for function in self._before_done:
            self._tell(function, end)
        self._before_done = []  # They may hold much.

    def end_with(self, work: Callable[[], T]) -> None:
        """Do the work here, and resolve with its result or fail with its error."""
        try:
            result = work()
        except BaseException as error:
            self.fail(error)
        else:
            self.resolve(result)

    def __del__(self) -> None:
        if self._unseen is not None and self._pid == os.getpid():
            print(f"asyncckpt: {self!r} failed and nobody asked: {self._unseen}", file=sys.stderr)
            self._unseen = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._what}: {self._state.value}>"


class SaveFuture(CheckpointFuture[SaveResult]):
    """The future of one save."""

    _wait_for_upload: Callable[[float], None] | None = None

    @uninterrupted
    def wait_uploaded(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed and is in the object store of the Saver, too, or raise the error.

        What was not uploaded stays on the disk, and the next save, or the next Saver, goes on with it. DeadlineError
        after `timeout` seconds (None: SAVE_DEADLINE_S), UsageError for a save that was skipped or has no store.
        """
        check_timeout(timeout)
        until = time.monotonic() + (SAVE_DEADLINE_S if timeout is None else timeout)
        skipped = self.result(timeout).skipped
        if not skipped and isinstance(self.path, StoreUrl):
            return  # It is there: that is what committed it.
        if skipped or self._wait_for_upload is None:
            what = "was skipped" if skipped else "is not uploaded anywhere"
            raise UsageError(f"{self._what} {what}", hint="name a store: Saver(path=..., upload='s3://bucket/run1')")
        self._wait_for_upload(max(0.0, until - time.monotonic()))

    def fence(self, stream: Any = None) -> None:
        """Let a stream (None: the current ones of this thread) wait until the state on devices may be changed.

        stream: a torch.cuda.Stream. The host does not wait. Needed for streams that change the state and that the Saver
        does not know.
        """
        pending = self._pending  # The background takes it away when the save has ended.
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

    def expect_upload(self, wait: Callable[[float], None]) -> None:
        """Note how to wait until the checkpoint is uploaded."""
        self._wait_for_upload = wait

    def expect_copies(self, pending: Pending) -> None:
        """Note what still copies the state."""
        self._pending = pending
        if pending.is_running:
            self._staged.clear()

    def mark_staged(self) -> None:
        """Note that it has ended."""
        self._staged.set()


class LoadFuture(CheckpointFuture[LoadReport]):
    """The future of one load."""


def as_checkpoint_error(error: BaseException, step: int | None, path: object = "") -> BaseException:
    """Return an error of the system as one of this library, others as they are."""
    save = ("the save" if step is None else f"the save of step {step}") + (f" in {str(path)!r}" if path else "")
    if isinstance(error, MemoryError):
        what = f"{save} ran out of memory: {str(error) or 'nothing says for what'}; {spare_bytes()} bytes are to spare"
        wrapped = IOFailedError(what, errno=errno.ENOMEM, hint="lower host_memory_limit, or use save()")
    elif isinstance(error, OSError) and not isinstance(error, CheckpointError):
        wrapped = io_failed(f"{save} failed", error)
    else:
        return error
    wrapped.__cause__ = error
    return wrapped


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # Else its task was cancelled.
        woken.set_result(None)


# Of those that are still there at the end, the errors that nobody has got are printed.
_failed: weakref.WeakSet[CheckpointFuture[Any]] = weakref.WeakSet()


@atexit.register
def _report_all() -> None:
    # Runs after the background thread was joined, so every outcome is known.
    for future in tuple(_failed):
        future.__del__()
