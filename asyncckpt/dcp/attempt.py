"""The attempt of a DCP save: the coordinator makes and commits it, and the other ranks get a reference to it.

1. `begin`: open the directory and take its lock, sweep what failed saves left (in a store there is no lock, and nothing
   is swept), choose the step, make the attempt's folder. Every rank then writes its files into it.
2. `commit`: publish the manifest that all parts make up. Then old checkpoints go, on a thread of their own, which keeps
   the directory and its lock until it has ended.
3. `close`, in any case: without a commit, the folder is removed.

DCP does not inform a writer of a save that failed on another rank. So an attempt that was not committed is closed with
the next save, with the writer, or when it is collected. The save lock of the process is held only while one of these
runs, never from one to the next.

A rank gets an AttemptRef in the plan that DCP scatters. A planner that caches its plans then returns the plan of an
earlier save, with the reference of that save. So what counts is the reference that this thread has received last: DCP
unpickles it in the thread that calls `write_data` afterwards.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from asyncckpt.commit.attempt import Draft, claims
from asyncckpt.commit.chain import newest_verified
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.process.background import background
from asyncckpt.engine.process.held_directory import commits_of, open_alone, start_retention
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.format.names import Attempt
from asyncckpt.model.store_url import Place
from asyncckpt.options import BusyPolicy, SaveOptions
from asyncckpt.signals import uninterrupted


@contextlib.contextmanager
def save_lock_held(kind: Literal["save", "load"], path: Place, step: int | None) -> Iterator[None]:
    """Hold the save lock of the process; waits for saves and loads in flight."""
    with save_lock.held(kind, path, step, busy=BusyPolicy("wait")):
        yield


class CoordinatedAttempt:
    """An attempt under way, with its open directory and lock; see above."""

    def __init__(self, path: Place, step: int | None, options: SaveOptions) -> None:
        """Begin. UsageError, ConflictError for a step that exists or a directory that another process writes to."""
        self._options = options
        with contextlib.ExitStack() as held:
            opened = open_alone(path, exact_modes=False)
            held.callback(opened.close)
            self.root = opened.root
            self._commits = commits_of(self.root, opened.lock, options.durability)
            with save_lock_held("save", self.root.path, step):
                self._claim = held.enter_context(claims.save(self.root, step))
                self.transaction = held.enter_context(Transaction.begin(self._commits, self._claim))
            self._held = held.pop_all()
        # Also when a writer is dropped in the middle of a save.
        self._finalizer = weakref.finalize(self, uninterrupted(self._held.close))

    @property
    def attempt(self) -> Attempt:
        return self.transaction.attempt

    def commit(self, draft: Draft) -> None:
        """Publish; returns when the checkpoint is durable. InDoubt when that is not known."""
        path, step = self.root.path, self.attempt.step
        with save_lock_held("save", path, step):
            background.run(lambda: self.transaction.commit(draft), "a DCP save")
        self._claim.release()
        root, commits, held = self.root, self._commits, self._held.pop_all()

        def protected() -> set[int]:
            return {*newest_verified(root, commits.heads), step}

        start_retention(commits, self._options.keep, protected=protected, held=held)

    def close(self) -> None:
        """Give the directory back; remove what an attempt without a commit left. Idempotent."""
        self._finalizer()


@dataclass(frozen=True)
class AttemptRef:
    """To which attempt a rank writes its files, as rank `rank` of `ranks_count`."""

    attempt: Attempt
    rank: int
    ranks_count: int

    def __reduce__(self) -> tuple[object, ...]:
        return receive_ref, (self.attempt, self.rank, self.ranks_count)


_received = threading.local()


def receive_ref(attempt: Attempt, rank: int, ranks_count: int) -> AttemptRef:
    """Make a reference and remember it as the newest of this thread."""
    _received.newest = ref = AttemptRef(attempt, rank, ranks_count)
    return ref


def take_newest_ref() -> AttemptRef | None:
    """Return the reference that this thread has received last, and forget it."""
    newest: AttemptRef | None = _received.__dict__.pop("newest", None)
    return newest
