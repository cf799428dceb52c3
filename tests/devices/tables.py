"""A table with its storage and its cache each on a device or on the host, and beside it what it must hold.

Ids and rows are the host's business; values are written by operations that are queued. A row that the cache holds is
written there alone, so the storage's is of another step until it is put back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt import HashTable
from asyncckpt.table import Column, CutVersion, Role, TableSchema
from asyncckpt.tables.touched_rows import TouchedRows
from tests.simulated_device import SimulatedRuntime

DIM = 5
SLOTS: dict[str, Any] = {"sum": (torch.float64, ())}
SCHEMA = TableSchema(
    columns=(
        Column("id", torch.int64, (), Role.ID),
        Column("embedding", torch.float32, (DIM,), Role.WEIGHT),
        Column("sum", torch.float64, (), Role.OPTIMIZER),
    )
)
Rows = dict[int, float]
Columns = dict[str, torch.Tensor]


class DeviceTable:
    """Implements Table; all columns of a row hold one number. device None: of the host. cache_rows 0: there is none.

    has_marks: whether cuts know which rows were written.
    """

    name = "table"
    shard = (0, 1)

    def __init__(
        self,
        runtime: SimulatedRuntime,
        *,
        capacity: int,
        storage: int | None,
        cache: int | None = None,
        cache_rows: int = 0,
        has_marks: bool = True,
    ) -> None:
        self._runtime = runtime
        self._storage = self._new_columns(capacity, storage)
        self._cached = self._new_columns(cache_rows, cache)
        self.cache_map = torch.full((cache_rows,), -1, dtype=torch.int64)
        self.ids = torch.full((capacity,), -1, dtype=torch.int64)
        self.marks = TouchedRows(capacity)
        self._kind_of_cut = {
            (False, False): DeviceCut,
            (True, False): MarkedCut,
            (False, True): CachedCut,
            (True, True): CachedMarkedCut,
        }[has_marks, cache_rows > 0]
        self.rows: Rows = {}  # What it must hold.
        self._number = 0

    def schema(self) -> TableSchema:
        return SCHEMA

    def begin_cut(self) -> DeviceCut:
        return self._kind_of_cut(self)

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> Any:
        raise NotImplementedError("is loaded into a table of the host")

    def insert(self, ids: Iterable[int]) -> None:
        """Give ids a row each, and write it."""
        free = np.flatnonzero(self.ids.numpy() < 0)
        taken = [int(row) for row, _ in zip(free, ids, strict=False)]
        for row, id in zip(taken, ids, strict=False):
            self.ids[row] = id
        self.marks.begin_rows(np.array(taken, dtype=np.int64), rows_end=max([0, *taken]) + 1)
        self.write([int(self.ids[row]) for row in taken])

    def remove(self, ids: Sequence[int]) -> None:
        rows = self._rows_of(ids)
        self.marks.remove(rows, np.array(ids, dtype=np.int64), used_count=len(self.rows))
        self.ids[torch.from_numpy(rows)] = -1
        self.cache_map[torch.isin(self.cache_map, torch.from_numpy(rows))] = -1
        for id in ids:
            del self.rows[id]

    def write(self, ids: Sequence[int]) -> None:
        """Give the rows of ids new values, each where it is at home now."""
        for id, row in zip(ids, self._rows_of(ids).tolist(), strict=True):
            self._number += 1
            self.rows[id] = self._number
            places = torch.nonzero(self.cache_map == row).flatten().tolist()
            for tensor in (self._cached if places else self._storage).values():
                tensor[places[0] if places else row].fill_(self._number)
        self.marks.mark(self._rows_of(ids))

    def move_to_cache(self, ids: Sequence[int]) -> None:
        """Put the rows of ids into the cache, and others back where there is no room."""
        for place, (id, row) in enumerate(zip(ids, self._rows_of(ids).tolist(), strict=True)):
            if place >= len(self.cache_map) or bool((self.cache_map == row).any()):
                continue
            self._put_back(place)
            for tensor in self._cached.values():
                tensor[place].fill_(self.rows[id])
            self.cache_map[place] = row

    def _put_back(self, place: int) -> None:
        row = int(self.cache_map[place])
        if row >= 0:
            for tensor in self._storage.values():
                tensor[row].fill_(self.rows[int(self.ids[row])])
            self.cache_map[place] = -1

    def _rows_of(self, ids: Sequence[int]) -> NDArray[np.int64]:
        rows = {int(id): row for row, id in enumerate(self.ids.tolist()) if id >= 0}
        return np.array([rows[id] for id in ids], dtype=np.int64)

    def _new_columns(self, rows: int, device: int | None) -> Columns:
        shapes = {column.name: (rows, *column.row_shape) for column in SCHEMA.columns[1:]}
        dtypes = {column.name: column.dtype for column in SCHEMA.columns}
        if device is None:
            return {name: torch.full(shape, -7, dtype=dtypes[name]) for name, shape in shapes.items()}
        return {name: self._runtime.new_tensor(shape, dtypes[name], device) for name, shape in shapes.items()}


class DeviceCut:
    """Implements TableCut."""

    def __init__(self, table: DeviceTable) -> None:
        self._table = table
        used = np.flatnonzero(table.ids.numpy() >= 0)
        breaks = np.flatnonzero(np.diff(used) > 1) + 1
        parts = [part for part in np.split(used, breaks) if len(part)]
        self.runs = np.array([(part[0], part[-1] + 1) for part in parts], dtype=np.int64).reshape(-1, 2)
        self.rows_count = len(used)

    def column(self, name: str) -> torch.Tensor:
        return self._table.ids if name == "id" else self._table._storage[name]

    def fence(self) -> None:
        pass

    def end(self, ok: bool) -> None:
        pass


class MarkedCut(DeviceCut):
    """Implements TracksIds too."""

    def __init__(self, table: DeviceTable) -> None:
        super().__init__(table)
        self.version: CutVersion = table.marks.end_epoch()

    def touched_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        return self._table.marks.touched_since(version)

    def removed_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        return self._table.marks.removed_since(version)

    def begun_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        return self._table.marks.begun_since(version)


class CachedCut(DeviceCut):
    """Implements OverlaidCut too."""

    @property
    def cache_map(self) -> torch.Tensor:
        return self._table.cache_map

    def cached_column(self, name: str) -> torch.Tensor | None:
        return None if name == "id" else self._table._cached[name]


class CachedMarkedCut(CachedCut, MarkedCut):
    """All of it."""


def new_target() -> HashTable:
    """A table of the host that such a table is loaded into."""
    return HashTable("table", DIM, optimizer_slots=SLOTS)


def rows_of(table: HashTable) -> Rows:
    """All rows by id; -1 for one whose columns do not agree."""
    ids, rows = table.ids(), table.used_rows()
    numbers = torch.cat([table.embedding[rows].double(), table.slot("sum")[rows].unsqueeze(1)], dim=1)
    return {
        id: values[0] if len(set(values)) == 1 else -1.0
        for id, values in zip(ids.tolist(), numbers.tolist(), strict=True)
    }
