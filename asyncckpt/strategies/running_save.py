"""A save of all ranks into one part of a checkpoint, and, under way, as the async_fn of a request: to call it waits.

The save runs in this process, in the background, from the moment it was begun; the request says when it has ended. So
`async_fn` may be called on any thread. And, because Megatron's own queues run it in a process of theirs (forked, or
spawned and then pickled), in another process too: there it waits for a lock on a file, which this process holds until
the save has ended, however it ends. What failed is raised by the finalize function, which runs here.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from asyncckpt.engine.process.future import SaveFuture
from asyncckpt.errors import DeadlineError, UnsupportedError, UsageError
from asyncckpt.model.own_rank import own_rank
from asyncckpt.model.result import SaveResult
from asyncckpt.options import SAVE_DEADLINE_S, Durability, RankOptions
from asyncckpt.saver import Saver
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import io_failed
from asyncckpt.strategies.backend import writing_path
from asyncckpt.system import fcntl

LOCK_PAUSE_S = 0.05
Errors = Callable[[], AbstractContextManager[None]]


class RunningSave:
    """A save with the Saver that does it, which is closed when the save was waited for.

    deadline  seconds that each wait takes at most
    lock      for which other processes wait; it is released when the save has ended. None: they cannot wait
    errors    the block out of which it raises; what a request raises passes no strategy
    """

    def __init__(
        self,
        saver: Saver,
        future: SaveFuture,
        *,
        deadline: float = SAVE_DEADLINE_S,
        lock: HeldFile | None = None,
        errors: Errors = nullcontext,
    ) -> None:
        self.deadline_s = deadline
        self._errors = errors
        self._pid = os.getpid()
        self._saver: Saver | None = saver
        self._future: SaveFuture | None = future
        self._lock_path = None if lock is None else lock.path
        if lock is not None:
            future.add_done_callback(lambda _: lock.release())

    def __call__(self) -> None:
        """Wait until the save has ended, and its Saver too. What failed, `result` raises, or it is printed at the end.

        DeadlineError; UsageError in another process that was not foreseen.
        """
        future, saver = self._future, self._saver
        with self._errors():
            if future is not None and self._pid == os.getpid():
                future._wait_done(self.deadline_s)
                if saver is not None:
                    saver._end()
            elif self._lock_path is None:
                what = "a save is waited for in another process"
                raise UsageError(what, hint="make the request for Megatron's queue")
            else:
                wait_for_release(self._lock_path, deadline_s=self.deadline_s)

    @uninterrupted
    def result(self) -> SaveResult:
        """Wait, close the Saver, and return the result or raise what failed; also the finalize function."""
        assert self._future is not None, "only the process that saves has the result"
        with self._errors():
            try:
                return self._future.result(self.deadline_s)
            finally:
                saver, done = self._saver, self._future.done()
                if saver is not None and done:
                    self._saver = None
                    saver.close()

    def error(self) -> Exception | None:
        """Return what `result` would raise, if the save has ended: a queue asks before it waits for other ranks."""
        if self._future is None or not self._future.done():
            return None
        try:
            with self._errors():
                self._future.result(0)
        except Exception as error:
            return error
        return None

    def cancel(self) -> bool:
        """Abort the save, if it has not begun to commit; True when it will end so."""
        return self._future is not None and self._future.cancel()

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned process, which can only wait."""
        return {**self.__dict__, "_saver": None, "_future": None}


@uninterrupted
def begin_save(
    checkpoint_dir: str | Path,
    name: str,
    make_state: Callable[[], Mapping[str, Any]],
    *,
    process_group: Any,
    peer_deadline: float,
    parallel: int = 8,
    durability: Durability,
    deadline: float = SAVE_DEADLINE_S,
    other_processes: bool = False,
    errors: Errors = nullcontext,
) -> RunningSave:
    """Capture the state of this rank, of as many as the group has; what is committed replaces what was there before.

    name: the part's. other_processes: they may wait for it too. errors: see RunningSave. To be called on all ranks. An
    error of make_state is raised here, and by the saves of the other ranks as PeerError. PeerError when the ranks do
    not find each other.
    """
    rank, ranks_count = own_rank(None, None, process_group)
    state: Mapping[str, Any] = {}
    lock: HeldFile | None = None
    failed: Exception | None = None
    with ExitStack() as begun:
        try:
            state = make_state()
            if other_processes:
                lock = HeldFile()
                begun.callback(lock.release)
        except Exception as error:
            if ranks_count == 1:
                raise
            failed = error  # The others would wait for this rank.
        saver = Saver(
            shard_index=rank,
            shard_num=ranks_count,
            path=writing_path(checkpoint_dir, name),
            parallel=parallel,
            tensors=state,
            ranks=RankOptions(process_group, peer_deadline),
            keep=1,
            on_busy="queue",
            durability=durability,
        )
        begun.callback(saver.close)
        if failed is not None:
            saver._leave_out_call(failed)
            raise failed
        future = saver.save_async()
        begun.pop_all()
    return RunningSave(saver, future, deadline=deadline, lock=lock, errors=errors)


class HeldFile:
    """A file that this process has locked. A record lock: forked children do not inherit it, and it ends with us."""

    def __init__(self) -> None:
        if fcntl is None:
            raise UnsupportedError("other processes cannot wait for a save: this system has no record locks")
        with ExitStack() as made:
            try:
                self._fd, self.path = tempfile.mkstemp(prefix="asyncckpt-save-")
                made.callback(self.release)
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise io_failed("a file for other processes to wait for cannot be made", error) from error
            made.pop_all()

    def release(self) -> None:
        with suppress(OSError):
            os.unlink(self.path)
        with suppress(OSError):
            os.close(self._fd)


def wait_for_release(path: str, *, deadline_s: float) -> None:
    """Wait in another process until nobody holds the lock of a file, or it is gone. DeadlineError, IOFailedError."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            # Opened anew each time: closing it drops no lock of another process.
            with open(path, "rb") as file:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
        except FileNotFoundError:
            return
        except OSError as error:
            if not isinstance(error, (BlockingIOError, PermissionError)):
                raise io_failed(f"file {path!r} cannot be waited for", error) from error
        if time.monotonic() >= until:
            raise DeadlineError(f"a save of another process did not end within {deadline_s} s")
        time.sleep(LOCK_PAUSE_S)
