"""Saves that fail at a chosen operation of the storage, and saves that are held at one.

Only operations that change a directory count, in the order in which a save makes them: a folder, its files, the syncs,
the publication. The operations below these are disturbed in tests/faults, where the shim reaches them.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from asyncckpt.errors import IOFailedError
from tests.worlds.storage_calls import before_each

OPERATIONS = ("make_folder", "create_file", "sync", "publish")
HELD_SECONDS_MAX = 60.0


class Storage:
    """Counts operations from 0; `failed` is the name of the one that failed, None when it was not reached."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.failed: str | None = None


@contextmanager
def watched(before: Callable[[Storage, str], None]) -> Iterator[Storage]:
    """Call `before` with the name of every operation, before it is made."""
    storage = Storage()

    def hook(name: str) -> None:
        before(storage, name)
        storage.operations.append(name)

    with before_each(hook, OPERATIONS):
        yield storage


def counted() -> Any:
    """Let everything pass; the operations are there afterwards."""
    return watched(lambda storage, name: None)


def failing(at: int) -> Any:
    """Operation `at` and all later ones of its kind fail."""

    def fail(storage: Storage, name: str) -> None:
        if len(storage.operations) == at and storage.failed is None:
            storage.failed = name
        if storage.failed == name:
            raise IOFailedError(f"{name} failed: no space left on device", errno=errno.ENOSPC)

    return watched(fail)


class Hold:
    """Lets the first operation of a save wait until `let_go`."""

    def __init__(self) -> None:
        self._free = threading.Event()

    def __call__(self, storage: Storage, name: str) -> None:
        if not self._free.wait(HELD_SECONDS_MAX):  # No assert: these are left out by python -O.
            raise AssertionError("it was waited for in vain")

    def let_go(self) -> None:
        self._free.set()
