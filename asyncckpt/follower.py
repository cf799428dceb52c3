"""Follow a checkpoint directory that another process writes, so that a server stays only seconds behind training.

    async for update in asyncckpt.follow("run", cursor="served.json"):
        await update.load(hashtables={"user": table}, tensors={"model": model})

Each committed step is yielded once, in ascending order. A step is finished when the next one is requested, or with
`update.done()`; then the cursor file names it, and a restarted follower continues after it. A step that was not
finished when the process died is yielded again. Steps that retention removes before they are seen are skipped. When
training goes back beyond what was finished, the newest step of its new history comes, be its number lower or the same.

The directory is only read: a follower lists the manifests every `poll_seconds` and takes no lock. All files of an
update are open until it is finished, so retention cannot remove their content meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch

from asyncckpt.engine.follow.cursor import CursorFile, SeenStep
from asyncckpt.engine.follow.table_update import OpenUpdate, TableUpdate, find_update, seen_step
from asyncckpt.engine.process.background import check_may_wait, workers
from asyncckpt.engine.process.event_loop import when_free
from asyncckpt.engine.process.save_lock import Ticket, save_lock
from asyncckpt.errors import DeadlineError, UsageError, must_be
from asyncckpt.format.names import check_step
from asyncckpt.model.result import LoadReport
from asyncckpt.model.store_url import Place
from asyncckpt.model.table import Table
from asyncckpt.modules.walk import tables_of
from asyncckpt.native import Progress
from asyncckpt.options import BUSY_DEADLINE_S, SAVE_DEADLINE_S
from asyncckpt.plan.named_tables import named_tables
from asyncckpt.plan.state import TensorsArgument, named_state
from asyncckpt.signals import Guard, uninterrupted, wait_in_steps
from asyncckpt.storage.directory import check_path
from asyncckpt.storage.folder import check_place

__all__ = ["Follower", "TableUpdate", "Update", "follow"]

T = TypeVar("T")


def follow(
    path: str | os.PathLike[str],
    *,
    after: int | None = None,
    cursor: str | os.PathLike[str] | None = None,
    poll_seconds: float = 1.0,
    until: int | None = None,
) -> Follower:
    """Yield each step that is committed in a checkpoint directory: an async iterator of Updates.

    path          the directory; it need not exist yet
    after         begin after this step; None: with the oldest step. An existing cursor file takes precedence
    cursor        a small file, outside of the directory, that remembers the last finished step
    poll_seconds  how long to wait before listing the manifests again
    until         end when this step, or a later one, is finished; None: never

    Use it on one event loop, one update at a time. Ends by cancellation, `break` or `aclose()`; leaves no thread.
    Raises UsageError at once; while iterating CorruptError for a damaged step (the next call tries again),
    IncompatibleError, UnsupportedError, IOFailedError.
    """
    checked = check_place(path)
    after = check_step(after, name="after")
    until = check_step(until, name="until")
    if isinstance(poll_seconds, bool) or not isinstance(poll_seconds, (int, float)) or not 0 < poll_seconds <= 86400:
        raise must_be("poll_seconds", "above 0 and at most 86400", poll_seconds)
    return Follower(checked, after=after, cursor=_cursor(cursor, checked), poll_seconds=poll_seconds, until=until)


def _cursor(cursor: str | os.PathLike[str] | None, path: Place) -> CursorFile | None:
    if cursor is None:
        return None
    checked = check_path(cursor)
    if path == checked or path in checked.parents:
        raise UsageError(
            "cursor is in the checkpoint directory, which only its writer may change",
            found=str(checked),
            expected="a file elsewhere",
        )
    return CursorFile(checked)


class Follower:
    """The result of `follow`. `async with` closes it."""

    def __init__(
        self, path: Place, *, after: int | None, cursor: CursorFile | None, poll_seconds: float, until: int | None
    ) -> None:
        self._path = path
        self._cursor = cursor
        self._poll_seconds = poll_seconds
        self._until = until
        self._after = after
        self._seen: SeenStep | None = None
        self._begun = False
        self._closed = False
        self._busy = False
        self._found: OpenUpdate | None = None
        self._current: Update | None = None
        self._held: dict[str, tuple[Table, SeenStep]] = {}  # The tables, and the step that each holds.

    @property
    def last_step(self) -> int | None:
        """The last finished step; None before there is one."""
        return None if self._seen is None else self._seen.step

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> Update:
        """Finish the previous update, wait for the next one and return it."""
        if self._busy:
            raise UsageError("a follower is used by one task at a time")
        self._busy = True
        try:
            return await self._next()
        finally:
            self._busy = False

    async def _next(self) -> Update:
        if not self._begun:
            self._seen = await _in_thread(self._first_seen)
            self._begun = True
        if self._current is not None:
            await _in_thread(self._current.done)
            self._current = None
        while not self._closed and (self._until is None or self._seen is None or self._seen.step < self._until):
            await _in_thread(self._look)
            opened, self._found = self._found, None
            if opened is not None and self._closed:
                opened.close()
            elif opened is not None:
                self._current = Update(opened, self)
                return self._current
            else:
                await asyncio.sleep(self._poll_seconds)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration. The next follower yields an unfinished update again."""
        self._closed = True
        current, self._current = self._current, None
        found, self._found = self._found, None
        if current is not None:
            await _in_thread(current._release)  # A load or a read may be about it still.
        if found is not None:
            found.close()

    async def __aenter__(self) -> Follower:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await self.aclose()

    def _first_seen(self) -> SeenStep | None:
        """Return where the last follower ended. Runs on a worker thread."""
        seen = None if self._cursor is None else self._cursor.read()
        if seen is None and self._after is not None:
            return seen_step(self._path, self._after)
        return seen

    def _look(self) -> None:
        """Open the next update, on a worker thread. Keep it here, because the caller may be cancelled meanwhile."""
        if self._found is None:
            self._found = find_update(self._path, self._seen)

    def _finish(self, seen: SeenStep) -> None:
        """Record that an update is finished, on any thread."""
        if self._cursor is not None:
            self._cursor.write(seen)
        self._seen = seen


class Update:
    """A committed step. Valid until it is finished, by requesting the next one or by `done()`, or the follower ends.

    step      the step
    kind      "full": independent of others. "delta": holds the differences from `previous`
    previous  the step finished before a delta; else None
    tables    per table its rows and removed ids, and whether the rows are the whole table, which a delta may hold too
    metadata  the user metadata given to the save
    """

    def __init__(self, opened: OpenUpdate, follower: Follower) -> None:
        self._opened = opened
        self._follower = follower
        self._guard = Guard()
        self._is_open = True
        self.step: int = opened.step
        self.kind: Literal["full", "delta"] = "full" if opened.previous is None else "delta"
        self.previous: int | None = opened.previous
        self.tables: Mapping[str, TableUpdate] = opened.tables
        self.metadata: Mapping[str, Any] = opened.metadata

    async def load(
        self,
        hashtables: Mapping[str, Table] | torch.nn.Module | None = None,
        tensors: TensorsArgument | None = None,
        *,
        strict: bool = True,
    ) -> LoadReport:
        """Bring tables and tensors to this step, on another thread; they must not be used until it is done.

        For a table that this follower has brought to `previous` and that has not changed since, removes the removed ids
        and inserts the rows; empties any other table and loads it like a Loader, from the whole chain. Tensors are
        always loaded completely. If several ranks have saved, each table takes the ids that it owns from all of them,
        and plain values are those of the lowest rank that has them. Waits while a save or load of this process is in
        flight.

        Ends soon after a cancellation. That, or an error, may leave tables empty; their next load is complete. Pass the
        same table objects each time: if `hashtables` is a module whose tables are made again in every call, all loads
        are complete. Raises what Loader.load raises.
        """
        tables = dict(named_tables(tables_of(hashtables) if isinstance(hashtables, torch.nn.Module) else hashtables))
        state = named_state(tensors)
        progress = Progress()
        ticket = Ticket(kind="load", path=self._opened.path, step=self.step, thread=threading.get_ident())

        def work() -> LoadReport:
            try:
                with self._held():
                    self._check_open()
                    return self._opened.load(tables, state, held=self._follower._held, strict=strict, progress=progress)
            finally:
                save_lock.release(ticket)

        until = time.monotonic() + BUSY_DEADLINE_S
        try:
            while (future := _begun(ticket, work)) is None:
                await when_free(max(0.0, until - time.monotonic()))
            return await _end_of(future, on_cancel=progress.cancel)
        except BaseException:
            progress.cancel()  # Whoever is interrupted has lost the future.
            raise

    async def rows(self, table: str) -> dict[str, torch.Tensor]:
        """Return the rows of a table in this update: column -> tensor [n, *row_shape] on the CPU, including `id`.

        These are all rows in a full update, or if the table is whole here. Reads and verifies them at every call.
        Raises UsageError for a table that is not in this step, CorruptError, IOFailedError.
        """
        return await _in_thread(lambda: self._read(self._opened.rows, table))

    async def removed(self, table: str) -> torch.Tensor:
        """Return the ids to remove before inserting the rows: distinct, int64 [n] on the CPU. Raises like `rows`."""
        return await _in_thread(lambda: self._read(self._opened.removed, table))

    @uninterrupted
    def done(self) -> None:
        """Finish this update now: write the cursor and close its files. Any thread may call it.

        Waits for the end of a load or a read of it: DeadlineError. IOFailedError if the cursor cannot be written; then
        the update is not finished.
        """
        with self._held():
            if self._is_open:
                self._follower._finish(self._opened.seen)
                self._close()

    def _read(self, read: Callable[[str], T], table: str) -> T:
        with self._held():
            self._check_open()
            return read(table)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Be the only one that uses the files. DeadlineError."""
        if not wait_in_steps(lambda seconds: self._guard.__enter__(True, seconds), SAVE_DEADLINE_S):
            raise DeadlineError(f"{self!r} was still read after {SAVE_DEADLINE_S} s")
        try:
            yield
        finally:
            self._guard.__exit__()

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"the update of step {self.step} is finished", hint="use it before asking for the next")

    def _release(self) -> None:
        with self._held():
            self._close()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._opened.close()

    def __repr__(self) -> str:
        base = "" if self.previous is None else f" on {self.previous}"
        return f"<Update: step {self.step}, {self.kind}{base}>"


@uninterrupted
def _begun(ticket: Ticket, work: Callable[[], T]) -> concurrent.futures.Future[T] | None:
    """Take the save lock and begin work, which gives it back; None while it is not free."""
    try:
        if not save_lock.acquire(ticket, on_busy="skip", deadline_s=0):
            return None
        future = workers.submit(work)
    except BaseException:
        save_lock.release(ticket)
        raise
    save_lock.hand_over(ticket)
    return future


async def _in_thread(function: Callable[[], T]) -> T:
    """Run a function on a worker thread, to its end. UsageError in a loop that runs on a thread of the background."""
    check_may_wait("a follower")
    with uninterrupted:
        future = workers.submit(function)
    return await _end_of(future)


async def _end_of(future: concurrent.futures.Future[T], on_cancel: Callable[[], None] = lambda: None) -> T:
    """Wait for the end of work, also when cancelled: it comes soon after `on_cancel`."""
    with uninterrupted:
        waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        on_cancel()
        while not waiter.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([waiter])
        waiter.exception()  # Nobody else will ask.
        raise
