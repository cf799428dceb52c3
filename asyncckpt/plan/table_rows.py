"""Which rows of each table a save is about, and what it captured of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from asyncckpt.model.block import TableFacts
from asyncckpt.model.row_places import RowPlaces
from asyncckpt.model.table import CutVersion, TableSchema
from asyncckpt.native import I64
from asyncckpt.plan.regions import ID_BYTES, TableRegion

NO_IDS: I64 = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class TableRows:
    """The part of a table, number `table` of the cuts, that a save writes.

    rows:    storage rows, ascending; None: all, and the table is whole
    removed: ids that are taken out of what the parents hold
    marked:  in an audit, storage rows that have a mark since the last committed checkpoint; all rows are captured then
    """

    table: int
    rows: I64 | None = None
    removed: I64 = field(default_factory=lambda: NO_IDS)
    marked: I64 | None = None

    @property
    def is_whole(self) -> bool:
        return self.rows is None

    def count(self, rows_count: int) -> int:
        return rows_count if self.rows is None else len(self.rows)


@dataclass(frozen=True)
class CapturedTable:
    """A table in an arena: the rows of its region are what `facts` tells. `version` is that of its cut, if it has one.

    places: where each storage row is, of a whole table. copied_count: rows that had to be copied; the other ones were
    there from an earlier snapshot.
    """

    region: TableRegion
    schema: TableSchema
    facts: TableFacts
    version: CutVersion | None
    places: RowPlaces | None
    copied_count: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of its rows and removed ids."""
        row_bytes = sum(column.row_bytes for column in self.region.columns.values())
        return self.facts.rows_count * row_bytes + self.facts.removed_count * ID_BYTES
