"""A TinyTable that knows which rows were written since a cut: a dict of row -> epoch, and a list of removed ids.

As a stranger might write it: epochs are plain numbers, nothing is ever forgotten.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.model.table import CutVersion
from tests.testing.tiny_table import TinyCut, TinySuite, TinyTable

_sources = itertools.count(10**6)


class TrackedTinyTable(TinyTable):
    """Marks what `write` and `row` change; versions from before a load are not known."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.source = next(_sources)
        self.epoch = 1
        self.known_from = 1
        self.marks: dict[int, int] = {}
        self.gone: list[tuple[int, int]] = []

    def begin_cut(self) -> Any:
        self.hold()
        return self.new_cut()

    def new_cut(self) -> TrackedTinyCut:
        """A cut, by whoever holds the lock."""
        return TrackedTinyCut(self)

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> Any:
        load = super().begin_load(clear=clear, rows_count=rows_count, filled=filled)
        self.known_from = self.epoch
        return load

    def row(self, id: int) -> int:
        row = super().row(id)
        self.mark(row)
        return row

    def write(self, id: int, values: Mapping[str, torch.Tensor]) -> None:
        super().write(id, values)
        self.mark(self.rows[id])

    def mark(self, row: int) -> None:
        self.marks[row] = self.epoch

    def remove(self, id: int) -> None:
        self.marks.pop(self.rows[id], None)
        super().remove(id)
        self.gone.append((self.epoch, id))


class TrackedTinyCut(TinyCut):
    """A TracksRows by its members; it has a cache level too, maybe of no rows."""

    table: TrackedTinyTable

    def __init__(self, table: TrackedTinyTable) -> None:
        super().__init__(table)
        self.version = CutVersion(source=table.source, number=table.epoch)
        table.epoch += 1

    def touched_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        if not self.knows(version):
            return None
        rows = [row for row, epoch in self.table.marks.items() if epoch > version.number]
        return np.array(sorted(rows), dtype=np.int64)

    def removed_since(self, version: CutVersion) -> NDArray[np.int64] | None:
        if not self.knows(version):
            return None
        return np.array(sorted({id for epoch, id in self.table.gone if epoch > version.number}), dtype=np.int64)

    def knows(self, version: CutVersion) -> bool:
        own = version.source == self.table.source
        return own and self.table.known_from <= version.number < self.table.epoch


class TrackedTinySuite(TinySuite):
    """The suite of a TrackedTinyTable."""

    table_class: type[TinyTable] = TrackedTinyTable
