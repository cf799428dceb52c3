"""Who has to know of a change of a table's rows before it happens: cuts that are still open behind their fence."""

from __future__ import annotations

import threading
from typing import Protocol

from asyncckpt.native import I64


class RowWatcher(Protocol):
    """Called on the thread that is about to change something, which holds the table's lock; may make it wait."""

    def rows_change(self, rows: I64) -> None:
        """Rows, int64 [n], distinct, are about to change in some column; `id` is one of them."""
        ...

    def storage_moves(self) -> None:
        """Every column is about to move to other memory, or to change as a whole."""
        ...


class RowWatchers:
    """The watchers of one table. They are added under the table's lock and dropped from any thread, without it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        # Replaced and never changed, so that who tells them needs no lock while a watcher makes it wait.
        self._all: tuple[RowWatcher, ...] = ()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, watcher: RowWatcher) -> None:
        with self._guard:
            self._all = (*self._all, watcher)

    def drop(self, watcher: RowWatcher) -> None:
        """Forget a watcher; one that is not there is passed over."""
        with self._guard:
            self._all = tuple(other for other in self._all if other is not watcher)

    def rows_change(self, rows: I64) -> None:
        """Tell all of them; see RowWatcher."""
        if rows.size:
            for watcher in self._all:
                watcher.rows_change(rows)

    def storage_moves(self) -> None:
        """Tell all of them; see RowWatcher."""
        for watcher in self._all:
            watcher.storage_moves()
