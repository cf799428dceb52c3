"""Fold the layers of a chain into one: which rows of which stored block a full checkpoint of the same step holds.

A row counts when it is the newest of its id and no newer layer has removed the id. Rows stand in the new checkpoint as
they stand in the layers, the newest layer first; each block of it comes from one stored block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncckpt.engine.compact.copy_blocks import BlockCopy
from asyncckpt.errors import SaveCancelledError, UnsupportedError
from asyncckpt.format.manifest import Chain, RankPart
from asyncckpt.model.block import TableFacts
from asyncckpt.model.table import Role
from asyncckpt.native import I64, Progress
from asyncckpt.plan.stored_tables import StoredShard, stored_tables
from asyncckpt.shard.reader import ChainReader
from asyncckpt.shard.stored_rows import copied_spec
from asyncckpt.snapshot.layer_rows import layers_that_count


@dataclass(frozen=True)
class FoldedPart:
    """What the part of one rank in the new checkpoint holds, in manifest order; `was` is that part of the old one."""

    was: RankPart
    tables: tuple[TableFacts, ...]
    copies: tuple[BlockCopy, ...]

    @property
    def bytes(self) -> int:
        return sum(copy.spec.bytes for copy in self.copies)


def fold_chain(chain: Chain, reader: ChainReader, progress: Progress) -> list[FoldedPart]:
    """Choose tables, rows and blocks. Reads the ids of tables that have several layers, verified; nothing else."""
    stored = {(shard.rank, shard.name): shard for table in stored_tables(chain).values() for shard in table.shards}
    parts = []
    first = 0
    for part in chain.newest.parts:
        copies: list[BlockCopy] = []
        tables = []
        for facts in part.tables:
            if progress.cancelled:
                raise SaveCancelledError(f"compaction of step {chain.step} was cancelled")
            rows_count = 0
            if (part.rank, facts.name) in stored:
                found, rows_count = _copies_of_shard(stored[part.rank, facts.name], reader)
                copies += found
            tables.append(replace(facts, rows_count=rows_count, whole=True, removed_count=0))
        copies += _dense_copies(part, first, chain.step)
        first += len(part.blocks)
        parts.append(FoldedPart(was=part, tables=tuple(tables), copies=tuple(copies)))
    return parts


def _dense_copies(part: RankPart, first: int, step: int) -> Iterator[BlockCopy]:
    """Return the dense blocks of a part, whose first block has the number `first`."""
    for number, block in enumerate(part.blocks, first):
        spec = block.placed.spec
        if not spec.is_known:
            raise UnsupportedError(
                f"tensor {spec.name!r} of step {step} has a dtype that this version cannot copy", found=spec.dtype
            )
        if spec.role is Role.DENSE:
            yield BlockCopy(number=number, rows=None, spec=spec)


def _copies_of_shard(stored: StoredShard, reader: ChainReader) -> tuple[list[BlockCopy], int]:
    """Return the blocks of a shard, the newest layer's rows first, and how many rows it has."""
    chosen = layers_that_count(stored, reader)
    rows_count = sum(
        layer.rows_count if rows is None else len(rows) for layer, rows in zip(stored.layers, chosen, strict=True)
    )
    copies: list[BlockCopy] = []
    for column in stored.layers[0].columns:
        copies += _placed(copies_of_column(stored, column, chosen, reader), rows_count)
    return copies, rows_count


def copies_of_column(
    stored: StoredShard, column: str, chosen: Sequence[I64 | None], reader: ChainReader
) -> list[BlockCopy]:
    """Return what is needed of the blocks of a column: the newest layer first, in the order of rows.

    At least one, if the shard has the column, so that its dtype and shape are known.

    chosen: of every layer, the positions of its rows that count, ascending; None: all of them.
    """
    copies = []
    blocks = [layer.columns.get(column, ()) for layer in stored.layers]
    for numbers, rows in zip(blocks, chosen, strict=True):
        specs = [(number, reader.block(number).placed.spec) for number in numbers]
        for number, spec in sorted(specs, key=lambda item: item[1].row_begin):
            mine = None if rows is None else _within(rows, spec.row_begin, spec.row_begin + spec.shape[0])
            if mine is not None and len(mine) == spec.shape[0]:
                mine = None
            if spec.shape[0] and (mine is None or len(mine)):
                copies.append(BlockCopy(number=number, rows=mine, spec=copied_spec(spec, mine)))
    found = next(filter(None, blocks), None)
    if not copies and found is not None:
        none = np.empty(0, dtype=np.int64)
        spec = copied_spec(reader.block(found[0]).placed.spec, none)
        copies.append(BlockCopy(number=found[0], rows=none, spec=spec))
    return copies


def _within(rows: I64, begin: int, end: int) -> I64:
    """Return those of ascending positions that are in [begin, end), counted from begin."""
    low, high = np.searchsorted(rows, [begin, end])
    return rows[low:high] - begin


def _placed(parts: Sequence[BlockCopy], rows_count: int) -> Iterator[BlockCopy]:
    """Return the parts of a column, each with its place in the whole."""
    begin = 0
    for part in parts:
        count, is_part = part.spec.shape[0], len(parts) > 1
        whole = (rows_count, *part.spec.shape[1:]) if is_part else None
        yield replace(part, spec=replace(part.spec, row_begin=begin if is_part else 0, whole_shape=whole))
        begin += count
    assert begin == rows_count
