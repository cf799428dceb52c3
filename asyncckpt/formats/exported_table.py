"""A table of a checkpoint, column by column as plain bytes: deltas folded, encodings undone, the rows of a shard only.

A shard takes its rows out of the shards of the checkpoint that may have some of them: all of one whose ids are all in
it, which is copied as it is; of any other one the rows whose ids are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from asyncckpt.engine.compact.fold import copies_of_column
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.formats.stored_tensors import JoinedSources
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.owned_ids import owned_mask
from asyncckpt.model.source import ByteSource
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.model.table_shard import Shard, buckets_of, may_share_ids
from asyncckpt.native import I64
from asyncckpt.plan.image import array_spec
from asyncckpt.plan.stored_tables import StoredShard, StoredTable
from asyncckpt.shard.reader import ChainReader
from asyncckpt.shard.stored_rows import plain_source
from asyncckpt.snapshot.layer_rows import IdsReader, layers_that_count


class ExportedTable:
    """A table of the checkpoint. `rows_count` counts the rows that were given out. Warns of one that is a part."""

    def __init__(self, table: StoredTable, reader: ChainReader) -> None:
        table.warn_of_part()
        self.name = table.name
        self.rows_count = 0
        self._reader = reader
        self._columns = table.columns
        # Of every shard, of every layer the positions of the rows that count; None: all of them.
        self._shards = [(shard, layers_that_count(shard, reader)) for shard in table.shards]

    def columns(self, wanted: Shard) -> Iterator[tuple[str, BlockSpec, ByteSource]]:
        """Yield the columns of one shard: name, form and bytes, rows in the same order in each."""
        found = [(shard, self._within(shard, rows, wanted)) for shard, rows in self._shards]
        chosen = [(shard, rows) for shard, rows in found if rows is not None]
        count = sum(_rows_count(shard, rows) for shard, rows in chosen)
        self.rows_count += count
        for column, blocks in self._columns.items():
            form = self._reader.block(blocks[0]).placed.spec
            dtype = dtype_by_name(form.dtype, owner=form.name).dtype
            spec = array_spec(form.name, dtype, (count, *form.shape[1:]), form.role)
            parts: list[tuple[int, ByteSource]] = []
            for shard, rows in chosen:
                for copy in copies_of_column(shard, column, rows, self._reader):
                    own = self._reader.block(copy.number).placed.spec
                    row_bytes = spec.bytes // max(1, count)
                    taken = own.shape[0] if copy.rows is None else len(copy.rows)
                    if taken:
                        parts.append((taken * row_bytes, plain_source(self._reader, copy.number, copy.rows)))
            yield column, spec, JoinedSources(parts)

    def _within(self, shard: StoredShard, rows: Sequence[I64 | None], wanted: Shard) -> list[I64 | None] | None:
        """Return the positions of the rows of every layer that are in a shard; None: there are none."""
        if not may_share_ids(shard.shard, wanted):
            return None
        if _is_within(shard.shard, wanted):
            return list(rows)
        found: list[I64 | None] = []
        for layer, counted in zip(shard.layers, rows, strict=True):
            reader = IdsReader(self._reader)
            ids = reader.add(layer.columns.get(ID_COLUMN, ()), layer.rows_count)
            reader.run()
            mask = owned_mask(ids if counted is None else np.ascontiguousarray(ids[counted]), shard=wanted)
            if mask.all():
                found.append(counted)
            else:
                found.append(np.flatnonzero(mask) if counted is None else counted[mask])
        return found


def _is_within(shard: Shard, wanted: Shard) -> bool:
    """Return whether all ids of a shard are in another one."""
    (begin, end, size), (first, last, whole) = buckets_of(shard), buckets_of(wanted)
    return (first, last) == (0, whole) or (size == whole and first <= begin and end <= last)


def _rows_count(shard: StoredShard, rows: Sequence[I64 | None]) -> int:
    pairs = zip(shard.layers, rows, strict=True)
    return sum(layer.rows_count if own is None else len(own) for layer, own in pairs)
