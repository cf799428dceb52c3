"""The coordinator's side of a DCP save: it alone makes attempts and commits them.

1. `begin`: open the directory and take its lock, sweep what failed saves left, choose the step, make the attempt's
   folder. Every rank then writes its files into it.
2. `commit`: publish the manifest that all parts make up; then, without the save lock, let old checkpoints go.
3. `close`, in any case: without a commit, the folder is removed.

DCP tells a writer nothing of a save that failed on another rank. So an attempt that was not committed is closed with
the next save, with the writer, or when nobody holds it any more. The save lock of the process is held only while one of
these runs, never from one to the next.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from asyncckpt.commit.claims import claims
from asyncckpt.commit.proof import Draft
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.load.verify import newest_verified
from asyncckpt.engine.process.background import background
from asyncckpt.engine.process.gil_switch_interval import short_handovers
from asyncckpt.engine.process.held_directory import held_directory
from asyncckpt.engine.process.save_lock import Ticket, save_lock
from asyncckpt.format.names import Attempt
from asyncckpt.options import BUSY_DEADLINE_S, SaveOptions
from asyncckpt.storage.directory import Directory, io_failed


@contextlib.contextmanager
def save_lock_held(kind: Literal["save", "load"], path: Path, step: int | None) -> Iterator[None]:
    """Hold the save lock of the process; waits for saves and loads in flight."""
    ticket = Ticket(kind=kind, path=path, step=step, thread=threading.get_ident())
    save_lock.acquire(ticket, on_busy="wait", deadline_s=BUSY_DEADLINE_S)
    try:
        with short_handovers():  # The trainer may run beside this.
            yield
    finally:
        save_lock.release(ticket)


class CoordinatedAttempt:
    """An attempt under way, with its open directory and lock; see above."""

    def __init__(self, path: Path, step: int | None, options: SaveOptions) -> None:
        """Begin. UsageError, ConflictError for a step that exists or a directory that another process writes to."""
        self._options = options
        self._held = held = contextlib.ExitStack()
        # Also when a writer is dropped in the middle of a save.
        self._finalizer = weakref.finalize(self, held.close)
        try:
            self._begin(path, step)
        except BaseException:
            self.close()
            raise

    def _begin(self, path: Path, step: int | None) -> None:
        make_parents(path)
        held = self._held
        self.root = held.enter_context(CheckpointRoot.for_writing(path))
        self._commits = held.enter_context(held_directory(self.root, self._options.durability))
        with save_lock_held("save", self.root.path, step):
            claim = held.enter_context(claims.save(self.root, step))
            self.transaction = held.enter_context(Transaction.begin(self._commits, claim))

    @property
    def attempt(self) -> Attempt:
        return self.transaction.attempt

    @property
    def folder(self) -> Directory:
        return self.transaction.folder

    def commit(self, draft: Draft) -> None:
        """Publish; returns when the checkpoint is durable. InDoubt when that is not known."""
        path, step = self.root.path, self.attempt.step
        with save_lock_held("save", path, step):
            background.run(lambda: self.transaction.commit(draft), "a DCP save")
        self._commits.retain(self._options.keep_latest, protected=lambda: {*newest_verified(self.root), step})

    def close(self) -> None:
        """Give the directory back; remove what an attempt without a commit left. Idempotent."""
        self._finalizer()


def make_parents(path: Path) -> None:
    """Make the folders above a checkpoint directory, durably: DCP's own writer makes them, and callers rely on it."""
    missing = []
    for folder in path.parents:
        if folder.exists():
            break
        missing.append(folder)
    for folder in reversed(missing):
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
        except OSError as error:
            raise io_failed(f"folder {str(folder)!r} cannot be made", error) from error
        with Directory.open(folder.parent) as parent:
            parent.sync()
