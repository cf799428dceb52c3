"""Tables with a lock: the one lock of a table, and what every table of this package has besides.

Lookup, insert, removal and growth hold it briefly, a cut from begin to fence, a load from begin to end. A wait of more
than TABLE_WAIT_S_MAX raises a DeadlineError that names the holder: a cut without a fence or a load without an end is a
bug, and a bug must not become a hang.

In a forked child, a table that a thread of the parent held is free if that only read it, for a save for example. What
another thread was changing is not whole there: every use of it is refused.
"""

from __future__ import annotations

import threading
import weakref
from types import FunctionType

from asyncckpt.errors import DeadlineError, UsageError
from asyncckpt.model.table import TableSchema
from asyncckpt.model.table_shard import Shard
from asyncckpt.signals import uninterrupted, wait_in_steps
from asyncckpt.system import register_at_fork
from asyncckpt.tables.uncompiled import uncompiled

TABLE_WAIT_S_MAX = 600.0
_USES_THAT_READ = ("cut", "listing", "reading")
_locks: weakref.WeakSet[TableLock] = weakref.WeakSet()


class TableLock:
    """A lock that any thread may release, as a fence does. Not re-entrant."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._holder = ""
        self._thread: int | None = None  # That has taken it; another one may release it.
        self._torn_by = ""  # What another thread did with the table when this process was forked.
        _locks.add(self)

    def acquire(self, use: str) -> None:
        """Wait for the table; `use` names what holds it from now on.

        DeadlineError; UsageError on the thread that holds it: who would let it go then?
        """
        if self._torn_by:
            raise UsageError(
                f"{use} of table {self._table!r}, which another thread changed at the fork of this process",
                found=self._torn_by,
                hint="fork while no thread changes the table, or make a new one here",
            )
        if self._thread == threading.get_ident():
            raise UsageError(
                f"{use} of table {self._table!r} waits for {self._holder or 'another use'} of it on the same thread",
                hint="what a cut or load of the table calls, or a destructor, cannot use it meanwhile",
            )
        is_free = self._lock.acquire(blocking=False)
        if not is_free and not wait_in_steps(lambda seconds: self._lock.acquire(timeout=seconds), TABLE_WAIT_S_MAX):
            holder = self._holder
            what = f"{use} of table {self._table!r} waited {TABLE_WAIT_S_MAX} s for {holder or 'another use'} of it"
            raise DeadlineError(what, hint="a cut holds its table until fence(), a load until end()")
        self._holder, self._thread = use, threading.get_ident()

    def release(self) -> None:
        """Release the lock, from any thread."""
        self._holder, self._thread = "", None
        self._lock.release()

    def hand_over(self) -> None:
        """If this thread holds it, leave the release to another one, for which this one may wait then."""
        if self._thread == threading.get_ident():
            self._thread = None

    def renew_in_child(self) -> None:
        """Take it from a thread that is not there."""
        if self._lock.locked() and self._thread != threading.get_ident():
            self._torn_by = "" if self._holder in _USES_THAT_READ else self._holder
            self._holder, self._thread, self._lock = "", None, threading.Lock()

    def hold(self, use: str) -> _Hold:
        """Hold the table for a block of code, which no signal handler interrupts."""
        return _Hold(self, use)

    def hold_for_result(self, use: str) -> _Hold:
        """Acquire the lock for what such a block returns, which releases it later; release it if the block fails."""
        return _Hold(self, use, goes_on=True)


class _Hold:
    def __init__(self, lock: TableLock, use: str, *, goes_on: bool = False) -> None:
        self._lock = lock
        self._use = use
        self._goes_on = goes_on

    def __enter__(self) -> None:
        uninterrupted.__enter__()
        try:
            self._lock.acquire(self._use)
        except BaseException:
            uninterrupted.__exit__()
            raise

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        goes_on = self._goes_on and failed is None
        if not goes_on:
            self._lock.release()
        try:
            uninterrupted.__exit__()
        except BaseException:
            if goes_on:
                self._lock.release()
            raise


class LockedTable:
    """A table with a name, a shard, a schema and a lock: what tables of all kinds have. Arguments have been checked."""

    def __init_subclass__(cls) -> None:
        for name, value in list(vars(cls).items()):
            if isinstance(value, FunctionType) and not name.startswith("_"):
                setattr(cls, name, uncompiled(value))

    def __init__(self, name: str, schema: TableSchema, *, shard: Shard, replicated: bool = False) -> None:
        self._name = name
        self._schema = schema
        self._shard = shard
        self._replicated = replicated
        self._lock = TableLock(name)

    @property
    def name(self) -> str:
        return self._name

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def replicated(self) -> bool:
        """Whether every rank that has the table has all of its ids, and the same rows."""
        return self._replicated

    def schema(self) -> TableSchema:
        """Return the columns in their order: id, embedding, optimizer slots, metadata."""
        return self._schema


def _renew_in_child() -> None:
    for lock in _locks:
        lock.renew_in_child()


register_at_fork(after_in_child=_renew_in_child)
