"""A checkpoint directory that this process writes to: its LOCK, and what its commits have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Commits
from asyncckpt.engine.process.background import committer
from asyncckpt.engine.process.log import log_warning
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.options import Durability
from asyncckpt.storage.owner_lock import OwnerLock


def commits_of(root: CheckpointRoot, lock: OwnerLock | None, durability: Durability) -> Commits:
    return Commits(root, lock, durable=durability == "fsync", threads=committer, warn=log_warning)


@contextmanager
def held_directory(root: CheckpointRoot, durability: Durability) -> Iterator[Commits]:
    """Hold the LOCK; ConflictError when another process does."""
    lock = OwnerLock.acquire(root.root, LOCK_NAME)
    try:
        yield commits_of(root, lock, durability)
    finally:
        lock.release()
