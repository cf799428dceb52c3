"""A hash table frozen for a save, and a hash table being filled by a load.

    from   to     done by                the table
    free   cut    HashTable.begin_cut    does not change; columns may be read
    cut    free   fence, or end          may change again
    free   load   HashTable.begin_load   is used only by the load
    load   free   end                    is filled on end(True), empty on end(False)

The table's lock is held in the states cut and load.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import CutVersion
from asyncckpt.native import I64
from asyncckpt.tables.ids import check_owned, flat_ids
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.table_lock import FirstCaller, TableLock


class HashTableCut:
    """A TableCut and TracksRows of a HashTable. The caller holds the lock, which `fence` releases from any thread.

    It ends an epoch of the table's marks, whether the save succeeds or not. `rows_count`, `runs` (ascending ranges
    `[begin, end)`, int64 [k, 2]) and `version` stay valid after the fence.
    """

    def __init__(self, table: str, *, store: RowStore, lock: TableLock) -> None:
        self._table = table
        self._store = store
        self._lock = lock
        self._fenced = FirstCaller()
        self.rows_count = len(store)
        self.runs = store.runs()
        self.version: CutVersion = store.marks.end_epoch()

    def touched_since(self, version: CutVersion) -> I64 | None:
        """Return the rows of `runs` written since a cut, ascending int64 [n]; None if unknown.

        Costs one pass over the marks, a byte per row. Raises UsageError.
        """
        self._check_held("touched rows")
        return self._store.marks.touched_since(version)

    def removed_since(self, version: CutVersion) -> I64 | None:
        """Return the distinct ids removed since a cut, ascending int64 [n], even if inserted again; None if unknown.

        Raises UsageError.
        """
        self._check_held("removed ids")
        return self._store.marks.removed_since(version)

    def begun_since(self, version: CutVersion) -> I64 | None:
        """Return the rows assigned to an id since a cut, ascending int64 [n]; None if unknown. Raises UsageError."""
        self._check_held("begun rows")
        return self._store.marks.begun_since(version)

    def column(self, name: str) -> torch.Tensor:
        """Return the live storage of a column; `id` is a view of the id map on the CPU. Raises UsageError."""
        self._check_held(f"column {name!r}")
        return self._store.column(name)

    def fence(self) -> None:
        """Let the table change again. Idempotent."""
        if self._fenced.first():
            self._lock.release()

    def end(self, ok: bool) -> None:
        """Note that the save has committed or failed, and make up for a fence that was never called."""
        self.fence()

    def _check_held(self, use: str) -> None:
        if self._fenced.done:
            raise UsageError(f"{use} of a cut of table {self._table!r} was asked for after its fence")


class HashTableLoad:
    """A TableLoad of a HashTable. The caller holds the lock, which `end` releases from any thread.

    It writes to any column, so earlier cuts cannot be asked about after it.
    """

    def __init__(
        self, table: str, *, store: RowStore, lock: TableLock, shard: tuple[int, int], filled: Collection[str]
    ) -> None:
        self._table = table
        self._store = store
        self._lock = lock
        self._shard = shard
        self._filled = frozenset(filled)
        self._ended = FirstCaller()
        store.marks.lose_all()

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        """Give every id (int64 [n]) a row and return the rows (int64 [n], CPU).

        In columns that the load does not fill, because the checkpoint lacks them, new rows get initial values. Raises
        UsageError for an id of another shard.
        """
        self._check_open("insert")
        flat = flat_ids(ids, table=self._table)
        check_owned(flat, shard=self._shard, table=self._table)
        return torch.from_numpy(self._store.insert(flat, filled=self._filled))

    def first_row(self) -> int | None:
        """Return the first row if the next distinct ids get consecutive rows, else None."""
        self._check_open("rows")
        return self._store.first_row()

    def column(self, name: str) -> torch.Tensor:
        """Return the live storage of a column; fetch it again after an insert. Raises UsageError."""
        self._check_open(f"column {name!r}")
        return self._store.column(name)

    def end(self, ok: bool) -> None:
        """Release the table, filled if ok, else empty. Idempotent."""
        if not self._ended.first():
            return
        try:
            if not ok:
                self._store.clear()
        finally:
            self._lock.release()

    def _check_open(self, use: str) -> None:
        if self._ended.done:
            raise UsageError(f"{use} of a load of table {self._table!r} was asked for after its end")
