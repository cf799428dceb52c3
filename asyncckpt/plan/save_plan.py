"""The plan of a save, cached: as long as nothing changes its shape, a save reads addresses and nothing else.

Tables that have regions in the arena (regions.py) are left out: what a save writes of them changes with every row, and
is planned behind the fence (region_files.py).

`PlanCache.plan` compares the state's facts with those of the plan it made last. For thousands of tensors that
comparison is a few milliseconds; making a plan is a hundred.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import UsageError
from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.format.manifest import BodyTemplate, render_body
from asyncckpt.format.tree import Node
from asyncckpt.model.abilities import can_stay_open
from asyncckpt.model.block import BlockSpec, TableFacts
from asyncckpt.model.table import OpenCut, Role, Table, TableCut, TableSchema
from asyncckpt.plan.image import ImagePlan, plan_image, split_rows
from asyncckpt.plan.leaf_facts import LeafFacts, check_leaf
from asyncckpt.plan.leaf_names import check_name, tensor_names
from asyncckpt.plan.open_tables import OpenTables, can_be_exported, plan_open_tables
from asyncckpt.plan.regions import column_row_bytes
from asyncckpt.plan.state import FlatState


@dataclass(frozen=True)
class CutTable:
    """A table and its cut."""

    name: str
    table: Table
    schema: TableSchema
    cut: TableCut


@dataclass(frozen=True)
class DenseCopies:
    """Blocks that one native copy takes: contiguous leaves on the CPU. int64 arrays, one item a block."""

    block: NDArray[np.int64]
    leaf: NDArray[np.int64]
    source_offset: NDArray[np.int64]


@dataclass(frozen=True)
class SavePlan:
    """Blocks in manifest order with their image, and what of the live state fills each one.

    `raw` are the blocks copied by address; `foreign` the dense blocks that torch has to copy (other devices, strides);
    `columns` maps the other blocks of the image to (table number, column name). The blocks of `open` tables come behind
    those of the image: they are not captured but exported later.
    """

    image: ImagePlan
    body: BodyTemplate
    tree: Node
    tables: tuple[TableFacts, ...]
    raw: DenseCopies
    raw_leaves: tuple[int, ...]
    raw_bytes: NDArray[np.int64]
    raw_itemsizes: NDArray[np.int64]
    foreign: tuple[int, ...]
    columns: Mapping[int, tuple[int, str]]
    open: OpenTables

    @property
    def logical_bytes(self) -> int:
        return self.image.payload_bytes + self.open.payload_bytes

    @property
    def arena_bytes(self) -> int:
        """What the arena must hold: the image, and the copies of the caches of open tables behind it."""
        return self.image.bytes + self.open.cache_bytes

    @property
    def files_bytes(self) -> int:
        """Of all shard files together."""
        return sum(file.bytes for file in self.image.files) + sum(table.bytes for table in self.open.tables)


class PlanCache:
    """Makes plans, and keeps the last one for each choice of tables that are left open or in regions."""

    def __init__(self, *, parallel: int, rank: int) -> None:
        self._parallel = parallel
        self._rank = rank
        self._kept: dict[tuple[frozenset[str], frozenset[str]], _KeptPlan] = {}
        self.plans_made_count = 0

    def plan(
        self,
        flat: FlatState,
        cuts: Sequence[CutTable],
        *,
        left_open: Collection[str] = (),
        in_regions: Collection[str] = (),
    ) -> SavePlan:
        """The plan for this state; the last one while its facts are the same.

        left_open: names of tables to export. in_regions: names of tables that are not part of the plan.
        """
        choice = (frozenset(left_open), frozenset(in_regions))
        planned = [item for item in cuts if item.name not in choice[1]]
        tables = [(item.name, item.schema, item.cut.rows_count, item.table.shard) for item in planned]
        others = [(item.name, item.schema) for item in cuts if item.name in choice[1]]
        devices = [str(item.cut.column(column.name).device) for item in planned for column in item.schema.columns]
        caches = [_cache_facts(item) for item in cuts if item.name in choice[0]]
        key = (flat.tree, tables, others, devices, caches)
        kept = self._kept.get(choice)
        if kept is None or key != kept.key or not kept.facts.hold(flat.tensors):
            facts = LeafFacts.of(flat.tensors)
            plan = _make_plan(
                flat, cuts, left_open=choice[0], in_regions=choice[1], parallel=self._parallel, rank=self._rank
            )
            self._kept[choice] = kept = _KeptPlan(key=key, facts=facts, plan=plan)
            self.plans_made_count += 1
        return kept.plan


@dataclass(frozen=True)
class _KeptPlan:
    key: object
    facts: LeafFacts
    plan: SavePlan


def exportable(cuts: Sequence[CutTable]) -> list[str]:
    """Names of the tables that can be left open."""
    return [item.name for item in cuts if can_be_exported(item.cut, _row_bytes(item.schema))]


def _row_bytes(schema: TableSchema) -> int:
    return sum(column_row_bytes(schema).values())


def _cache_facts(item: CutTable) -> object:
    assert can_stay_open(item.cut)
    columns = [item.cut.cached_column(column.name) for column in item.schema.columns]
    return len(item.cut.cache_map), [None if cached is None else (cached.shape, cached.dtype) for cached in columns]


def _make_plan(
    flat: FlatState,
    cuts: Sequence[CutTable],
    *,
    left_open: Collection[str],
    in_regions: Collection[str],
    parallel: int,
    rank: int,
) -> SavePlan:
    taken = [f"{item.name}@{column.name}" for item in cuts for column in item.schema.columns]
    names = tensor_names(flat.tree, tables=[*(item.name for item in cuts), *taken])
    specs: list[BlockSpec] = []
    columns: dict[int, tuple[int, str]] = {}
    to_export: list[tuple[int, OpenCut, list[BlockSpec]]] = []
    for number, item in enumerate(cuts):
        if item.name in in_regions:
            column_specs(item.name, item.schema, item.table.shard, rows_count=0)  # Refused here, before the capture.
            continue
        columns_of = column_specs(item.name, item.schema, item.table.shard, rows_count=item.cut.rows_count)
        if item.name in left_open:
            assert can_stay_open(item.cut)
            to_export.append((number, item.cut, columns_of))
            continue
        for spec in [part for column in columns_of for part in split_rows(column)]:
            columns[len(specs)] = (number, str(spec.column))
            specs.append(spec)
    dense_begin = len(specs)
    for leaf, (tensor, name) in enumerate(zip(flat.tensors, names, strict=True)):
        specs += split_rows(_leaf_spec(tensor, name, leaf))
    image = plan_image(specs, parallel=parallel, rank=rank, needs_file=not in_regions)
    opened = plan_open_tables(
        to_export, first_block=len(specs), first_file=len(image.files), first_byte=image.bytes, rank=rank
    )
    facts = tuple(
        TableFacts(name=t.name, rows_count=t.cut.rows_count, shard=t.table.shard)
        for t in cuts
        if t.name not in in_regions
    )
    by_address = [_copied_by_address(tensor) for tensor in flat.tensors]
    raw_leaves = tuple(leaf for leaf, raw in enumerate(by_address) if raw)
    raw_tensors = [flat.tensors[leaf] for leaf in raw_leaves]
    dense = range(dense_begin, len(specs))
    return SavePlan(
        image=image,
        body=render_body(facts, flat.tree, [*image.blocks, *opened.blocks]),
        tree=flat.tree,
        tables=facts,
        raw=_raw_copies(specs, [number for number in dense if by_address[_leaf(specs[number])]]),
        raw_leaves=raw_leaves,
        raw_bytes=np.array([t.nbytes for t in raw_tensors], dtype=np.int64),
        raw_itemsizes=np.array([t.element_size() for t in raw_tensors], dtype=np.int64),
        foreign=tuple(number for number in dense if not by_address[_leaf(specs[number])]),
        columns=columns,
        open=opened,
    )


def _leaf(spec: BlockSpec) -> int:
    assert spec.leaf is not None
    return spec.leaf


def _raw_copies(specs: Sequence[BlockSpec], numbers: Sequence[int]) -> DenseCopies:
    offsets = []
    for number in numbers:
        spec = specs[number]
        offsets.append(0 if not spec.is_part else spec.row_begin * (spec.bytes // spec.shape[0]))
    return DenseCopies(
        block=np.array(numbers, dtype=np.int64),
        leaf=np.array([_leaf(specs[number]) for number in numbers], dtype=np.int64),
        source_offset=np.array(offsets, dtype=np.int64),
    )


def _copied_by_address(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _leaf_spec(tensor: torch.Tensor, name: str, leaf: int) -> BlockSpec:
    check_leaf(tensor, name)
    stored = stored_dtype(tensor.dtype, owner=name)
    shape = tuple(tensor.shape)
    return BlockSpec(
        name=name,
        role=Role.DENSE,
        dtype=stored.name,
        stored_dtype=stored.stored,
        stored_itemsize=stored.stored_itemsize,
        shape=shape,
        stored_shape=stored.stored_shape(shape),
        leaf=leaf,
    )


def column_specs(name: str, schema: TableSchema, shard: tuple[int, int], *, rows_count: int) -> list[BlockSpec]:
    """One block per column of a table, whole. UsageError for names that cannot be stored."""
    check_name(name)
    if "@" in name:
        raise UsageError("table name holds '@', which separates table and column", found=name)
    specs: list[BlockSpec] = []
    for column in schema.columns:
        full_name = f"{name}@{column.name}"
        if column.name.startswith("#"):
            raise UsageError(f"column name of table {name!r} begins with '#', which is reserved", found=column.name)
        stored = stored_dtype(column.dtype, owner=full_name)
        shape = (rows_count, *column.row_shape)
        spec = BlockSpec(
            name=full_name,
            role=column.role,
            dtype=stored.name,
            stored_dtype=stored.stored,
            stored_itemsize=stored.stored_itemsize,
            shape=shape,
            stored_shape=stored.stored_shape(shape),
            table=name,
            column=column.name,
            slice_info=slice_info(shard),
        )
        specs.append(spec)
    return specs


def slice_info(shard: tuple[int, int]) -> str:
    """RecIS' `begin@end@size` of a shard (index, count)."""
    index, count = shard
    width = len(str(count))
    return f"{index:0{width}d}@{index + 1:0{width}d}@{count}"
