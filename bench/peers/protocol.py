"""What the harness asks of every peer, and the one rule of durability that holds for all.

1. `prepare()` does ahead of time whatever the peer offers for that (allocate and touch buffers); it is timed apart.
2. `save_async(step)` is the call that the training thread makes; its time is the stall. A blocking peer does all here.
3. `handle.wait_durable()` runs in a thread of the harness. It returns when every byte *and* every directory entry of
   the checkpoint is on the disk; a peer that does not fsync gets its fsync there (`sync_tree`).
4. `load(step, target)` fills the preallocated state `target` in place.

A peer that writes to an object store takes `store_url` of its directory, and credentials from the environment. There a
checkpoint is durable when all its objects are answered for.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from bench.state import State

DURABLE_SECONDS_MAX = 600.0
BUCKET = "bench"


class Handle(Protocol):
    """A save on its way."""

    def wait_durable(self) -> None: ...


class Peer(Protocol):
    """One way to checkpoint."""

    def prepare(self) -> None: ...
    def save_async(self, step: int) -> Handle: ...
    def load(self, step: int, target: State) -> None: ...
    def close(self) -> None: ...


class PeerFactory(Protocol):
    """A peer's class. `hashtables` says that its states hold the tables as asyncckpt.HashTable."""

    hashtables: bool

    def __call__(self, state: State, directory: Path) -> Peer: ...


class FutureHandle:
    """A save that is durable when its future has ended."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def wait_durable(self) -> None:
        self._future.result(DURABLE_SECONDS_MAX)


class TreeHandle:
    """A save that ends with `future` (None: it has ended) and becomes durable when its files and folders are synced."""

    def __init__(self, path: Path, future: Future[Any] | None = None, *, sync_files: bool) -> None:
        self._path, self._future, self._sync_files = path, future, sync_files

    def wait_durable(self) -> None:
        if self._future is not None:
            self._future.result(DURABLE_SECONDS_MAX)
        sync_tree(self._path, files=self._sync_files)


def sync_tree(path: Path, *, files: bool) -> None:
    """Fsync the folders from `path` down and the folder above it, and the files below `path` too if `files`."""
    for folder, _, names in os.walk(path):
        for name in names if files else ():
            _sync(Path(folder, name))
        _sync(Path(folder))
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def store_url(directory: Path) -> str:
    """Return where in the store a peer writes; its directory has a name of its own."""
    return f"s3://{BUCKET}/{directory.name}"
