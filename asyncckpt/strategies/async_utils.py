"""Requests to save in the background, and the queue that works them off.

1. A save makes an AsyncRequest: `async_fn` may run beside training, `finalize_fns` end the save.
2. The caller schedules it: `async_fn` begins on a thread of this process. Never in a forked one: a fork copies locks
   whose holders it does not copy.
3. At every step, or at the end, the caller asks `maybe_finalize_async_calls`. The oldest call whose `async_fn` has
   ended on all ranks is finalized, on the calling thread, in the order of scheduling.

Nothing waits for ever: every wait has a deadline, a call that failed raises on every rank (its own error where it
failed, PeerError elsewhere) and is taken out of the queue, and the calls after it go on. Source of the interface:
megatron.core.dist_checkpointing.strategies.async_utils.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from asyncckpt.coordination.agreement import Agreement, GroupAgreement
from asyncckpt.errors import DeadlineError, UsageError
from asyncckpt.options import SAVE_DEADLINE_S
from asyncckpt.pipeline.threads import IdleEndingThreads
from asyncckpt.signals import uninterrupted, wait_until_done
from asyncckpt.system import register_at_fork

PRELOADED_ARGS_COUNT = 3  # What async_fn is called with, where the second one is what preload_fn returns.


class AsyncRequest(NamedTuple):
    """A save of which `async_fn` may run beside training.

    async_fn         called with async_fn_args and async_fn_kwargs; None: there is nothing to wait for
    finalize_fns     called without arguments, one after the other, once async_fn has ended on all ranks
    preload_fn       called when the request is scheduled; its result takes the place of the second of three arguments
    is_frozen        finalize_fns can no longer be added
    call_idx         the number that the queue gave it
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - part of the interface; never changed here.
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function after the others. UsageError when the request is frozen."""
        if self.is_frozen:
            raise UsageError("a frozen request takes no further finalize function", hint="add it before scheduling")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Run all of it now: async_fn, then, when that has ended on all ranks, the finalize functions.

        Must be called on all ranks. Raises what async_fn raised, and PeerError where it raised on another rank.
        """
        _sync_calls.schedule_async_request(self)
        _sync_calls.maybe_finalize_async_calls(blocking=True)

    def freeze(self) -> AsyncRequest:
        """Return the same request, to which no finalize function can be added."""
        return self._replace(is_frozen=True)


class AsyncCaller(ABC):
    """Runs the async_fn of requests, and knows when that of the oldest has ended on all ranks."""

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Begin with async_fn; preload_fn has run when this returns. To be called on all ranks."""

    @abstractmethod
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return whether the oldest call has ended on all ranks (no_dist: on this one); blocking: wait for that.

        To be called on all ranks, unless no_dist. True ends that call. Raises what async_fn raised, PeerError when it
        failed on another rank or that rank does not answer, DeadlineError; each of them ends that call too.
        """

    @abstractmethod
    def sync_all_async_calls(self, is_alive: int | bool) -> bool:
        """Return whether the oldest call has ended on all ranks; is_alive: whether it still runs on this one."""

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """Forget all calls. abort: what can be cancelled is; else it goes on in the background."""


class ThreadAsyncCaller(AsyncCaller):
    """Runs requests one after the other on a thread of its own, which is there only while there is work.

    agreement  how ranks agree; None: there is only this one
    deadline   seconds that a blocking wait takes at most
    """

    def __init__(self, *, agreement: Agreement | None = None, deadline: float = SAVE_DEADLINE_S) -> None:
        self._agreement = agreement
        self._deadline_s = deadline
        self._threads = IdleEndingThreads("asyncckpt-async-call", 1)
        self._calls: deque[tuple[AsyncRequest, Future[Any]]] = deque()
        _leave_to_parent.add(self)

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """See AsyncCaller. An error of preload_fn is the call's, so that the other ranks hear of it too."""
        args = list(async_req.async_fn_args)
        future: Future[Any] = Future()
        try:
            if async_req.preload_fn is not None:
                if len(args) != PRELOADED_ARGS_COUNT:
                    what = "a request with a preload_fn has a wrong number of arguments"
                    raise UsageError(what, found=len(args), expected=PRELOADED_ARGS_COUNT)
                args[1] = async_req.preload_fn()
            if async_req.async_fn is None:
                future.set_result(None)
            else:
                future = self._threads.submit(async_req.async_fn, *args, **async_req.async_fn_kwargs)
        except Exception as error:
            future.set_exception(error)
        self._calls.append((async_req, future))

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        if not self._calls:
            return True
        request, future = self._calls[0]
        agreement = None if no_dist else self._agreement
        try:
            error: Exception | None = None
            if blocking:
                error = self._wait(request.call_idx, future, agreement)
            if error is None and future.done():
                error = _error_of(future, request.call_idx)
                own_error = getattr(request.async_fn, "error", None)
                # A rank that has failed may not wait for one that has never come to this call.
                if error is None and agreement is not None and callable(own_error):
                    error = own_error()
            ended = error is not None or future.done()
            done = ended
            if agreement is not None:
                done = agreement.is_done(
                    request.call_idx, f"async call {request.call_idx}", ended=ended, error=error, blocking=blocking
                )
        except Exception:  # Whoever interrupts the wait, with Ctrl-C, may go on with the call.
            self._calls.popleft()
            raise
        if not done:
            return False
        self._calls.popleft()
        if error is not None:
            raise error
        return True

    def sync_all_async_calls(self, is_alive: int | bool) -> bool:
        """See AsyncCaller; PeerError when the call failed on another rank."""
        if self._agreement is None or not self._calls:
            return not is_alive
        call = self._calls[0][0].call_idx
        return self._agreement.is_done(call, f"async call {call}", ended=not is_alive, error=None, blocking=False)

    def close(self, abort: bool = False) -> None:
        """See AsyncCaller. A call is cancelled by `cancel()` of its async_fn too, where that has one: what it waits for
        may be under way before it is called."""
        calls, self._calls = self._calls, deque()
        for request, future in calls if abort else ():
            future.cancel()
            cancel = getattr(request.async_fn, "cancel", None)
            if callable(cancel):
                cancel()

    def forget(self) -> None:
        """Start over in a forked child."""
        self._calls.clear()

    def _wait(self, call: int, future: Future[Any], agreement: Agreement | None) -> DeadlineError | None:
        """Wait until the call has ended on this rank, and let the others know; return the error if it has not."""
        until = time.monotonic() + self._deadline_s
        while not future.done():
            left = until - time.monotonic()
            if left <= 0:
                return DeadlineError(f"async call {call} did not end within {self._deadline_s} s")
            wait_until_done(future, left if agreement is None else min(left, agreement.pause_s))
            if agreement is not None and not future.done():
                agreement.say_running(call)
        return None


def _error_of(future: Future[Any], call: int) -> Exception | None:
    """Return what a call raised. An exit of its thread does not end the caller, but it is an error."""
    error = future.exception()
    if error is None or isinstance(error, Exception):
        return error
    wrapped = UsageError(f"async call {call} ended with {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


class _ActiveAsyncRequest(NamedTuple):
    idx: int
    async_caller: AsyncCaller
    async_request: AsyncRequest


class AsyncCallsQueue:
    """Async calls in the order of their scheduling. One thread uses it; on all ranks, in the same order.

    A forked child finds it empty: the calls are its parent's, which finalizes them.

    persistent     one thread for all calls, one after the other; else each call has its own
    process_group  the ranks that save together; None: those of the default group, where there is one
    deadline       seconds that a blocking wait takes at most
    peer_deadline  seconds that one wait for another rank takes at most; a rank that asks whether a call is done waits
                   for rank 0 to ask the same
    """

    def __init__(
        self,
        persistent: bool = False,
        *,
        process_group: Any = None,
        deadline: float = SAVE_DEADLINE_S,
        peer_deadline: float | None = None,
    ) -> None:
        self.async_calls: deque[_ActiveAsyncRequest] = deque()
        self.call_idx = -1
        self.persistent = persistent
        self.persistent_caller: AsyncCaller | None = None
        self._deadline_s = deadline
        self._ranks = GroupAgreement(process_group, deadline=peer_deadline)
        _leave_to_parent.add(self)

    @uninterrupted
    def schedule_async_request(self, async_request: Any) -> int:
        """Begin with a request, ours or a foreign one with such fields; returns its number. To be called on all ranks.

        An error of its preload_fn is raised when it is finalized. Raises PeerError when the ranks do not find each
        other.
        """
        request = as_request(async_request)
        agreement = self._ranks.get()
        self.call_idx += 1
        frozen = request.freeze()._replace(call_idx=self.call_idx)
        caller = self._caller(agreement)
        caller.schedule_async_call(frozen._replace(finalize_fns=[]))
        self.async_calls.append(_ActiveAsyncRequest(self.call_idx, caller, frozen))
        return self.call_idx

    @uninterrupted
    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the oldest calls, as far as they have ended on all ranks; returns their numbers.

        blocking: wait until all have. no_dist: ask this rank only. To be called on all ranks, unless no_dist. A call
        that failed is taken out of the queue and its error raised, here and (as PeerError) on the other ranks; those
        after it stay, and the next call goes on with them.
        """
        finalized: list[int] = []
        while self.async_calls:
            idx, caller, request = self.async_calls[0]
            try:
                done = caller.is_current_async_call_done(blocking, no_dist)
            except Exception:
                self.async_calls.popleft()
                raise
            if not done:
                break
            self.async_calls.popleft()
            for finalize in request.finalize_fns:
                finalize()
            finalized.append(idx)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return how many calls wait for their finalization."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all calls; abort: forget them instead, and cancel what can be cancelled.

        Raises the first error of a call; the others are finalized all the same.
        """
        first: BaseException | None = None
        while self.async_calls and not abort:
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except Exception as error:
                first = first or error
        for active in self.async_calls:
            active.async_caller.close(abort=True)
        self.async_calls.clear()
        if self.persistent_caller is not None:
            self.persistent_caller.close(abort=abort)
            self.persistent_caller = None
        self._ranks.close()
        if first is not None:
            raise first

    def forget(self) -> None:
        """Start over in a forked child."""
        self.async_calls.clear()
        self.persistent_caller = None
        self._ranks.close()

    def _caller(self, agreement: Agreement | None) -> AsyncCaller:
        if self.persistent and self.persistent_caller is not None:
            return self.persistent_caller
        caller = ThreadAsyncCaller(agreement=agreement, deadline=self._deadline_s)
        if self.persistent:
            self.persistent_caller = caller
        return caller


def as_request(request: Any) -> AsyncRequest:
    """Return a request of ours, or one made of the fields of another named tuple; UsageError for anything else."""
    if isinstance(request, AsyncRequest):
        return request
    try:
        fields = request._asdict()
        return AsyncRequest(
            async_fn=fields["async_fn"],
            async_fn_args=tuple(fields["async_fn_args"]),
            finalize_fns=fields["finalize_fns"],
            async_fn_kwargs=fields.get("async_fn_kwargs") or {},
            preload_fn=fields.get("preload_fn"),
            is_frozen=bool(fields.get("is_frozen")),
        )
    except (AttributeError, KeyError, TypeError) as error:
        what = "an async request has other fields than it should"
        raise UsageError(what, found=type(request), expected=AsyncRequest._fields) from error


_leave_to_parent: weakref.WeakSet[ThreadAsyncCaller | AsyncCallsQueue] = weakref.WeakSet()


def _forget_in_child() -> None:
    for calls in _leave_to_parent:
        calls.forget()


register_at_fork(after_in_child=_forget_in_child)
_sync_calls = AsyncCallsQueue()  # Of requests that are executed at once: ranks that did it before know each other.
