"""The plan of a save, cached: as long as nothing changes its shape, a save reads addresses and nothing else.

`PlanCache.plan` compares the state's facts with those of the plan it made last. For thousands of tensors that
comparison is a few milliseconds; making a plan is a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import UsageError
from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.format.manifest import BodyTemplate, render_body
from asyncckpt.format.tree import Node
from asyncckpt.model.block import BlockSpec, TableFacts
from asyncckpt.model.table import OpenCut, Role, Table, TableCut, TableSchema
from asyncckpt.plan.image import ImagePlan, plan_image, split_rows
from asyncckpt.plan.leaf_facts import LeafFacts, check_leaf
from asyncckpt.plan.leaf_names import check_name, tensor_names
from asyncckpt.plan.open_tables import OpenTables, can_be_exported, plan_open_tables
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
    """Makes plans, and keeps the last one for each choice of tables that are left open."""

    def __init__(self, *, parallel: int, rank: int) -> None:
        self._parallel = parallel
        self._rank = rank
        self._kept: dict[frozenset[str], _KeptPlan] = {}
        self.plans_made_count = 0

    def plan(self, flat: FlatState, cuts: Sequence[CutTable], *, left_open: Collection[str] = ()) -> SavePlan:
        """The plan for this state; the last one while its facts are the same. `left_open` names tables to export."""
        choice = frozenset(left_open)
        tables = [(item.name, item.schema, item.cut.rows_count, item.table.shard) for item in cuts]
        devices = [str(item.cut.column(column.name).device) for item in cuts for column in item.schema.columns]
        caches = [_cache_facts(item) for item in cuts if item.name in choice]
        key = (flat.tree, tables, devices, caches)
        kept = self._kept.get(choice)
        if kept is None or key != kept.key or not kept.facts.hold(flat.tensors):
            facts = LeafFacts.of(flat.tensors)
            plan = _make_plan(flat, cuts, left_open=choice, parallel=self._parallel, rank=self._rank)
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
    shapes = [(stored_dtype(column.dtype, owner=column.name), column.row_shape) for column in schema.columns]
    return sum(math.prod(stored.stored_shape((1, *shape))) * stored.stored_itemsize for stored, shape in shapes)


def _cache_facts(item: CutTable) -> object:
    assert isinstance(item.cut, OpenCut)
    columns = [item.cut.cached_column(column.name) for column in item.schema.columns]
    return len(item.cut.cache_map), [None if cached is None else (cached.shape, cached.dtype) for cached in columns]


def _make_plan(
    flat: FlatState, cuts: Sequence[CutTable], *, left_open: Collection[str], parallel: int, rank: int
) -> SavePlan:
    taken = [f"{item.name}@{column.name}" for item in cuts for column in item.schema.columns]
    names = tensor_names(flat.tree, tables=[*(item.name for item in cuts), *taken])
    specs: list[BlockSpec] = []
    columns: dict[int, tuple[int, str]] = {}
    to_export: list[tuple[int, OpenCut, list[BlockSpec]]] = []
    for number, item in enumerate(cuts):
        if item.name in left_open:
            assert isinstance(item.cut, OpenCut)
            to_export.append((number, item.cut, _column_specs(item)))
            continue
        for spec in [part for column in _column_specs(item) for part in split_rows(column)]:
            columns[len(specs)] = (number, str(spec.column))
            specs.append(spec)
    dense_begin = len(specs)
    for leaf, (tensor, name) in enumerate(zip(flat.tensors, names, strict=True)):
        specs += split_rows(_leaf_spec(tensor, name, leaf))
    image = plan_image(specs, parallel=parallel, rank=rank)
    opened = plan_open_tables(
        to_export, first_block=len(specs), first_file=len(image.files), first_byte=image.bytes, rank=rank
    )
    facts = tuple(TableFacts(name=t.name, rows_count=t.cut.rows_count, shard=t.table.shard) for t in cuts)
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


def _column_specs(item: CutTable) -> list[BlockSpec]:
    """One block per column of a table, whole."""
    check_name(item.name)
    if "@" in item.name:
        raise UsageError("table name holds '@', which separates table and column", found=item.name)
    index, count = item.table.shard
    width = len(str(count))
    slice_info = f"{index:0{width}d}@{index + 1:0{width}d}@{count}"
    specs: list[BlockSpec] = []
    for column in item.schema.columns:
        name = f"{item.name}@{column.name}"
        stored = stored_dtype(column.dtype, owner=name)
        shape = (item.cut.rows_count, *column.row_shape)
        spec = BlockSpec(
            name=name,
            role=column.role,
            dtype=stored.name,
            stored_dtype=stored.stored,
            stored_itemsize=stored.stored_itemsize,
            shape=shape,
            stored_shape=stored.stored_shape(shape),
            table=item.name,
            column=column.name,
            slice_info=slice_info,
        )
        specs.append(spec)
    return specs
