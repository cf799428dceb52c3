"""The lock of a table, what every table of this package has besides, and who holds it for long: a cut, or a load.

Lookup, insert, removal and growth hold it briefly, a cut from begin to fence, a load from begin to end. A wait of more
than TABLE_WAIT_S_MAX raises a DeadlineError that names the holder: a cut without a fence or a load without an end is a
bug, and a bug must not become a hang.

    from   to     done by                the table
    free   cut    HashTable.begin_cut    does not change; columns may be read
    cut    free   fence, or end          may change again
    free   load   HashTable.begin_load   is used only by the load
    load   free   end                    is filled on end(True), empty on end(False)

In a forked child, a table that a thread of the parent held is free if that only read it, for a save for example. What
another thread was changing is not whole there: every use of it is refused.

torch.compile shall run tables as they are: it takes NumPy for its own, and knows neither locks nor the native core.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch

from asyncckpt.errors import DeadlineError, UsageError, nearest
from asyncckpt.model.table import ID_COLUMN, CutVersion, RowWatcher, TableSchema
from asyncckpt.model.table_shard import Shard
from asyncckpt.native import I64
from asyncckpt.signals import uninterrupted, wait_in_steps
from asyncckpt.system import register_at_fork
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.table_arguments import check_owned, flat_ids
from asyncckpt.tables.touched_rows import TracksMarks

P = ParamSpec("P")
T = TypeVar("T")
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


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Keep torch.compile out of a function. Unlike torch's own decorator, this loads no compiler by itself."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call, no-any-return]
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=function.__name__)  # The compiler counts what it does by code objects.
    return functools.wraps(function)(run)


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


# -- cuts and loads ----------------------------------------------------------------------------------------------------


class HeldTable:
    """A cut or a load of any table: it holds the table's lock, which its caller has acquired, until it is released.

    columns: the live storage without `id`; ids: returns the column `id`. Both are dropped at the release, which may be
    on any thread.
    """

    use, released_by = "cut", "fence"

    def __init__(
        self, table: str, lock: TableLock, *, columns: Mapping[str, torch.Tensor], ids: Callable[[], torch.Tensor]
    ) -> None:
        self._table = table
        self._lock = lock
        self._columns = columns
        self._ids = ids
        self._held = [table]  # Emptied by whoever releases it first, on any thread.

    def column(self, name: str) -> torch.Tensor:
        """Return the live storage of a column; in a load, fetch it again after an insert. Raises UsageError."""
        if not self._held:
            self._check_held(f"column {name!r}")
        return self._ids() if name == ID_COLUMN else self._one_of(self._columns, name)

    def hand_over(self) -> None:
        """See HandsOver."""
        self._lock.hand_over()

    def _one_of(self, columns: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        if name not in columns:
            known = [ID_COLUMN, *columns]
            raise UsageError(f"table {self._table!r} has no column {name!r}", expected=known, hint=nearest(name, known))
        return columns[name]

    @uninterrupted
    def _release(self, last: Callable[[], object] | None = None) -> None:
        """Call `last` and release the table, the first time; later calls do nothing."""
        try:
            self._held.pop()
        except IndexError:
            return
        try:
            if last is not None:
                last()
        finally:
            del self._columns, self._ids
            self._lock.release()

    def _check_held(self, what: str) -> None:
        if not self._held:
            where = f"{what} of a {self.use} of table {self._table!r}"
            raise UsageError(f"{where} was asked for after its {self.released_by}")


class HashTableCut(HeldTable, TracksMarks):
    """A TableCut of a HashTable, which knows touched rows, and a WatchedCut.

    Its column `id` is a view of the id map on the CPU. `rows_count`, `runs` (ascending ranges `[begin, end)`, int64
    [k, 2]) and `version` stay valid after the fence.
    """

    def __init__(self, table: str, *, store: RowStore, lock: TableLock, on_lost: Callable[[], object]) -> None:
        super().__init__(table, lock, columns=store.columns(), ids=lambda: torch.from_numpy(store.ids_by_row()))
        self._store = store
        self.rows_count = len(store)
        self.runs = store.runs()
        self._on_lost: Callable[[], object] | None = on_lost
        self._is_lost = False
        self.start_tracking(store.marks)

    def touched_since(self, version: CutVersion) -> I64 | None:
        """Return what TracksMarks does; None too if other code has written columns since that cut."""
        rows = super().touched_since(version)
        self._is_lost |= rows is None and self._store.marks.lost_by_others(version)
        return rows

    def watch(self, watcher: RowWatcher) -> None:
        """See WatchedCut."""
        self._check_held("a watch")
        self._store.watchers.add(watcher)

    def unwatch(self, watcher: RowWatcher) -> None:
        """See WatchedCut."""
        self._store.watchers.drop(watcher)

    def writes_by_others(self, names: Sequence[str]) -> list[int]:
        """See WatchedCut."""
        return [self._store.writes_by_others(name) for name in names]

    def fence(self) -> None:
        """Let the table change again. Idempotent.

        Calls `on_lost` then if somebody needed touched rows that are not known because of other code.
        """
        self._release()
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None and self._is_lost:
            on_lost()

    def end(self, ok: bool) -> None:
        """Note that the save has committed or failed, and make up for a fence that was never called."""
        self.fence()


class HashTableLoad(HeldTable):
    """A TableLoad of a HashTable. It writes to any column, so earlier cuts cannot be asked about after it."""

    use, released_by = "load", "end"

    def __init__(self, table: str, *, store: RowStore, lock: TableLock, shard: Shard, filled: Collection[str]) -> None:
        super().__init__(table, lock, columns=store.columns(), ids=lambda: torch.from_numpy(store.ids_by_row()))
        self._store = store
        self._shard = shard
        self._filled = frozenset(filled)
        self.then: Callable[[], object] | None = None  # What follows the end, without the lock.
        store.marks.lose_all()

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        """Give every id (int64 [n]) a row and return the rows (int64 [n], CPU).

        In columns that the load does not fill, because the checkpoint lacks them, new rows get initial values. Raises
        UsageError for an id of another shard.
        """
        self._check_held("insert")
        flat = flat_ids(ids, table=self._table)
        check_owned(flat, shard=self._shard, table=self._table)
        if not self._store.place.is_host:
            self._store.place.follow()  # Ids are inserted on another thread than the one that began the load.
        return torch.from_numpy(self._store.insert(flat, filled=self._filled))

    def first_row(self) -> int | None:
        """Return the first row if the next distinct ids get consecutive rows, else None."""
        self._check_held("rows")
        return self._store.first_row()

    def end(self, ok: bool) -> None:
        """Release the table, filled if ok, else empty. Idempotent."""
        self._release(self._end_filled if ok else self._end_empty)
        then, self.then = self.then, None
        if then is not None:
            then()

    def _end_filled(self) -> None:
        self._store.written_by_others()  # By this load, of which the marks know.

    def _end_empty(self) -> None:
        self._store.clear()
        self._end_filled()
