"""The plan of a save, cached: as long as nothing changes its shape, a save reads addresses and nothing else.

Tables that have regions in the arena (regions.py) are left out: what a save writes of them changes with every row, and
is planned after the fence.

`PlanCache.plan` compares the state's facts (leaf_facts.py) with those of the plan it made last, and which leaves share
memory; or leaves that to the capture, which has to look in any case. For thousands of tensors making a plan takes a
hundred milliseconds. Addresses and sizes of storages may change from save to save and are read each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import xxhash

from asyncckpt.errors import UsageError
from asyncckpt.format.coverage import covers
from asyncckpt.format.tree import VALUE, Node, leaves, path_name, tensor_names
from asyncckpt.format.write_manifest import BodyTemplate, render_body
from asyncckpt.model.block import BlockSpec, TableFacts
from asyncckpt.model.object_classes import class_names
from asyncckpt.model.sharing import NOTHING_SHARED, Sharing
from asyncckpt.model.table import DeferredCut, Table, TableCut, TableSchema, can_be_deferred, owns_ids
from asyncckpt.model.table_shard import Shard
from asyncckpt.plan.deferred_tables import DeferredTables, plan_deferred_tables
from asyncckpt.plan.dense_blocks import BY_TORCH, CopyWays, TensorPieces, box_spec
from asyncckpt.plan.image import ImagePlan, plan_image, split_rows
from asyncckpt.plan.leaf_facts import LeafFacts, LeafMemory, addresses_of
from asyncckpt.plan.leaf_memory import check_leaf, sharing_of
from asyncckpt.plan.regions import column_specs
from asyncckpt.plan.state import FlatState


@dataclass(frozen=True)
class CutTable:
    """A table and its cut."""

    name: str
    table: Table
    schema: TableSchema
    cut: TableCut

    @property
    def shard(self) -> Shard:
        """As the manifest records it: nothing for a table that owns its ids by another rule than their modulo."""
        return (0, 1) if owns_ids(self.table) else self.table.shard


@dataclass(frozen=True)
class SavePlan:
    """Blocks in manifest order with their image, and what of the live state fills each one.

    sharing: tied leaves have no blocks. classes: names of those of the tree's objects, one item for each. columns: the
    first blocks of the image, by number: (table number, column name). pieces: the other ones, dense, as pieces of
    FlatState.held; ways: how these are copied; facts: theirs; memory: which of them share it, None where that does not
    matter. deferred: the blocks of these tables come after those of the image; they are not captured but exported
    later.
    """

    image: ImagePlan
    body: BodyTemplate
    tree: Node
    sharing: Sharing
    classes: tuple[tuple[str, ...], ...]
    tables: tuple[TableFacts, ...]
    columns: Mapping[int, tuple[int, str]]
    pieces: TensorPieces
    ways: CopyWays
    facts: LeafFacts
    memory: LeafMemory | None
    deferred: DeferredTables

    @cached_property
    def structure(self) -> str:
        """A digest of what the manifest will say of the dense tensors, but their digests."""
        return xxhash.xxh3_128_hexdigest(self.body.text[self.body.tables_end :])

    @cached_property
    def logical_bytes(self) -> int:
        return int(self.image.lengths.sum()) + sum(placed.spec.bytes for placed in self.deferred.blocks)

    def block_of_piece(self, number: int) -> int:
        return len(self.columns) + number

    def dense_rows(self, block: int, held: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the live rows of a dense block. held: as those of the state."""
        return self.pieces.rows(block - len(self.columns), held)

    def name_of(self, tensor: int) -> str:
        """Return the name of a tensor, by its number among FlatState.held."""
        pieces = np.flatnonzero(self.pieces.tensor == tensor).tolist()
        if pieces:
            return self.image.blocks[self.block_of_piece(pieces[0])].spec.name
        paths = [path for path, node in leaves(self.tree) if node is not VALUE]  # It is tied, or others write it.
        return path_name(paths[tensor]) if tensor < len(paths) else f"of rank {tensor}"

    def fits(self, held: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors of a state with this tree are what was planned."""
        places = self.facts.places(held)
        return places is not None and (self.memory is None or self.memory.is_shared_alike(places.addresses))

    @property
    def arena_bytes(self) -> int:
        """What the arena must hold: the image, and after it the copies of the caches of open tables."""
        return self.image.bytes + self.deferred.cache_bytes


class PlanCache:
    """Makes plans, and keeps the last one for each choice of tables that are deferred or in regions.

    device_of: the number of the device from which a tensor is copied by address; None: the CPU, or only torch can.
    """

    def __init__(
        self,
        *,
        parallel: int,
        rank: int = 0,
        ranks_count: int = 1,
        device_of: Callable[[torch.Tensor], int | None] = lambda tensor: None,
    ) -> None:
        self._parallel = parallel
        self._device_of = device_of
        self._rank = rank
        self._ranks_count = ranks_count
        self._kept: dict[tuple[frozenset[str], frozenset[str], bool], _KeptPlan] = {}
        self.tree: Node | None = None
        self.is_kept = False  # The plan that was returned last was made for an earlier save.
        self.plans_made_count = 0

    def plan(
        self,
        flat: FlatState,
        cuts: Sequence[CutTable],
        *,
        deferred: Collection[str] = (),
        in_regions: Collection[str] = (),
        by_peers: frozenset[int] = frozenset(),
        shares: bool = True,
        by_tree: bool = False,
    ) -> SavePlan:
        """Return the plan for this state: the last one while its facts are the same.

        deferred: names of tables to export. in_regions: names of tables that are not part of the plan. by_peers: leaves
        that other ranks write. shares: False: each leaf has blocks of its own, whatever memory it shares. by_tree:
        return the last one of this tree and these tables; the capture compares the facts.
        """
        choice = (frozenset(deferred), frozenset(in_regions), bool(by_peers))
        planned = [item for item in cuts if item.name not in choice[1]]
        tables = [(item.name, item.schema, item.cut.rows_count, item.shard) for item in planned]
        others = [(item.name, item.schema) for item in cuts if item.name in choice[1]]
        devices = [str(item.cut.column(column.name).device) for item in planned for column in item.schema.columns]
        caches = [_cache_facts(item) for item in cuts if item.name in choice[0]]
        spread = [
            (number, leaf.whole_shape, leaf.boxes, leaf.is_written_here(self._ranks_count))
            for number, leaf in flat.sharded.items()
        ]
        classes = tuple(class_names(owner) for _, owner in flat.stateful)
        key = (classes, tables, others, devices, caches, spread, by_peers)
        kept = self._kept.get(choice)
        is_same = kept is not None and key == kept.key and flat.has_tree(kept.plan.tree)
        self.is_kept = is_same and kept is not None and (by_tree or kept.plan.fits(flat.held))
        if kept is None or not self.is_kept:
            self.tree = None  # If this state is refused, the next one is walked through as a new one.
            if self._ranks_count == 1:
                check_all_here(flat)
            plan = self._make(flat, cuts, choice[0], choice[1], by_peers, shares, classes)
            self._kept[choice] = kept = _KeptPlan(key, plan)
            self.plans_made_count += 1
        self.tree = kept.plan.tree
        return kept.plan

    def _make(
        self,
        flat: FlatState,
        cuts: Sequence[CutTable],
        deferred: Collection[str],
        in_regions: Collection[str],
        by_peers: frozenset[int],
        shares: bool,
        classes: tuple[tuple[str, ...], ...],
    ) -> SavePlan:
        taken = [f"{item.name}@{column.name}" for item in cuts for column in item.schema.columns]
        names = tensor_names(flat.tree, tables=[*(item.name for item in cuts), *taken])
        specs: list[BlockSpec] = []
        columns: dict[int, tuple[int, str]] = {}
        to_export: list[tuple[int, DeferredCut, list[BlockSpec]]] = []
        for number, item in enumerate(cuts):
            if item.name in in_regions:
                column_specs(item.name, item.schema, item.shard, rows_count=0)  # Refused here, before the capture.
                continue
            columns_of = column_specs(item.name, item.schema, item.shard, rows_count=item.cut.rows_count)
            if item.name in deferred:
                assert can_be_deferred(item.cut)
                to_export.append((number, item.cut, columns_of))
                continue
            for spec in [part for column in columns_of for part in split_rows(column)]:
                columns[len(specs)] = (number, str(spec.column))
                specs.append(spec)
        still = flat.held_still()  # All that follows is of tensors of these very facts.
        for leaf, (name, *tensors) in enumerate(zip(names, flat.tensors, still.tensors, strict=True)):
            for tensor in tensors if leaf not in flat.sharded else ():  # Those of the user may be of a kind that hides.
                check_leaf(tensor, name)
        flat = still
        memory, sharing = None, NOTHING_SHARED
        if shares:
            memory = LeafMemory(flat, self._device_of, addresses_of(flat.held))
            sharing = sharing_of(flat, memory, names)
        left_out = by_peers.union(item.leaf for item in sharing.tied)
        boxes = _dense_specs(flat, names, left_out, self._ranks_count)
        parts = [(part, box, tensor) for box, tensor in boxes for part in split_rows(box)]
        specs += [part for part, _, _ in parts]
        image = plan_image(
            specs, parallel=self._parallel, rank=self._rank, first_file=len(to_export), needs_file=not in_regions
        )
        opened = plan_deferred_tables(to_export, first_byte=image.bytes, rank=self._rank)
        facts = tuple(
            TableFacts(name=t.name, rows_count=t.cut.rows_count, shard=t.shard)
            for t in cuts
            if t.name not in in_regions
        )
        pieces = TensorPieces.of(parts, place=image.offsets[len(columns) :], bytes=image.lengths[len(columns) :])
        ways = CopyWays.of(flat.held, self._device_of)
        is_copied = np.isin(np.arange(len(flat.held)), pieces.tensor)
        # Nobody asks for the addresses of what other ranks write.
        ways = replace(ways, way=np.where(is_copied, ways.way, BY_TORCH), spans=np.where(is_copied, ways.spans, 0))
        return SavePlan(
            image=image,
            body=render_body(facts, flat.tree, [*image.blocks, *opened.blocks], sharing=sharing, classes=classes),
            tree=flat.tree,
            sharing=sharing,
            classes=classes,
            tables=facts,
            columns=columns,
            pieces=pieces,
            ways=ways,
            facts=LeafFacts(flat.held),
            memory=memory,
            deferred=opened,
        )


@dataclass(frozen=True)
class _KeptPlan:
    key: object
    plan: SavePlan


def _cache_facts(item: CutTable) -> object:
    assert can_be_deferred(item.cut)
    columns = [item.cut.cached_column(column.name) for column in item.schema.columns]
    return len(item.cut.cache_map), [None if cached is None else (cached.shape, cached.dtype) for cached in columns]


def _dense_specs(
    flat: FlatState, names: Sequence[str], left_out: Collection[int], ranks_count: int
) -> Iterator[tuple[BlockSpec, int]]:
    """Return what this rank writes of every leaf but some, and in which tensor of FlatState.held that is."""
    more = len(flat.tensors)
    for leaf, (tensor, name) in enumerate(zip(flat.tensors, names, strict=True)):
        sharded = flat.sharded.get(leaf)
        if sharded is None:
            if leaf not in left_out:
                shape = tuple(tensor.shape)
                yield box_spec(name, tensor.dtype, begin=(), shape=shape, whole_shape=shape, leaf=leaf), leaf
            continue
        is_written = leaf not in left_out and sharded.is_written_here(ranks_count)
        for number, piece in enumerate(sharded.pieces):
            held = leaf if number == 0 else more + number - 1
            part = flat.held[held]
            check_leaf(part, name)
            if is_written and (part.numel() or not math.prod(sharded.whole_shape)):
                spec = box_spec(
                    name,
                    sharded.dtype,
                    begin=piece.begin,
                    shape=part.shape,
                    whole_shape=sharded.whole_shape,
                    leaf=leaf,
                    # Of a tensor without elements every rank may have all.
                    is_part=tuple(part.shape) != sharded.whole_shape or not part.numel(),
                )
                yield spec, held
        more += max(0, len(sharded.pieces) - 1)


def check_all_here(flat: FlatState) -> None:
    """Raise UsageError when a leaf is spread over ranks, of which there is one, or its pieces do not make it up."""
    paths = [path for path, node in leaves(flat.tree) if node is not VALUE] if flat.sharded else []
    for leaf, sharded in flat.sharded.items():
        name = path_name(paths[leaf])
        spans = [(begin, tuple(shape)) for begin, shape in sharded.boxes]
        boxes = [tuple((at, at + size) for at, size in zip(*span, strict=True)) for span in spans]
        if not sharded.is_written_here(1) or not covers(boxes, sharded.whole_shape, name=name):
            raise UsageError(
                f"tensor {name!r} is not here in full, or twice in part, and this rank saves alone",
                found=spans[:8],
                expected=sharded.whole_shape,
                hint="make the Saver on every rank, with RankOptions(process_group=torch.distributed.group.WORLD) or "
                "with shard_index and shard_num; RankOptions(alone=True) is for what is here in full",
            )
