"""Admission candidates: ids that have no row yet, and how often each of them was looked up.

A table of its own beside the table it serves, with the columns `id` and `count` (int64), so that it is saved in the
same cut and loaded like any other. An id leaves it when it is admitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.model.table import Column, Role, TableSchema
from asyncckpt.model.table_shard import Shard
from asyncckpt.native import I64
from asyncckpt.tables.row_store import RowStore
from asyncckpt.tables.slots import ID, Layout
from asyncckpt.tables.stored_table import StoredTable

CANDIDATES = "candidates"
COUNT_COLUMN = "count"
FIRST_ROWS = 1024
CANDIDATES_MAX = 1 << 22
_SCHEMA = TableSchema(
    columns=(
        ID,
        Column(name=COUNT_COLUMN, dtype=torch.int64, row_shape=(), role=Role.METADATA),
    )
)


class CandidateTable(StoredTable):
    """Counts of ids that have no row yet. Implements `asyncckpt.model.table.Table`.

    It has a lock of its own, which no thread takes that holds another table's: a save cuts both in either order.

    rows_max  where there would be more ids than this, all counts are halved, and ids whose count becomes 0 forgotten,
              until there are half as many: none is admitted too early, rare ones later or never
    """

    def __init__(self, name: str, *, rows_max: int, shard: Shard, replicated: bool = False) -> None:
        self._rows_max = rows_max
        layout = Layout(schema=_SCHEMA, fills={COUNT_COLUMN: 0})
        store = RowStore(layout, capacity=FIRST_ROWS, initializer=None, fingerprints_ids=replicated)
        super().__init__(name, _SCHEMA, shard=shard, replicated=replicated, store=store)

    def __repr__(self) -> str:
        return f"CandidateTable({self._name!r}, rows={len(self)}, shard={self._shard})"

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "rows_max": self._rows_max}

    def _make_again(self, arguments: Mapping[str, Any]) -> None:
        CandidateTable.__init__(self, **arguments)

    def counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the ids and of their counts, both int64 [n] on the CPU."""
        with self._lock.hold("listing"):
            rows = self._store.rows()
            values = self._store.column(COUNT_COLUMN)[torch.from_numpy(rows)]
            return torch.from_numpy(self._store.ids_of(rows)), values

    def add(self, ids: I64, *, admit_at: int) -> I64:
        """Count one lookup of each of ids (distinct); return those that reach admit_at, to be removed here."""
        with self._lock.hold("count"):
            rows = self._store.insert(ids)
            seen = self._store.read(rows)[COUNT_COLUMN] + 1
            self._store.write(rows, {COUNT_COLUMN: seen})
            admitted: I64 = ids[(seen >= admit_at).numpy()]
            if len(self._store) > self._rows_max:
                self._forget(ids_max=self._rows_max // 2)
            return admitted

    def _forget(self, *, ids_max: int) -> None:
        ids, values = self._store.read_all(only=COUNT_COLUMN)
        counts = values[COUNT_COLUMN]
        while len(counts) > ids_max:
            counts = counts // 2
            kept = (counts > 0).numpy()
            self._store.remove(ids[~kept])
            ids, counts = ids[kept], counts[torch.from_numpy(kept)]
        self._store.write(self._store.find(ids), {COUNT_COLUMN: counts})
