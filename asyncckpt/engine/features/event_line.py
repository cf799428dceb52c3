"""Events on their way to the function that a user gave: in order, on a thread of its own, so that it can hurt no save.

    it raises         the error is logged, and the next event comes
    it blocks         later events wait, EVENTS_WAITING_MAX of them; what comes then is dropped, and their number logged
    it never returns  closing the Saver, and the end of the interpreter, wait EVENTS_WAIT_S for it, then go on without

The thread is a daemon, the only way not to be waited for. It is started with the Saver, since none can be started when
the interpreter ends, which is when a last save may be made.
"""

from __future__ import annotations

import atexit
import calendar
import contextlib
import copy
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Literal

from asyncckpt.commit.discover import newest_step, read_head
from asyncckpt.commit.root import WriteRoot
from asyncckpt.engine.process.log import log_exception, log_warning
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.errors import CheckpointError
from asyncckpt.format.head import CREATED_FORMAT
from asyncckpt.model.event import Event, Recorder, unix_time
from asyncckpt.model.result import SaveResult
from asyncckpt.model.store_url import Place
from asyncckpt.pipeline.threads import start_thread
from asyncckpt.signals import wait_in_steps
from asyncckpt.system import register_at_fork

EVENTS_WAITING_MAX = 10_000
EVENTS_WAIT_S = 5.0
CAUSES_MAX = 8

EventFunction = Callable[[Event], object]


class EventLine(SaveFeature):
    """The events of one Saver on their way to its function. `put` and `close` neither wait nor raise."""

    def __init__(self, on_event: EventFunction) -> None:
        self._queue: SimpleQueue[Event | threading.Event | None] = SimpleQueue()
        self._dropped_count = 0
        self._thread = threading.Thread(
            target=_deliver, args=(self._queue, on_event), name="asyncckpt-events", daemon=True
        )
        start_thread(self._thread)
        _lines.add(self)

    def begin(self, job: SaveJob) -> None:
        job.recorder = Recorder(self.put, job.target.root.path, step=job.step, rank=job.target.rank)

    def put(self, event: Event) -> None:
        """Hand on an event, unless too many wait."""
        if self._queue.qsize() < EVENTS_WAITING_MAX:
            self._queue.put(event)
            return
        self._dropped_count += 1
        if self._dropped_count == 1:
            log_warning("on_event of %s blocks: events are dropped, first that of a %s", event.path, event.name)

    def opened(self, root: WriteRoot, *, rank: int) -> None:
        """Hand on which checkpoint is the newest that is there, if any can be read."""
        step, created = None, 0.0
        with contextlib.suppress(CheckpointError, ValueError):  # Nobody has checked the time.
            step = newest_step(root)
            created = float(calendar.timegm(time.strptime(read_head(root, step).created, CREATED_FORMAT)))
        now = time.perf_counter()
        self.put(Event(name="open", step=step, path=root.path, rank=rank, time=created, begun=now, seconds=0.0))

    def ended(
        self, name: Literal["save", "compaction", "upload"], *, step: int | None, begun: float, path: Place, rank: int
    ) -> Callable[[SaveResult | None, BaseException | None], None]:
        """Return a function that hands on how a save has ended. It holds nothing of the Saver."""
        return partial(_ended, self, name, step, begun, path, rank)

    def wait(self, timeout: float) -> None:
        """Wait until what was put has been taken; a warning when it was not in time. Returns at once where the function
        itself calls.
        """
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return
        all_taken = threading.Event()
        self._queue.put(all_taken)
        # What is put behind `close` is taken by nobody.
        if not wait_in_steps(lambda step_s: all_taken.wait(step_s) or not self._thread.is_alive(), timeout):
            log_warning("on_event did not return within %s s: %d events did not reach it", timeout, self.left_count)

    def wait_for_all(self) -> None:
        """Wait until all has been taken, but not for ever: then a warning says how many were not."""
        self.wait(EVENTS_WAIT_S)

    @property
    def left_count(self) -> int:
        """How many events were dropped or still wait."""
        return self._dropped_count + self._queue.qsize()

    def close(self) -> None:
        """Let the thread end after what was put. Idempotent."""
        self._queue.put(None)


def _ended(
    line: EventLine,
    name: Literal["save", "compaction", "upload"],
    step: int | None,
    begun: float,
    path: Place,
    rank: int,
    result: SaveResult | None,
    error: BaseException | None,
) -> None:
    line.put(
        Event(
            name=name,
            step=step,
            path=path,
            rank=rank,
            time=unix_time(begun),
            begun=begun,
            seconds=time.perf_counter() - begun,
            result=result,
            error=None if error is None else _bare(error),
        )
    )


def _bare(error: BaseException, *, causes_left: int = CAUSES_MAX) -> BaseException:
    """Return an error that says the same without a traceback, whose frames hold the save and so its state."""
    try:
        bare = copy.copy(error)
        if bare is error or type(bare) is not type(error):
            raise TypeError("it does not copy itself")
    except Exception:  # Of a class whose arguments are not those of Exception.
        bare = RuntimeError(f"{type(error).__name__}: {error}")
    bare.__traceback__ = bare.__context__ = None
    cause = error.__cause__
    bare.__cause__ = _bare(cause, causes_left=causes_left - 1) if cause is not None and causes_left else None
    return bare


def _deliver(queue: SimpleQueue[Event | threading.Event | None], on_event: EventFunction) -> None:
    """Call the function with each event. Holds nothing of the line, which ends with its Saver."""
    while (item := queue.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        try:
            on_event(item)
        except BaseException:
            log_exception("on_event raised at a %s of step %s", item.name, item.step)


_lines: weakref.WeakSet[EventLine] = weakref.WeakSet()


@atexit.register
def _wait_for_all() -> None:
    """Runs after the last saves, which handlers that were registered later have made."""
    until = time.monotonic() + EVENTS_WAIT_S
    for line in tuple(_lines):
        line.wait(max(0.0, until - time.monotonic()))


register_at_fork(after_in_child=_lines.clear)
