"""The id map of the portable twin: a dict, the id of every row, and the free rows as a stack."""

from __future__ import annotations

import sys

import numpy as np

from asyncckpt.native.contract import I64, U8, check_ids, check_mark, check_marks

_FIRST_ROWS = 64


class TwinIdMap:
    """int64 id -> row with the same rows as the compiled core; see contract.IdMap."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def rows_end(self) -> int:
        return self._rows_end

    @property
    def bytes(self) -> int:  # An int of Python takes 32.
        return sys.getsizeof(self._row_of) + 64 * len(self) + self._ids.nbytes + self._live.nbytes

    def ids_by_row(self) -> I64:
        return self._ids[: self._rows_end]

    def reserve(self, capacity: int) -> None:
        self._make_room(capacity)

    def find(self, ids: I64) -> I64:
        row_of = self._row_of
        return np.array([row_of.get(id, -1) for id in check_ids(ids).tolist()], dtype=np.int64)

    def insert(self, ids: I64, marks: tuple[U8, int] | None = None) -> tuple[I64, I64]:
        ids = check_ids(ids)
        if marks is not None:
            check_marks(marks[0], writable=True)
            check_mark(marks[1], name="mark")
        rows = np.empty(len(ids), dtype=np.int64)
        new_rows = []
        for index, id in enumerate(ids.tolist()):
            row = self._row_of.get(id)
            if row is None:
                row = self._take_row()
                self._row_of[id] = row
                self._ids[row] = id
                self._live[row] = True
                new_rows.append(row)
            rows[index] = row
        if marks is not None:
            by_row, mark = marks
            marked = rows[rows < len(by_row)]
            by_row[marked[by_row[marked] != 0]] = mark
        return rows, np.array(new_rows, dtype=np.int64)

    def remove(self, ids: I64) -> I64:
        ids = check_ids(ids)
        rows = np.empty(len(ids), dtype=np.int64)
        for index, id in enumerate(ids.tolist()):
            row = self._row_of.pop(id, -1)
            if row >= 0:
                self._live[row] = False
                self._free.append(row)
            rows[index] = row
        return rows

    def runs(self) -> I64:
        live = np.zeros(self._rows_end + 2, dtype=np.int8)
        live[1:-1] = self._live[: self._rows_end]
        # A run begins where a used row follows a free one, and ends where a free row follows a used one.
        return np.flatnonzero(np.diff(live)).astype(np.int64).reshape(-1, 2)

    def clear(self) -> None:
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._rows_end = 0
        self._ids = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._live = np.zeros(_FIRST_ROWS, dtype=np.bool_)

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._make_room(self._rows_end + 1)
        self._rows_end += 1
        return self._rows_end - 1

    def _make_room(self, rows_count: int) -> None:
        if rows_count > len(self._ids):
            more = max(rows_count, 2 * len(self._ids)) - len(self._ids)
            self._ids = np.concatenate([self._ids, np.zeros(more, dtype=np.int64)])
            self._live = np.concatenate([self._live, np.zeros(more, dtype=np.bool_)])
