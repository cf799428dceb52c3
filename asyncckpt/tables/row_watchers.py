"""Who is asked before rows of a table change: a save that copies them while training goes on."""

from __future__ import annotations

import weakref
from collections.abc import Collection

from asyncckpt.guard import Guard
from asyncckpt.model.table import RowWatcher
from asyncckpt.native import I64
from asyncckpt.system import register_at_fork


class RowWatchers:
    """The watchers of one table. They are added under the table's lock and dropped from any thread, without it.

    A forked child has none: it has neither the memory nor the threads of its parent's saves.
    """

    def __init__(self) -> None:
        self._guard = Guard()
        # Replaced and never modified, so that notifying needs no lock while a watcher blocks.
        self._all: tuple[RowWatcher, ...] = ()
        _of_all_tables.add(self)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, watcher: RowWatcher) -> None:
        with self._guard:
            self._all = (*self._all, watcher)

    def drop(self, watcher: RowWatcher) -> None:
        """Remove a watcher, if it is there."""
        with self._guard:
            self._all = tuple(other for other in self._all if other is not watcher)

    def rows_change(self, rows: I64, columns: Collection[str] | None = None) -> None:
        """See RowWatcher."""
        if rows.size:
            for watcher in self._all:
                watcher.rows_change(rows, columns)

    def storage_moves(self) -> None:
        for watcher in self._all:
            watcher.storage_moves()

    def forget(self) -> None:
        """Start anew in a forked child."""
        self._all = ()


_of_all_tables: weakref.WeakSet[RowWatchers] = weakref.WeakSet()


def _forget_in_child() -> None:
    for watchers in _of_all_tables:
        watchers.forget()


register_at_fork(after_in_child=_forget_in_child)
