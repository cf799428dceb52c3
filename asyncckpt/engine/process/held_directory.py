"""A checkpoint directory that this process writes to: its LOCK, and what its commits have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncckpt.commit.discover import being_removed
from asyncckpt.commit.root import CheckpointRoot, WriteRoot
from asyncckpt.commit.transaction import Commits, Uploader
from asyncckpt.engine.process.background import committer, retainer
from asyncckpt.engine.process.log import log_warning
from asyncckpt.errors import CheckpointError
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.options import Durability, KeepPolicy
from asyncckpt.storage.owner_lock import OwnerLock

if TYPE_CHECKING:
    from asyncckpt.commit.store_root import StoreRoot


def commits_of(
    root: WriteRoot,
    lock: OwnerLock | None,
    durability: Durability,
    uploader: Uploader | None = None,
    *,
    remembers: bool = True,
) -> Commits:
    return Commits(
        root,
        lock,
        durable=durability == "fsync",
        threads=committer,
        warn=log_warning,
        uploader=uploader,
        remembers=remembers,
    )


@dataclass(frozen=True)
class Opened:
    """An open directory. lock: the process's own; a store has none."""

    root: WriteRoot
    lock: OwnerLock | None = None

    def close(self) -> None:
        """Let other processes have the directory."""
        if self.lock is not None:
            if isinstance(self.root, CheckpointRoot) and self.root.marks_left:
                from asyncckpt.commit.removal import remove_marks  # Usually there are none.

                with suppress(CheckpointError):  # Who has the directory next removes them.
                    remove_marks(self.root)
            self.lock.release()
        self.root.close()


def open_alone(path: Place, *, exact_modes: bool = False) -> Opened:
    """Open and lock it, for one rank or for all."""
    if isinstance(path, StoreUrl):
        return Opened(root=open_store(path))
    root = CheckpointRoot.for_writing(path, exact_modes=exact_modes)
    try:
        return Opened(root=root, lock=lock_directory(root))
    except BaseException:
        root.close()
        raise


def open_store(url: StoreUrl, *, joins: bool = False) -> StoreRoot:
    """Open a directory in a store, and complete what a crash has left half removed, unless it joins rank 0."""
    from asyncckpt.commit import store_root  # Who has a disk loads nothing of stores.
    from asyncckpt.commit.store_removal import complete_decided
    from asyncckpt.storage.object_store import ObjectStore

    store = ObjectStore(url, store_root.STORE_LIMITS)
    if joins:
        return store_root.StoreRoot.for_joining(store)
    root = store_root.StoreRoot.for_writing(store)
    try:
        complete_decided(root)
    except CheckpointError as error:
        log_warning("leftovers in %s were kept: %s", root.path, error)
    return root


def lock_directory(root: CheckpointRoot) -> OwnerLock:
    """Take the LOCK, and remove marks that crashed removals have left. ConflictError when another process has it."""
    lock = OwnerLock.acquire(root.root, LOCK_NAME)
    try:
        if being_removed(root):
            from asyncckpt.commit.removal import forget_marks  # Usually there are no marks.

            forget_marks(root)
    except CheckpointError as error:
        log_warning("leftovers in %s were kept: %s", root.path, error)
    except BaseException:
        lock.release()
        raise
    return lock


@contextmanager
def held_directory(root: WriteRoot, durability: Durability) -> Iterator[Commits]:
    """Hold the LOCK; ConflictError when another process does. A store has none: check that it can be written to."""
    if not isinstance(root, CheckpointRoot):
        from asyncckpt.commit.store_root import check_store  # Who has a disk does not load it.

        check_store(root.store)
        yield commits_of(root, None, durability)
        return
    lock = lock_directory(root)
    try:
        yield commits_of(root, lock, durability)
    finally:
        lock.release()


def start_retention(
    commits: Commits,
    policy: KeepPolicy | None,
    *,
    protected: Callable[[], Collection[int]],
    held: AbstractContextManager[object],
) -> Future[None] | None:
    """Let all checkpoints go that are not kept, on a thread of its own: it delays no save. Never raises.

    policy: None keeps all. held: what retention needs; it is given back when that has ended, however it ends.
    """

    def retain(policy: KeepPolicy) -> None:
        with held:
            commits.retain(policy, protected=protected)

    if policy is not None:
        try:
            return retainer.submit(retain, policy)
        except Exception as error:  # No thread can be started.
            log_warning("old checkpoints in %s were kept: %s", commits.root.path, error)
    with held:
        return None
