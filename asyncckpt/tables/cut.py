"""A table frozen for a save, and a table being filled by a load: HeldTable for any, the others for a hash table.

    from   to     done by                the table
    free   cut    HashTable.begin_cut    does not change; columns may be read
    cut    free   fence, or end          may change again
    free   load   HashTable.begin_load   is used only by the load
    load   free   end                    is filled on end(True), empty on end(False)

The table's lock is held in the states cut and load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import ID_COLUMN, CutVersion, RowWatcher
from asyncckpt.model.table_shard import Shard
from asyncckpt.native import I64
from asyncckpt.signals import uninterrupted
from asyncckpt.tables.ids import check_owned, flat_ids
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.table_lock import TableLock
from asyncckpt.tables.touched_rows import TracksMarks


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
            what = f"table {self._table!r} has no such column"
            raise UsageError(what, found=name, expected=[ID_COLUMN, *columns])
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
