"""The coordinator's side of a DCP save: it alone makes attempts and commits them.

1. `begin`: open the directory and take its lock, sweep what failed saves left, choose the step, make the attempt's
   folder. Every rank then writes its files into it.
2. `commit`: publish the manifest that all parts make up; let old checkpoints go.
3. `close`, in any case: without a commit, the folder is removed.

DCP tells a writer nothing of a save that failed on another rank. So an attempt that was not committed is closed with
the next save, with the writer, or when nobody holds it any more. The save lock of the process is held only while one of
these runs, never from one to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from asyncckpt.commit.discover import committed_steps, is_committed, read_head
from asyncckpt.commit.publish import abandon_attempt, begin_attempt, publish
from asyncckpt.commit.retention import KnownHeads, keep_latest, sweep
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.background import workers, writers
from asyncckpt.engine.handover import short_handovers
from asyncckpt.engine.lock import Ticket, save_lock
from asyncckpt.engine.messages import log_warning
from asyncckpt.engine.running_compactions import running_compactions
from asyncckpt.engine.verify import newest_verified
from asyncckpt.errors import CheckpointError, ConflictError, IndeterminateError
from asyncckpt.format.limits import check_step
from asyncckpt.format.manifest import ManifestHead
from asyncckpt.format.names import LOCK_NAME, Attempt
from asyncckpt.options import BUSY_DEADLINE_S, SaveOptions
from asyncckpt.storage.directory import Directory, io_failed
from asyncckpt.storage.owner_lock import OwnerLock

# Attempts of this process that are under way: (device, inode, step).
_running: set[tuple[int, int, int]] = set()
_guard = threading.Lock()


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


class InDoubt(IndeterminateError):
    """An IndeterminateError that DCP can send to other ranks: what resolves it is where to look, not a closure."""

    def __init__(self, what: str, path: str, step: int, attempt: str) -> None:
        super().__init__(what, resolve=self._look, hint="call resolve() on this error; older checkpoints are kept")
        self._where = (what, path, step, attempt)

    def __reduce__(self) -> tuple[object, ...]:
        return InDoubt, self._where

    def _look(self) -> bool:
        _, path, step, attempt = self._where
        with CheckpointRoot.for_reading(Path(path)) as root:
            if not is_committed(root, step) or read_head(root, step).attempt != attempt:
                return False
            root.manifests.sync()
            return True


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
        lock = OwnerLock.acquire(self.root.root, LOCK_NAME)
        held.callback(lock.release)
        with save_lock_held("save", self.root.path, step):
            self.attempt = Attempt.new(self._enter_step(step))
            held.enter_context(running_compactions.enter(self.root, self.attempt))
            self._heads = KnownHeads(self.root)
            with contextlib.suppress(CheckpointError):  # What cannot be swept is in nobody's way.
                sweep(self.root, self._heads, keep_attempts=running_compactions.beside(self.attempt))
            self._abandon = contextlib.ExitStack()
            held.push(self._abandon)
            self.folder: Directory = held.enter_context(begin_attempt(self.root, self.attempt))
            self._abandon.callback(abandon_attempt, self.root, self.attempt)

    def _enter_step(self, step: int | None) -> int:
        status = os.fstat(self.root.root.fd)
        place = (status.st_dev, status.st_ino)
        with _guard:
            others = [other[2] for other in _running if other[:2] == place]
            if step is None:
                step = max([-1, *others, *committed_steps(self.root)[-1:]]) + 1
            check_step(step, or_none=False)
            if step in others or is_committed(self.root, step):
                raise ConflictError(
                    f"step {step} exists already in {str(self.root.path)!r}",
                    hint="steps are never overwritten: save another step, or remove that checkpoint first",
                )
            _running.add((*place, step))
        self._held.callback(_running.discard, (*place, step))
        return step

    def commit(self, head: ManifestHead, raw: bytes | bytearray) -> None:
        """Publish; returns when the checkpoint is durable. InDoubt when that is not known."""
        step, path = self.attempt.step, self.root.path
        durable = self._options.durability == "fsync"
        with save_lock_held("save", path, step):
            work = publish(self.root, self.folder, self.attempt, raw, durable=durable, threads=writers)
            try:
                # On a thread of its own: the caller's may run an event loop.
                workers.submit(asyncio.run, work).result()
            except IndeterminateError as error:
                self._abandon.pop_all()  # The manifest may be there: its data must stay.
                raise InDoubt(error.what, str(path), step, self.attempt.id) from error
            self._abandon.pop_all()
            self._heads.add(head)
            self._retain()

    def _retain(self) -> None:
        count = self._options.keep_latest
        if count is None:
            return
        protected = {*newest_verified(self.root), self.attempt.step}
        try:
            keep_latest(self.root, self._heads, count=count, protected=protected)
        except Exception as error:  # Whatever it is, the new checkpoint is committed.
            log_warning("old checkpoints in %s were kept: %s", self.root.path, error)

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


def created_now() -> str:
    """The time as a manifest tells it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
