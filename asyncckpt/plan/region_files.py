"""The shard files of tables that lie in regions of an arena: planned behind the fence, when their rows are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncckpt.format.header import HeaderTemplate
from asyncckpt.model.block import REMOVED_COLUMN, BlockSpec, PlacedBlock
from asyncckpt.model.table import Role
from asyncckpt.plan.paged_image import plan_paged_image, split_pages
from asyncckpt.plan.save_plan import column_specs, slice_info
from asyncckpt.plan.table_rows import CapturedTable

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class RegionFile:
    """One shard file: behind its header come `extents`, (offset in the arena, bytes), one behind the other."""

    name: str
    header: HeaderTemplate
    bytes: int
    extents: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RegionFiles:
    """All files of a save's regions.

    `offsets` and `lengths` place every block in the arena; `pads`, (offset, bytes), are to be zeroed.
    """

    files: tuple[RegionFile, ...]
    blocks: tuple[PlacedBlock, ...]
    offsets: I64
    lengths: I64
    pads: tuple[tuple[int, int], ...]

    @property
    def payload_bytes(self) -> int:
        return sum(placed.spec.bytes for placed in self.blocks if placed.spec.role is not Role.PAD)


class RegionFilesCache:
    """Plans region files, and keeps the last ones as long as no table has got or lost rows."""

    def __init__(self) -> None:
        self._key: object = None
        self._kept: RegionFiles | None = None

    def plan(self, tables: Sequence[CapturedTable], *, parallel: int, rank: int, first_file: int) -> RegionFiles:
        """The files of these tables."""
        key = ([(table.region, table.schema, table.facts) for table in tables], parallel, rank, first_file)
        if self._kept is None or key != self._key:
            self._kept = plan_region_files(tables, parallel=parallel, rank=rank, first_file=first_file)
            self._key = key
        return self._kept


def captured_specs(table: CapturedTable) -> list[BlockSpec]:
    """The columns of a captured table, whole, and its removed ids if there are any."""
    facts = table.facts
    specs = column_specs(facts.name, table.schema, facts.shard, rows_count=facts.rows_count)
    if facts.removed_count:
        specs.append(removed_spec(facts.name, facts.shard, count=facts.removed_count))
    return specs


def removed_spec(table: str, shard: tuple[int, int], *, count: int) -> BlockSpec:
    """The block of ids that a delta removes from a table."""
    return BlockSpec(
        name=f"{table}@{REMOVED_COLUMN}",
        role=Role.REMOVED,
        dtype="int64",
        stored_dtype="I64",
        stored_itemsize=8,
        shape=(count,),
        stored_shape=(count,),
        table=table,
        column=REMOVED_COLUMN,
        slice_info=slice_info(shard),
    )


def plan_region_files(tables: Sequence[CapturedTable], *, parallel: int, rank: int, first_file: int) -> RegionFiles:
    """Give every column its place in a file; numbers of files count on from first_file."""
    specs: list[BlockSpec] = []
    offsets: list[int] = []
    for table in tables:
        for whole in captured_specs(table):
            region = table.region.column(str(whole.column))
            for spec in split_pages(whole, row_bytes=region.row_bytes):
                specs.append(spec)
                offsets.append(region.offset + spec.row_begin * region.row_bytes)
    image = plan_paged_image(specs, parallel=parallel, rank=rank, first_file=first_file)
    offsets += [0] * (len(image.blocks) - len(specs))
    files, pads = [], []
    for file in image.files:
        extents: list[tuple[int, int]] = []
        for number in file.blocks:
            spec = image.blocks[number].spec
            if spec.role is Role.PAD:
                offset, size = extents[-1]
                offsets[number] = offset + size
                pads.append((offset + size, spec.bytes))
                extents[-1] = (offset, size + spec.bytes)
            elif spec.bytes:
                extents.append((offsets[number], spec.bytes))
        files.append(RegionFile(name=file.name, header=file.header, bytes=file.bytes, extents=tuple(extents)))
    return RegionFiles(
        files=tuple(files),
        blocks=image.blocks,
        offsets=np.array(offsets, dtype=np.int64),
        lengths=np.fromiter((placed.spec.bytes for placed in image.blocks), dtype=np.int64, count=len(image.blocks)),
        pads=tuple(pads),
    )
