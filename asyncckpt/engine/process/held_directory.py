"""A checkpoint directory that this process writes to: its LOCK, and what its commits have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from asyncckpt.commit.removal import complete_decided
from asyncckpt.commit.root import CheckpointRoot, StoreRoot, WriteRoot, check_store
from asyncckpt.commit.transaction import Commits, Uploader
from asyncckpt.engine.process.background import committer, retainer
from asyncckpt.engine.process.log import log_warning
from asyncckpt.errors import CheckpointError
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.options import Durability, KeepPolicy
from asyncckpt.storage.owner_lock import OwnerLock


def commits_of(
    root: WriteRoot, lock: OwnerLock | None, durability: Durability, uploader: Uploader | None = None
) -> Commits:
    durable = durability == "fsync"
    return Commits(root, lock, durable=durable, threads=committer, warn=log_warning, uploader=uploader)


@dataclass(frozen=True)
class Opened:
    """An open directory. lock: of the process that holds it; a store has none."""

    root: WriteRoot
    lock: OwnerLock | None = None

    def close(self) -> None:
        """Let other processes have the directory."""
        if self.lock is not None:
            self.lock.release()
        self.root.close()


def open_alone(path: Place, *, exact_modes: bool = False) -> Opened:
    """Open and lock it, for one rank or for all; complete what a crash has left half removed."""
    if isinstance(path, StoreUrl):
        from asyncckpt.storage.object_store import ObjectStore, StoreLimits  # Which a disk does not need.

        store = StoreRoot.for_writing(ObjectStore(path, StoreLimits()))
        _complete(store)
        return Opened(root=store)
    root = CheckpointRoot.for_writing(path, exact_modes=exact_modes)
    opened = Opened(root=root)
    try:
        opened = Opened(root=root, lock=OwnerLock.acquire(root.root, LOCK_NAME))
        _complete(root)
        return opened
    except BaseException:
        opened.close()
        raise


def _complete(root: WriteRoot) -> None:
    try:
        complete_decided(root)
    except CheckpointError as error:
        log_warning("leftovers in %s were kept: %s", root.path, error)


@contextmanager
def held_directory(root: WriteRoot, durability: Durability) -> Iterator[Commits]:
    """Hold the LOCK; ConflictError when another process does. A store has none: check that it can be written to."""
    if isinstance(root, StoreRoot):
        check_store(root.store)
        yield commits_of(root, None, durability)
        return
    lock = OwnerLock.acquire(root.root, LOCK_NAME)
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
