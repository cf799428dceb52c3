"""A table beside a dict that does the same, and says what the table must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from asyncckpt.errors import UsageError
from tests.worlds.rows import batch

SEEN = 3  # Where in a row of the dict the value of the column `last_seen` is.


class TableBesideDict:
    """`rows` is what the table must hold, by id."""

    def __init__(self, table: Any, rows: dict[int, Any] | None = None) -> None:
        self.table = table
        self.rows: dict[int, Any] = {} if rows is None else rows

    def find(self, ids: Sequence[int]) -> None:
        found = self.table.lookup(batch(ids), insert=False)
        assert [row >= 0 for row in found.tolist()] == [id in self.rows for id in ids]

    def remove(self, ids: Sequence[int]) -> None:
        assert self.table.remove(batch(ids)) == len(self.rows.keys() & set(ids))
        for id in ids:
            self.rows.pop(id, None)

    def evict(self, below: int) -> None:
        gone = [id for id, row in self.rows.items() if row[SEEN] < below]
        if gone and len(gone) == len(self.rows) and all(self.rows[id][SEEN] == 0 for id in gone):
            with pytest.raises(UsageError, match="would remove all ids, by a column nobody has written"):
                self.table.evict("last_seen", below=below)
            return
        assert self.table.evict("last_seen", below=below) == len(gone)
        for id in gone:
            del self.rows[id]

    def clear(self) -> None:
        self.table.clear()
        self.rows.clear()
