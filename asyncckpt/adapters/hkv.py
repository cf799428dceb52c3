"""HierarchicalKV (NVIDIA Merlin): tables on a GPU that evict by score.

Experimental: tested against recorded shapes of the interface, never with the library itself; making a table warns.

Source of the interface: `nv::merlin::HashTable` of HierarchicalKV. It is a C++ header library; HkvBinding is what a
Python binding must provide, with the names and the order of arguments of the C++ methods. Facts that shape this:

1. `export_batch(n, offset, ...)` counts slots of the capacity, not rows, and holds the lock for one call: a scan is a
   cut only while nothing else changes the table. So the whole scan is one pause, and the size must be the same after
   it.
2. A value row is the user's vector: the weights, then optimizer states. They are split into columns here.
3. Scores are uint64. The column `score` holds their bit pattern as int64.
4. `insert_or_assign` keeps given scores only with `ignore_evict_strategy`.
5. Four ids mark empty and locked slots: as int64 -1, -2, -3 and, because of the mask in the comparison, -4. Rows with
   these ids would be silently lost, so both saves and loads refuse them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from asyncckpt.adapters.export_only import ExportOnlyTable, Rows, split_columns
from asyncckpt.errors import ConflictError, IncompatibleError, UnsupportedError, UsageError, must_be, warn
from asyncckpt.model.table import ID_COLUMN, Column, Role, TableSchema
from asyncckpt.modules.registry import register_adapter
from asyncckpt.native import I64
from asyncckpt.tables.slots import EMBEDDING_COLUMN, ID

SCORE_COLUMN = "score"
MODULE_KIND = "merlin_kv.torch.HashTable"
BATCH_SLOTS = 1 << 16
IDS_SHOWN_MAX = 5
RESERVED_BIT_MAX = 62


class HkvBinding(Protocol):
    """`nv::merlin::HashTable`; pointers are tensors on its device, streams are handles (0: the default one)."""

    def dim(self) -> int:
        """Return how many elements a value row has: weights and states together."""
        ...

    def capacity(self) -> int: ...
    def size(self, stream: int) -> int: ...
    def export_batch(
        self,
        n: int,
        offset: int,
        d_counter: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor,
        stream: int,
    ) -> None:
        """Write the rows in slots [offset, offset + n) to keys, values and scores, and their count to d_counter.

        keys int64 [n], values [n, dim], scores uint64 [n], d_counter int64 [1].
        """
        ...

    def insert_or_assign(
        self,
        n: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor,
        stream: int,
        unique_keys: bool,
        ignore_evict_strategy: bool,
    ) -> None: ...
    def reserve(self, new_capacity: int, stream: int) -> None: ...
    def clear(self, stream: int) -> None: ...


class HkvTable(ExportOnlyTable):
    """A HierarchicalKV table as a Table.

    dim      how many of the first elements of a value row are the column `embedding`
    states   name -> how many elements, for the columns after it in their order
    dtype    of the value row
    device   where the table expects its arguments
    shard    (index, count): the ids whose unsigned value modulo count is index
    replicated  every rank that has the table has all of its ids, with the same rows
    reserved_key_start_bit  the table's option of this name, which changes the reserved ids

    Make cuts on the training thread and its current stream. Raises UsageError if the columns are not the whole value
    row.
    """

    def __init__(
        self,
        name: str,
        table: HkvBinding,
        *,
        dim: int,
        states: Mapping[str, int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cuda",
        shard: tuple[int, int] = (0, 1),
        replicated: bool = False,
        reserved_key_start_bit: int = 0,
    ) -> None:
        warn("asyncckpt: saving tables of HierarchicalKV is experimental, and was never tested with it")
        widths = {EMBEDDING_COLUMN: dim, **(states or {})}
        if sum(widths.values()) != table.dim() or any(width < 1 for width in widths.values()):
            what = f"columns of HierarchicalKV table {name!r} are not its value row"
            raise UsageError(what, found=widths, expected=f"{table.dim()} elements in all")
        if not 0 <= reserved_key_start_bit <= RESERVED_BIT_MAX:
            what, rule = f"reserved_key_start_bit of table {name!r}", f"an int in [0, {RESERVED_BIT_MAX}]"
            raise must_be(what, rule, reserved_key_start_bit)
        super().__init__(name, _schema(widths, dtype), shard=shard, replicated=replicated, device=torch.device(device))
        self._table = table
        self._widths = widths
        self._dtype = dtype
        self._device = torch.device(device)
        self._reserved_mask, self._reserved = _reserved_ids(reserved_key_start_bit)

    def _export(self) -> Rows:
        stream = self._stream()
        size = self._table.size(stream)
        parts = [self._export_batch(offset, stream) for offset in range(0, self._table.capacity(), BATCH_SLOTS)]
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        count = len(found[ID_COLUMN])
        if not count == size == self._table.size(stream):
            what = f"HierarchicalKV table {self.name!r} changed while it was exported"
            hint = "begin a save between two steps, on the thread that trains"
            raise ConflictError(what, found=count, expected=size, hint=hint)
        self._check_ids(found[ID_COLUMN].numpy())
        return found

    def _export_batch(self, offset: int, stream: int) -> dict[str, torch.Tensor]:
        slots = min(BATCH_SLOTS, self._table.capacity() - offset)
        counter = torch.zeros(1, dtype=torch.int64, device=self._device)
        keys = torch.empty(slots, dtype=torch.int64, device=self._device)
        values = torch.empty((slots, self._table.dim()), dtype=self._dtype, device=self._device)
        scores = torch.empty(slots, dtype=torch.uint64, device=self._device)
        self._table.export_batch(slots, offset, counter, keys, values, scores, stream)
        count = int(counter.item())  # Waits for the stream.
        return {
            ID_COLUMN: keys[:count].cpu(),
            **split_columns(values[:count], self.schema(), self._widths),
            SCORE_COLUMN: scores.view(torch.int64)[:count].cpu(),
        }

    def _replace(self, rows: Rows) -> None:
        stream = self._stream()
        count = len(rows[ID_COLUMN])
        self._table.clear(stream)
        try:
            if count > self._table.capacity():
                self._table.reserve(count, stream)
            for begin in range(0, count, BATCH_SLOTS):
                self._insert({name: column[begin : begin + BATCH_SLOTS] for name, column in rows.items()}, stream)
            kept = self._table.size(stream)
            if kept != count:
                what = (
                    f"HierarchicalKV table {self.name!r} is too small for the checkpoint and evicted some of its rows"
                )
                raise IncompatibleError(what, found=kept, expected=count, hint="give it a larger max_capacity")
        except BaseException:
            self._table.clear(stream)
            raise

    def _insert(self, rows: Rows, stream: int) -> None:
        count = len(rows[ID_COLUMN])
        values = torch.cat([rows[name].reshape(count, -1) for name in self._widths], dim=1)
        self._table.insert_or_assign(
            count,
            rows[ID_COLUMN].to(self._device),
            values.to(self._device),
            rows[SCORE_COLUMN].to(self._device).view(torch.uint64),
            stream,
            True,  # unique_keys
            True,  # ignore_evict_strategy
        )

    def _check_ids(self, ids: I64) -> None:
        reserved = (ids.view(np.uint64) & np.uint64(self._reserved_mask)) == np.uint64(self._reserved)
        if reserved.any():
            what = f"HierarchicalKV table {self.name!r} cannot hold ids that mark empty and locked slots"
            found = ids[reserved][:IDS_SHOWN_MAX].tolist()
            raise UnsupportedError(what, found=found, hint="map these ids to others, in training and in the checkpoint")

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream) if self._device.type == "cuda" else 0


def hkv_tables(module: Any, name: str) -> Mapping[str, HkvTable]:
    """Make the table of a torch module over a HierarchicalKV table: the factory for `register_adapter`.

    The module has the attributes `table` (an HkvBinding), `dim`, `states`, `dtype` and `device`, and may have
    `shard`, `replicated` and `reserved_key_start_bit`: the arguments of HkvTable.
    """
    table = HkvTable(
        name or "hkv",
        module.table,
        dim=module.dim,
        states=module.states,
        dtype=module.dtype,
        device=module.device,
        shard=getattr(module, "shard", (0, 1)),
        replicated=getattr(module, "replicated", False),
        reserved_key_start_bit=getattr(module, "reserved_key_start_bit", 0),
    )
    return {table.name: table}


def _schema(widths: Mapping[str, int], dtype: torch.dtype) -> TableSchema:
    columns = [ID]
    for name, width in widths.items():
        role = Role.WEIGHT if name == EMBEDDING_COLUMN else Role.OPTIMIZER
        columns.append(Column(name=name, dtype=dtype, row_shape=(width,), role=role))
    columns.append(Column(name=SCORE_COLUMN, dtype=torch.int64, row_shape=(), role=Role.METADATA))
    return TableSchema(columns=tuple(columns))


def _reserved_ids(start_bit: int) -> tuple[int, int]:
    """Return (mask, value): an id is reserved if `id & mask == value`."""
    mask = (2**64 - 1) & ~(3 << start_bit)
    return mask, mask if start_bit == 0 else mask & ~1


register_adapter(MODULE_KIND, hkv_tables)
