"""Tables with a lock: the one lock of a table, and what every table of this package has besides.

Lookup, insert, removal and growth hold it briefly, a cut from begin to fence, a load from begin to end. A wait of more
than TABLE_WAIT_S_MAX raises a DeadlineError that names the holder: a cut without a fence or a load without an end is a
bug, and a bug must not become a hang.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from asyncckpt.errors import DeadlineError
from asyncckpt.model.table import TableSchema

TABLE_WAIT_S_MAX = 600.0


class TableLock:
    """A lock that any thread may release, as a fence does. Not re-entrant."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._holder = ""

    def acquire(self, use: str) -> None:
        """Wait for the table; `use` names what holds it from now on. Raises DeadlineError."""
        if not self._lock.acquire(timeout=TABLE_WAIT_S_MAX):
            holder = self._holder
            what = f"{use} of table {self._table!r} waited {TABLE_WAIT_S_MAX} s for {holder or 'another use'} of it"
            raise DeadlineError(what, hint="a cut holds its table until fence(), a load until end()")
        self._holder = use

    def release(self) -> None:
        """Release the lock, from any thread."""
        self._holder = ""
        self._lock.release()

    @contextmanager
    def hold(self, use: str) -> Iterator[None]:
        """Hold the table for a block of code."""
        self.acquire(use)
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def hold_for_result(self, use: str) -> Iterator[None]:
        """Acquire the lock for what a block of code returns, which releases it later; release it if the block fails."""
        self.acquire(use)
        try:
            yield
        except BaseException:
            self.release()
            raise


class LockedTable:
    """A table with a name, a shard, a schema and a lock: what tables of all kinds have. Arguments have been checked."""

    def __init__(self, name: str, schema: TableSchema, *, shard: tuple[int, int]) -> None:
        self._name = name
        self._schema = schema
        self._shard = shard
        self._lock = TableLock(name)

    @property
    def name(self) -> str:
        return self._name

    @property
    def shard(self) -> tuple[int, int]:
        return self._shard

    def schema(self) -> TableSchema:
        """Return the columns in their order: id, embedding, optimizer slots, metadata."""
        return self._schema
