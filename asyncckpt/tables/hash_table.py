"""HashTable: int64 id -> row of embedding, optimizer slots and metadata, growing as new ids come.

The id map is the native core's; the columns are torch tensors `[capacity, *row_shape]` that training code reads, and
updates by `update` or `rows`. An id keeps its row until it is removed, or `shrink` moves all rows together. Growth
moves the columns to new memory but keeps the row numbers, so fetch `embedding` and `slot(name)` again after a lookup
that may insert. Free rows are undefined.

Threads: see stored_table.py. Callers keep in-place updates of columns apart from a cut: the training thread makes the
cut, or waits while another thread does. `update` and `rows` wait by themselves.

On a device, a call queues its work on the current stream, after the work of the previous call on whatever stream that
used, and waits only for ids that are on a device.

Marks: a cut knows which rows were written since an earlier one (`TracksRows`). `update`, `rows`, `insert` and the
optimizers of this package mark what they write, a lookup with insert what it returns. Where other code has written to a
column since the last cut, as torch counts in-place writes, all rows count as written (decision 0022).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.model.table_shard import Shard
from asyncckpt.native import I64, U8
from asyncckpt.tables.candidates import CANDIDATES_MAX
from asyncckpt.tables.initializer import Initializer
from asyncckpt.tables.row_device import row_device, selected, sent
from asyncckpt.tables.slots import SlotSpec, table_layout
from asyncckpt.tables.table_arguments import checked_device, last_mentions
from asyncckpt.tables.trained_table import TrainedTable


class HashTable(TrainedTable):
    """A sparse table that a Saver can save. Implements `asyncckpt.model.table.Table`.

    optimizer_slots and metadata name further columns (see slots.py for the ways to describe one). shard is (index,
    count): the table holds the ids whose bit pattern, as an unsigned number, modulo count is index; or (begin, end,
    size): those for which it is in [begin, end) modulo size, as RecIS' slices with size 65,536. replicated: every rank
    that has the table has all of its ids, with the same rows. Where several ranks save together, a table is one or the
    other. A new row starts from the initializer and the fills, also where its row belonged to a removed id. Raises
    UsageError for wrong arguments and UnsupportedError for a dtype that tables cannot hold.

    admit_after     an id gets a row at its n-th lookup with insert; until then lookups give -1 (see `companions`)
    candidates_max  how many ids may be counted that have no row yet; beyond that, rare ones are forgotten
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        optimizer_slots: Mapping[str, SlotSpec] | None = None,
        metadata: Mapping[str, SlotSpec] | None = None,
        shard: Shard = (0, 1),
        replicated: bool = False,
        device: torch.device | str = "cpu",
        capacity: int = 1024,
        initializer: Initializer = None,
        admit_after: int = 1,
        candidates_max: int = CANDIDATES_MAX,
    ) -> None:
        layout = table_layout(dim, dtype=dtype, optimizer_slots=optimizer_slots, metadata=metadata)
        place = row_device(checked_device(name, device))
        super().__init__(
            name,
            layout,
            shard=shard,
            replicated=replicated,
            capacity=capacity,
            initializer=initializer,
            place=place,
            admit_after=admit_after,
            candidates_max=candidates_max,
        )
        self._level = self._store

    def __repr__(self) -> str:
        return f"HashTable({self._name!r}, dim={self.dim}, rows={len(self)}, shard={self._shard})"

    def used_rows(self) -> torch.Tensor:
        """Return the rows in use, int64 [n] on the table's device, ascending: the order of `ids()`."""
        with self._lock.hold("listing"):
            return sent(torch.from_numpy(self._store.rows()), self.device)

    def _make_again(self, arguments: Mapping[str, Any]) -> None:
        HashTable.__init__(self, **arguments)

    def _found(self, ids: I64, *, insert: bool, admitted: I64 | None) -> I64:
        if not insert:
            return self._store.find(ids)
        if admitted is None:
            return self._store.insert(ids, touch=True)
        rows = self._store.find(ids)
        taken = (rows >= 0) | np.isin(ids, admitted)
        rows[taken] = self._store.insert(ids[taken], touch=True)
        return rows

    def _known(self, ids: I64) -> NDArray[np.bool_]:
        return self._store.find(ids) >= 0

    def _set(self, ids: I64, values: dict[str, torch.Tensor]) -> None:
        found = self._store.insert(ids)
        order = last_mentions(found)
        self._store.write(found[order], selected(values, order))

    def _newest(self, ids: I64, *, only: str | None) -> tuple[dict[str, torch.Tensor], I64]:
        rows = self._store.find(ids)
        positions = np.flatnonzero(rows >= 0)
        return self._store.read(rows[positions], only=only), positions

    def _touch(self, rows: I64) -> None:
        if self._store.watchers:  # It is not known whether this comes before or behind the write.
            self._store.count_write_by_others()
        self._store.marks.mark_used(rows)

    def _find(self, ids: I64) -> I64:
        return self._store.find(ids)

    def _begin_write(self, rows: I64) -> NDArray[np.bool_]:
        return self._store.marks.mark_used(rows)

    def _to_mark(self, rows: I64) -> tuple[U8, int]:
        if self._store.watchers:
            self._store.watchers.rows_change(rows[rows >= 0])
        return self._store.marks.to_set(self._store.capacity)

    def _write(self, rows: I64, values: dict[str, torch.Tensor]) -> None:
        self._store.write_marked(rows, values)
